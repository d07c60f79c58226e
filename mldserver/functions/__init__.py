"""A function's life: its versions, packages and commands."""
