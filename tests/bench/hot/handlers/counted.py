"""Counts the records of each key in keyed state, and returns a row with the number."""

from mldserver import Context, Record, batches

schema = "key STRING, n BIGINT"
windows = batches(max_rows=100_000_000, max_age="1 hour")


def process_record(record: Record, ctx: Context) -> tuple[str | None, int]:
    """Return the key, and how many records of it there were."""
    len(record.data)
    n = ctx.state["n"] = ctx.state.get("n", 0) + 1
    return record.partition_key, n
