"""What users write, checked by ``mypy --strict`` (see ``test_typing.py``): module hooks, classes, the public API."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, assert_type

import pyarrow as pa
from pyspark.sql import DataFrame

import mldserver
from mldserver import Batch, Context, Record, Sequence, Shard, Timer, Timers, Window, batches, timer, tumbling
from mldserver.dynamodb_streams import Change
from mldserver.windows import Batches, TimeWindows

schema = "carrier STRING, delay DOUBLE, scheduled TIMESTAMP"
windows = tumbling("1 hour", on="scheduled", lateness=timedelta(minutes=10), disorder=2.5)
other_windows = batches(max_rows=10_000, max_age="30 seconds")

assert_type(windows, TimeWindows)
assert_type(other_windows, Batches)
assert_type(mldserver.__version__, str)


def process_record(record: Record) -> tuple[str, float | None, str] | None:
    """Take a record apart."""
    assert_type(record.data, bytes)
    assert_type(record.text(), str)
    assert_type(record.json(), Any)
    assert_type(record.partition_key, str | None)
    assert_type(record.sequence_number, int)
    assert_type(record.sub_sequence_number, int)
    assert_type(record.sequence, Sequence)
    assert_type(record.approximate_arrival_timestamp, datetime | None)
    assert_type(record.shard_id, str)
    flight = record.json()
    return flight["carrier"], flight["dep_delay"], flight["scheduled"]


def on_update(change: Change, ctx: Context) -> None:
    """Keep state for the change's key."""
    assert_type(ctx.key, str)
    assert_type(ctx.now, datetime)
    assert_type(ctx.state, dict[str, Any])
    ctx.state["times"] = ctx.state.get("times", 0) + 1


def on_insert(change: Change) -> dict[str, Any] | None:
    """Take a change apart."""
    assert_type(change.keys, dict[str, Any])
    assert_type(change.new, dict[str, Any] | None)
    assert_type(change.created_at, datetime)
    assert_type(change.expired, bool)
    assert_type(change.event_id, str)
    assert_type(change.shard_id, str)
    assert_type(change.partition_key, str | None)
    assert_type(change.sequence, Sequence)
    return change.old


@timer
def alarm(due: Timer, ctx: Context) -> tuple[str, Any, datetime]:
    """Take a timer apart, and set it again."""
    assert_type(due.name, str)
    assert_type(due.attempt, int)
    assert_type(ctx.timers, Timers)
    assert_type([each for each in ctx.timers], list[Timer])  # noqa: C416  # the loop's type is what counts
    ctx.timers.set(alarm, at=due.at + timedelta(hours=1), name="again", payload=[1])
    return ctx.key, due.payload, due.at


@timer(max_lateness="6 hours")
async def late_alarm(due: Timer, ctx: Context) -> None:
    """Cancel a timer."""
    ctx.timers.set(late_alarm, after=timedelta(minutes=1))
    assert_type(ctx.timers.cancel(alarm, name="again"), bool)
    assert_type(ctx.timers.get(alarm), Timer | None)
    assert_type(alarm(due, ctx), tuple[str, Any, datetime])


def on_window(rows: DataFrame, window: Window) -> DataFrame:
    """Sum a window up."""
    assert_type(window.id, str)
    assert_type(window.start, datetime | None)
    assert_type(window.end, datetime | None)
    assert_type(window.revision, int)
    return rows.groupBy("carrier").count()


def initialize(shard: Shard) -> None:
    """Open what the shard needs."""
    assert_type(shard.id, str)
    assert_type(shard.start, str | None)


class Clicks:
    """A class handler with asynchronous hooks."""

    schema = "page STRING"
    windows = batches()

    def __init__(self) -> None:
        """Start empty."""
        self.seen: list[Sequence] = []

    async def process_records(self, batch: Batch) -> list[dict[str, Any] | None]:
        """Take a whole batch."""
        assert_type(len(batch), int)
        assert_type(batch[0], Record)
        assert_type(batch[1:], Batch)
        assert_type(iter(batch), Iterator[Record])
        assert_type(batch.millis_behind_latest, int | None)
        self.seen += [record.sequence for record in batch]
        return [{"page": record.text()} for record in batch]

    async def shard_ended(self, shard: Shard) -> None:
        """Say goodbye."""
        print(shard.id, self.seen[-1] > Sequence(1, 2))


def process_table(table: pa.Table) -> pa.Table:
    """Take columns."""
    return table.select(["data"])
