"""Versions of the user's code: how they are stored, and how running workers change to another one."""
