"""Returns rows as ``counted.py`` does, without state."""

from mldserver import Record, batches

schema = "key STRING, n BIGINT"
windows = batches(max_rows=100_000_000, max_age="1 hour")


def process_record(record: Record) -> tuple[str | None, int]:
    """Return the key, and the size of the data."""
    return record.partition_key, len(record.data)
