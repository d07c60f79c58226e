"""A stream, its fake AWS, and servers that read it directly, over virtual time: what comes out is compared with what was put."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from coordinator.outcomes import outcome
from coordinator.pipeline import QUICK, RULES, Pipeline

from mldserver.consumer.claims import Claims
from mldserver.consumer.shard import ConsumerParts
from mldserver.dynamodb_streams.direct_source import DirectSource
from mldserver.errors import HandlerHalted
from mldserver.records import Hook, Record, Sequence, Shard
from mldserver.runtime.interface import BatchOutcome, Delivery
from mldserver.stores import SnapshotSource
from mldserver.testing import FakeStreams, VirtualClock

START_MS = 1_800_000_000_000


@dataclass
class Handler:
    """A runtime whose handler makes a row of each change: its item's ``n``."""

    clock: VirtualClock
    opened: list[tuple[str, str | None]] = field(default_factory=list)
    hooks: list[tuple[str, str]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    parked: dict[str, Any] = field(default_factory=dict)
    halts: Callable[[int], bool] = lambda _: False
    seconds: float = 0.0

    async def open(self, shard: Shard, snapshot: SnapshotSource | None = None) -> None:
        self.opened.append((shard.id, shard.start))

    async def park(self, shard_id: str, keys: Any) -> None:
        self.parked[shard_id] = keys

    async def forget(self, shard_id: str) -> None:
        self.forgotten.append(shard_id)

    async def notify(self, shard_id: str, hook: Hook) -> Sequence | None:
        self.hooks.append((shard_id, hook.name))
        return None

    def begin(self, delivery: Delivery) -> Any:
        return self.process(delivery)

    async def process(self, delivery: Delivery) -> BatchOutcome:
        await self.clock.sleep(self.seconds)
        batch = delivery.payload.decode(None)  # type: ignore[arg-type]  # records need no decoder
        numbers = {record.sequence_number: number_of(record) for record in batch.records}
        fresh = [
            number
            for sequence, number in numbers.items()
            if delivery.after is None or sequence > delivery.after.number
        ]
        if any(map(self.halts, fresh)):
            raise HandlerHalted("The handler says halt.", shard=delivery.shard_id)
        pairs = [(record.sequence_number, record.arrival_ms or 0) for record in batch.records]
        columns = {"value": pa.array(fresh, pa.int64())}
        lag_ms = batch.millis_behind_latest
        return outcome(delivery.shard_id, pairs, after=delivery.after, columns=columns, lag_ms=lag_ms)


def number_of(record: Record) -> int:
    change = record.json()["dynamodb"]
    image = change.get("NewImage") or change["OldImage"]
    return int(image["n"]["N"])


class Stream:
    """A table into which numbers are put, each as an item's new value, and what became of them."""

    def __init__(
        self,
        tmp_path: Path,
        *,
        shards: int = 1,
        servers: int = 1,
        seed: int = 0,
        keyed: bool = False,
        **options: Any,
    ) -> None:
        self.clock = VirtualClock(START_MS)
        self.fake = FakeStreams(shards=shards, clock=self.clock, seed=seed)
        self.random = random.Random(seed)
        self.numbers = itertools.count()
        self.options = options
        names = ("one", "two", "three")[:servers]
        rules = RULES if servers == 1 else QUICK
        self.pipelines = {
            name: Pipeline(tmp_path, server_id=name, clock=self.clock, rules=rules, keyed=keyed)
            for name in names
        }
        self.handlers: dict[str, Handler] = {}
        self.sources: dict[str, DirectSource] = {}

    @property
    def pipeline(self) -> Pipeline:
        return self.pipelines["one"]

    @property
    def handler(self) -> Handler:
        return self.handlers["one"]

    def put(self, count: int = 1, *, shard_id: str | None = None) -> None:
        """Give items of ten keys new numbers."""
        for number in itertools.islice(self.numbers, count):
            self.fake.put({"id": number % 10, "n": number}, shard_id=shard_id)

    def end(self) -> None:
        """Let no shard take records any more; the stream stays enabled."""
        for shard in self.fake.shards.values():
            shard.closed = True

    @contextlib.asynccontextmanager
    async def serving(self, name: str = "one", **options: Any) -> AsyncIterator[DirectSource]:
        """Run a server until the block ends; then it is killed."""
        pipeline, handler = self.pipelines[name], Handler(self.clock)
        values: dict[str, Any] = {"look_seconds": 1.0, "unclaimed_seconds": 5.0} | self.options | options
        async with pipeline.life() as coordinator:
            source = DirectSource(
                self.fake.table,
                self.fake.client,
                ConsumerParts(handler, coordinator.shards, Claims(), self.clock, pipeline.keyed),  # type: ignore[arg-type]  # what is asked of a runtime
                random=self.random.random,
                **values,
            )
            self.handlers[name], self.sources[name] = handler, source
            run = asyncio.ensure_future(source.run())
            try:
                yield source
            finally:
                run.cancel()
                await asyncio.wait({run})
        if not run.cancelled() and (error := run.exception()) is not None:
            raise error

    async def until(self, condition: Callable[[], bool], *, seconds: float = 300) -> None:
        """Let time pass until a condition holds."""
        for _ in range(round(seconds * 4)):
            if condition():
                return
            await self.clock.advance(0.25)
        raise AssertionError(f"nothing came of it in {seconds} seconds")

    def rows(self) -> list[dict[str, Any]]:
        found = self.pipeline.rows("window=*/*.parquet") + self.pipeline.rows("_late/window=*/*.parquet")
        return sorted(found, key=lambda row: (row["_time"], row["_clock"]))

    def values(self) -> list[int]:
        return [row["value"] for row in self.rows()]

    def written(self) -> list[int]:
        """Return what was put, by the fake's own records."""
        records = [record for shard in self.fake.shards.values() for record in shard.records]
        return [int(record["dynamodb"]["NewImage"]["n"]["N"]) for record in records]

    def exactly_once(self) -> None:
        """Each record of the stream is one row, in its shard's order, and behind all of its parents'."""
        rows = self.rows()
        assert Counter(row["value"] for row in rows) == Counter(self.written())
        for shard in self.fake.shards.values():
            own = [place for place, row in enumerate(rows) if row["_shard"] == shard.id]
            assert [rows[place]["value"] for place in own] == [
                int(record["dynamodb"]["NewImage"]["n"]["N"]) for record in shard.records
            ]
            before = [place for place, row in enumerate(rows) if row["_shard"] == shard.parent]
            assert not own or not before or before[-1] < own[0]
