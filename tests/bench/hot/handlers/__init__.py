"""Handlers that are measured."""
