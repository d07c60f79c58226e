"""Handlers of simulated pipelines: one for each way of cutting windows, all of them slow and faulty at times.

A record is ``{"n": number, "at": event time in ms, "fails": calls that fail first (-1: all), "slow": seconds, "none":
whether it gives no row}``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta

from mldserver import Record, batches, tumbling

SCHEMA = "n BIGINT, at TIMESTAMP"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
failed: Counter[int] = Counter()
"""Calls that failed so far, by record."""

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


class Runs:
    """Windows by number of rows and age."""

    schema = SCHEMA
    windows = batches(max_rows=7, max_age="6 s")

    def process_record(self, record: Record) -> Row | None:
        return make_row(record)
