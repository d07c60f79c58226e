"""Returns each click as a row: what ``session_window`` then groups."""

from mldserver import Record, batches

schema = "user STRING, at TIMESTAMP"
windows = batches(max_rows=100_000_000, max_age="1 hour")


def process_record(record: Record) -> tuple[str | None, str]:
    """Return the user, and when the click was."""
    return record.partition_key, record.json()["at"]
