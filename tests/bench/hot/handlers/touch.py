"""Looks at each record's data and makes no row of it: what ``kclpy_process.py`` does."""

from mldserver import Record, batches

schema = "size BIGINT"
windows = batches(max_rows=1000, max_age="1 hour")


def process_records(records: list[Record]) -> None:
    """Decode every record's data, which happens when it is asked for."""
    for record in records:
        len(record.data)
