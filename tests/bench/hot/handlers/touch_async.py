"""Does as ``touch.py`` does, on the event loop instead of a thread of its own."""

from mldserver import Record, batches

schema = "size BIGINT"
windows = batches(max_rows=1000, max_age="1 hour")

seen = 0


async def process_records(records: list[Record]) -> None:
    """Count bytes."""
    global seen
    for record in records:
        seen += len(record.data)
