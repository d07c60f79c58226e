"""The user's code: found, checked and described."""
