"""User code that must NOT pass: each line that ends with ``# error`` is one error (see ``test_typing.py``)."""

from mldserver import Batch, Context, Record, Timer, Window, batches, timer, tumbling

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


@timer(lateness="6 hours")  # error
def alarm(due: Timer, ctx: Context) -> None:
    """Use a timer in ways that it does not have."""
    due.attempt = 2  # error
    ctx.timers.set(alarm, "30 minutes")  # error
    ctx.timers.cancel("alarm")  # error
    ctx.timers = []  # error
