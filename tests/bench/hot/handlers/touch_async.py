"""Does as ``touch.py`` does, as a coroutine."""

from mldserver import Record, batches

schema = "size BIGINT"
windows = batches(max_rows=1000, max_age="1 hour")


async def process_records(records: list[Record]) -> None:
    """Decode every record's data, which happens when it is asked for."""
    for record in records:
        len(record.data)
