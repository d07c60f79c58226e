"""Looks at each record's data and makes no row of it: what ``kclpy_process.py`` does."""

from mldserver import Record, batches

schema = "size BIGINT"
windows = batches(max_rows=1000, max_age="1 hour")

seen = 0


def process_records(records: list[Record]) -> None:
    """Count bytes."""
    global seen
    for record in records:
        seen += len(record.data)
