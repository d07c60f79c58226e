"""User code that must NOT pass: each line that ends with ``# error`` is one error (see ``test_typing.py``)."""

from mldserver import Batch, Record, Window, batches, tumbling

tumbling(on="at")  # error
tumbling("1 hour", late="1 minute")  # error
tumbling(["1 hour"])  # error
batches(1000)  # error
batches(max_rows="many")  # error


def process_record(record: Record) -> str:
    """Use a record in ways that it does not have."""
    record.shard = "x"  # error
    record.data = b""  # error
    return record.data  # error


def process_records(batch: Batch) -> int:
    """Use a batch in ways that it does not have."""
    batch.append(1)  # error
    return batch[0]  # error


def on_window(window: Window) -> None:
    """Change what is frozen."""
    window.revision = 2  # error
