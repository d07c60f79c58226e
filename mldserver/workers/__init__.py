"""Handlers in worker processes: what hurts a worker does not hurt the server."""
