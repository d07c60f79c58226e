"""One line of text a record, for side effects only.

Shows a handler without a schema: it returns nothing, no window is cut and Spark is not needed; a batch is done, and
may be checkpointed, when the hook has returned. The hook is asynchronous: it has the deadline of ``handler_timeout``.
"""

from mldserver import Record


async def process_record(record: Record) -> None:
    """Print where the record is and how large; printed lines go to the log as ``handler.output``."""
    print(f"{record.shard_id} {record.sequence} {record.partition_key} {len(record.data)} bytes")  # noqa: T201  # see above
