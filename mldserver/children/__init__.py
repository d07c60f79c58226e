"""Child processes: how they are started, spoken with, read, restarted and ended. Knows nothing of what they do."""
