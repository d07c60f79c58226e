"""``handlers.visits``, whose rows stay in one open window."""

from handlers.visits import leave, process_record, schema
from mldserver import batches

__all__ = ["leave", "process_record", "schema", "windows"]

windows = batches(max_rows=100_000_000, max_age="1 hour")
