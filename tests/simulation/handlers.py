"""Handlers of simulated pipelines: one for each way of cutting windows, all of them slow and faulty at times.

Of each there is one that counts the records of each key in its state (``Counting...``), and one whose state expires. Those with timers are in
``timed_handlers.py``.

A record is ``{"n": number, "at": event time in ms, "fails": calls that fail first (-1: all), "slow": seconds, "none":
whether it gives no row, "reset": whether it deletes the state of its key}``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta

from mldserver import Context, Record, batches, sliding, tumbling

SCHEMA = "n BIGINT, at TIMESTAMP"
COUNTS = SCHEMA + ", key STRING, counted BIGINT"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
failed: Counter[object] = Counter()
"""Calls that failed so far, by record or firing."""

Row = tuple[int, datetime]


def make_row(record: Record) -> Row | None:
    told = record.json()
    number = told["n"]
    if told["fails"] < 0:
        raise ValueError(f"record {number} is not to be had")
    if failed[number] < told["fails"]:
        failed[number] += 1
        raise ConnectionError(f"record {number} is not to be had now")
    if told["none"]:
        return None
    return number, EPOCH + timedelta(milliseconds=told["at"])


class Arrival:
    """Windows by arrival time."""

    schema = SCHEMA
    windows = tumbling("5 s")

    def process_record(self, record: Record) -> Row | None:
        return make_row(record)


class Slowly:
    """Windows by arrival time; an asynchronous hook."""

    schema = SCHEMA
    windows = tumbling("5 s")

    async def process_record(self, record: Record) -> Row | None:
        await asyncio.sleep(record.json()["slow"])
        return make_row(record)


class Column:
    """Windows by a column that is out of order, sometimes by more than is allowed; an asynchronous hook."""

    schema = SCHEMA
    windows = tumbling("4 s", on="at", lateness="1 s", disorder="1 s")

    async def process_record(self, record: Record) -> Row | None:
        await asyncio.sleep(record.json()["slow"])
        return make_row(record)


class Sliding(Column):
    """Windows that overlap, by the same column."""

    windows = sliding("4 s", every="1 s", on="at", lateness="1 s", disorder="1 s")


class Early(Column):
    """Windows with early results."""

    windows = tumbling("4 s", on="at", lateness="1 s", disorder="1 s", early="1 s")


class EarlySliding(Column):
    """Windows that overlap, with early results."""

    windows = sliding("4 s", every="1 s", on="at", lateness="1 s", disorder="1 s", early="1 s")


class Ordered(Column):
    """Windows that are computed one after the other; the engine adds the totals (``TotalsEngine``)."""

    def on_window(self, rows: object, window: object, previous: object) -> object:
        return rows


class Runs:
    """Windows by number of rows and age."""

    schema = SCHEMA
    windows = batches(max_rows=7, max_age="6 s")

    def process_record(self, record: Record) -> Row | None:
        return make_row(record)


def count(record: Record, ctx: Context) -> tuple[int, datetime, str, int] | None:
    """Count before the call fails: then it must not have counted."""
    ctx.state["n"] = counted = ctx.state.get("n", 0) + 1
    row = make_row(record)
    if record.json().get("reset"):
        ctx.state.clear()
    return row and (*row, ctx.key, counted)


class CountingArrival(Arrival):
    schema = COUNTS

    def process_record(self, record: Record, ctx: Context) -> object:  # type: ignore[override]
        return count(record, ctx)


class CountsSlowly:
    schema = COUNTS

    async def process_record(self, record: Record, ctx: Context) -> object:
        before = ctx.state.get("n", 0)
        await asyncio.sleep(record.json()["slow"])
        assert ctx.state.get("n", 0) == before, "calls for one key overlap"
        return count(record, ctx)


class CountingSlowly(CountsSlowly, Slowly):  # type: ignore[misc]  # its hook takes a context
    pass


class CountingColumn(CountsSlowly, Column):  # type: ignore[misc]  # see above
    pass


class CountingRuns(Runs):
    schema = COUNTS

    def process_record(self, record: Record, ctx: Context) -> object:  # type: ignore[override]
        return count(record, ctx)


class ForgetfulArrival(CountingArrival):
    state_ttl = "3 s"


class ForgetfulSlowly(CountingSlowly):
    state_ttl = "3 s"


class ForgetfulColumn(CountingColumn):
    state_ttl = "3 s"


class ForgetfulRuns(CountingRuns):
    state_ttl = "3 s"
