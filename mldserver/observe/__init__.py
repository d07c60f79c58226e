"""Structured logs: names, schema, writing, reading."""
