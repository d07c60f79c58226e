"""What every part may use and what knows nothing of ours but errors."""
