"""Durable state: the ledger of positions, segments, windows and dead letters."""
