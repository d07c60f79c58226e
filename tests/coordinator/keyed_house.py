"""A coordinator, the inline runtime with a handler that counts the records of each key, consumers and a redriver."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

from coordinator.pipeline import Pipeline

from mldserver.consumer.claims import Claims
from mldserver.consumer.intake import ShardListing, ShardOpening
from mldserver.consumer.shard import Consumer, ConsumerParts
from mldserver.deadletters.redriver import Redriver
from mldserver.handler.inspection import inspect_handler
from mldserver.handler.loader import Loaded
from mldserver.records import Record, Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.inline import InlineRuntime
from mldserver.runtime.interface import BatchOutcome, Delivery, Records
from mldserver.runtime.state_values import decode_state
from mldserver.stores import ALL_KEYS, KeyRange, StoreClaim, hash_of, key_bytes
from mldserver.windows import TimeWindows

MIDDLE = 1 << 127
LOW, HIGH = KeyRange(0, MIDDLE - 1), KeyRange(MIDDLE, ALL_KEYS.last)
LISTING = {
    "parent": ShardListing((), ALL_KEYS),
    "low": ShardListing(("parent",), LOW),
    "high": ShardListing(("parent",), HIGH),
}
LOW_KEY = next(key for key in "abcdefgh" if hash_of(key_bytes(key)) in LOW)
HIGH_KEY = next(key for key in "abcdefgh" if hash_of(key_bytes(key)) in HIGH)


class Counting:
    """Counts the records of each key. A bad one fails until it is healed."""

    schema = "key STRING, n BIGINT"
    windows = TimeWindows(10_000)
    healed: ClassVar[bool] = False

    def process_record(self, record: Record, ctx: Any) -> tuple[str, int]:
        ctx.state["n"] = ctx.state.get("n", 0) + 1
        if record.data == b"bad" and not Counting.healed:
            raise ValueError("bad")
        return ctx.key, ctx.state["n"]


class House:
    """A coordinator, a handler that counts, consumers of shards, and a redriver."""

    handler: ClassVar[type] = Counting
    attempts = 1
    polled = True

    def __init__(self, tmp_path: Path, *, family: bool = False) -> None:
        self.store = StoreClaim(None) if family else None
        self.pipeline = Pipeline(tmp_path, keyed=True, ask_stream=None if family else self.ask)
        self.consumers: dict[str, Consumer] = {}
        self.sequences = 0
        self.has_split = False
        """Whether the stream lists the parent's children, one of which was opened."""

    async def ask(self) -> bool:
        open_now = {name: LISTING[name] for name in LISTING if self.has_split or name == "parent"}
        self.pipeline.coordinator.shards.add_listing(open_now)
        return True

    @contextlib.asynccontextmanager
    async def life(self) -> AsyncIterator[None]:
        Counting.healed = False
        pipeline = self.pipeline
        loaded = Loaded("counting", sys.modules[__name__], self.handler, self.handler.__name__)
        spec, findings = inspect_handler(loaded)
        assert spec is not None, findings
        self.runtime = InlineRuntime(
            spec,
            policy=FailurePolicy(attempts=self.attempts),
            clock=pipeline.clock,
            random=random.Random(1).random,
            at_once=True,
        )
        async with pipeline.life() as coordinator:
            self.parts = ConsumerParts(self.runtime, coordinator.shards, Claims(), pipeline.clock, keyed=True)
            self.redriving = coordinator.redriving
            self.redriver = Redriver(
                ledger=pipeline.ledger,
                runtime=self.runtime,
                claims=self.parts.claims,
                redriving=self.redriving,
                clock=pipeline.clock,
                keyed=True,
                timed=bool(spec.timers),
            )
            await self.runtime.start()
            try:
                yield
            finally:
                await self.runtime.close()

    def when_letters_have_run(self, then: Callable[[], Awaitable[None]]) -> None:
        """Await something once, when the handler has the next letters done."""
        process = self.runtime.process

        async def once(delivery: Delivery) -> BatchOutcome:
            outcome = await process(delivery)
            if delivery.redriven:
                self.runtime.process = process  # type: ignore[method-assign]  # the test's eyes
                await then()
            return outcome

        self.runtime.process = once  # type: ignore[method-assign]  # see above

    async def open(self, shard_id: str, *parents: str) -> Consumer:
        self.has_split |= shard_id in {"low", "high"}
        consumer = self.consumers[shard_id] = Consumer(self.parts)
        opening = ShardOpening(
            shard_id, None, tells_lag=True, parents=parents, polled=self.polled, store=self.store
        )
        await consumer.open(opening, Shard(shard_id, None))
        return consumer

    async def put(self, shard_id: str, *records: tuple[str, bytes], lag_ms: int = 0) -> None:
        """Deliver a batch of keys and payloads, which arrived one after the other just now or ``lag_ms`` ago."""
        made = []
        for key, data in records:
            self.sequences += 1
            made.append(
                Record(
                    shard_id=shard_id,
                    sequence_number=str(self.sequences),
                    data=data,
                    partition_key=key,
                    arrival_ms=self.arrival_ms(lag_ms),
                )
            )
        consumer = self.consumers[shard_id]
        consumer.deliver(Records(made, lag_ms), 10)
        await consumer.acknowledged()

    def arrival_ms(self, _lag_ms: int) -> int:
        return 1_000_000 + self.sequences

    async def end(self, shard_id: str) -> None:
        consumer = self.consumers.pop(shard_id)
        assert await self.pipeline.clock.drive(consumer.end())
        await consumer.forget()

    async def want(self) -> None:
        """Make all letters wanted, now that the handler is healed."""
        Counting.healed = True
        await self.pipeline.cycle()
        ledger = self.pipeline.ledger
        letters = await ledger.letters(limit=100)
        assert letters
        await ledger.redrive(tuple(stored.id for stored in letters), wanted=True)
        await self.pipeline.cycle()

    async def redrive(self) -> int:
        """Run what may run; return how many letters are left."""
        await self.pipeline.clock.drive(self.redriver.round())
        return len(await self.pipeline.ledger.letters(limit=100))

    async def counts(self, shard_id: str) -> dict[str, int]:
        """Return the state of a shard's store as it is durable."""
        await self.pipeline.cycle()
        source = self.consumers[shard_id].intake.snapshot
        assert source is not None
        entries = (await self.pipeline.clock.drive(source())).entries
        return {
            key.decode(): decode_state(value)["n"]
            for key, value in zip(
                entries.column("key").to_pylist(), entries.column("value").to_pylist(), strict=True
            )
        }
