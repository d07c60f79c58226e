"""Letters of a handler that keeps state run where the state of their key is now, and count once whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from coordinator.pipeline import Pipeline, named

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
from mldserver.windows import Tumbling

pytestmark = pytest.mark.quick

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
    windows = Tumbling(10_000)
    healed: ClassVar[bool] = False

    def process_record(self, record: Record, ctx: Any) -> tuple[str, int]:
        ctx.state["n"] = ctx.state.get("n", 0) + 1
        if record.data == b"bad" and not Counting.healed:
            raise ValueError("bad")
        return ctx.key, ctx.state["n"]


class House:
    """A coordinator, a handler that counts, consumers of shards, and a redriver."""

    def __init__(self, tmp_path: Path, *, family: bool = False) -> None:
        self.store = StoreClaim(None) if family else None
        self.pipeline = Pipeline(tmp_path, keyed=True, ask_stream=None if family else self.ask)
        self.consumers: dict[str, Consumer] = {}
        self.sequences = 0

    async def ask(self) -> bool:
        self.pipeline.coordinator.shards.add_listing(LISTING)
        return True

    @contextlib.asynccontextmanager
    async def life(self) -> AsyncIterator[None]:
        Counting.healed = False
        pipeline = self.pipeline
        spec, findings = inspect_handler(Loaded("counting", sys.modules[__name__], Counting, "Counting"))
        assert spec is not None, findings
        self.runtime = InlineRuntime(
            spec,
            policy=FailurePolicy(attempts=1),
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
        consumer = self.consumers[shard_id] = Consumer(self.parts)
        opening = ShardOpening(shard_id, None, tells_lag=True, parents=parents, polled=True, store=self.store)
        await consumer.open(opening, Shard(shard_id, None))
        return consumer

    async def put(self, shard_id: str, *records: tuple[str, bytes]) -> None:
        """Deliver a batch of keys and payloads."""
        made = []
        for key, data in records:
            self.sequences += 1
            made.append(
                Record(
                    shard_id=shard_id,
                    sequence_number=str(self.sequences),
                    data=data,
                    partition_key=key,
                    arrival_ms=1_000_000 + self.sequences,
                )
            )
        consumer = self.consumers[shard_id]
        consumer.deliver(Records(made, 0), 10)
        await consumer.acknowledged()

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


async def test_a_letter_runs_on_the_session_of_its_shard_and_the_batches_behind_it_follow(
    tmp_path: Path,
) -> None:
    house = House(tmp_path)
    async with house.life():
        await house.open("parent")
        await house.put("parent", ("a", b""), ("a", b"bad"), ("a", b""), ("b", b""))
        assert await house.counts("parent") == {"a": 2, "b": 1}
        await house.want()
        assert await house.redrive() == 0
        await house.put("parent", ("a", b""))
        assert await house.counts("parent") == {"a": 4, "b": 1}


async def test_a_letter_of_a_shard_that_has_split_runs_on_the_child_that_has_its_key(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    house = House(tmp_path)
    async with house.life():
        await house.open("parent")
        await house.put("parent", *((key, data) for key in (LOW_KEY, HIGH_KEY) for data in (b"", b"bad")))
        await house.want()
        await house.end("parent")
        assert await house.redrive() == 2, "it has ended, and no child has its keys"
        assert house.redriving.waits_for == "keys of parent belong to a shard that no server reads now"
        await house.open("low", "parent")
        await house.pipeline.cycle()
        assert await house.redrive() == 1, "the other key has no open shard"
        assert (
            house.redriving.waits_for == "keys of parent belong to a shard that is not open yet, or not known"
        )
        assert await house.redrive() == 1
        await house.open("high", "parent")
        await house.pipeline.cycle()
        assert (await house.redrive(), house.redriving.waits_for) == (0, "")
        await house.put("low", (LOW_KEY, b""))
        await house.put("high", (HIGH_KEY, b""))
        assert await house.counts("low") == {LOW_KEY: 3}
        assert await house.counts("high") == {HIGH_KEY: 3}
    waits = [entry["what"].partition("that ")[2] for entry in named(logged, "redrive.waiting")]
    assert waits == ["no server reads now", "is not open yet, or not known"]
    rows = [(row["_shard"], row["key"], row["n"]) for row in house.pipeline.rows("_mldserver/segments/*")]
    assert {row for row in rows if row[2] == 2} == {("parent", LOW_KEY, 2), ("parent", HIGH_KEY, 2)}


@pytest.mark.parametrize("batches", [0, 1])
async def test_a_visit_that_is_cancelled_when_the_handler_has_run_counts_nothing(
    tmp_path: Path, logged: list[dict[str, Any]], batches: int
) -> None:
    house = House(tmp_path)
    async with house.life():
        consumer = await house.open("parent")
        await house.put("parent", ("a", b""), ("a", b"bad"))
        await house.want()

        async def evict() -> None:
            consumer._claim.evict()
            await asyncio.sleep(1)

        house.when_letters_have_run(evict)
        assert await house.redrive() == 1
        for _ in range(batches):
            await house.put("parent", ("a", b""))
        assert await house.redrive() == 0
        assert await house.counts("parent") == {"a": 2 + batches}
    assert named(logged, "state.moved")


async def test_a_visit_that_is_cancelled_while_its_flush_is_under_way_counts_as_the_flush_says(
    tmp_path: Path,
) -> None:
    house = House(tmp_path, family=True)
    async with house.life():
        consumer = await house.open("root")
        await house.open("other", "root")
        await house.put("root", ("a", b""), ("a", b"bad"))
        await house.want()
        register = house.pipeline.ledger.store.register

        def evict(*args: Any, **named: Any) -> Any:
            house.pipeline.ledger.store.register = register
            consumer._claim.evict()
            return register(*args, **named)

        house.pipeline.ledger.store.register = evict
        await house.redrive()
        await house.put("other", ("a", b""))
        await house.put("root", ("a", b""))
        await house.redrive()
        assert await house.counts("root") == {"a": 4}


@pytest.mark.parametrize("registers", [True, False], ids=["registered", "removed by the operator meanwhile"])
async def test_no_shard_of_a_family_counts_on_what_letters_have_not_registered(
    tmp_path: Path, registers: bool
) -> None:
    """The key is one of the other shard, whose next batch must find the letter's change, or not."""
    house = House(tmp_path, family=True)
    async with house.life():
        await house.open("root")
        await house.put("root", ("a", b""), ("a", b"bad"))
        await house.want()
        await house.end("root")
        for shard_id in ("left", "right"):
            await house.open(shard_id, "root")
        (letter,) = await house.pipeline.ledger.letters(limit=10)
        batches = []

        async def meanwhile() -> None:
            batches.append(asyncio.ensure_future(house.put("right", ("a", b""))))
            if not registers:
                await house.pipeline.ledger.purge((letter.id,))
            await asyncio.sleep(0)
            assert not batches[0].done()

        house.when_letters_have_run(meanwhile)
        assert await house.redrive() == 0
        await batches[0]
        assert await house.counts("right") == {"a": 3 if registers else 2}


@pytest.mark.parametrize("when", ["the letters are at the handler", "they are being registered"])
async def test_a_shard_of_the_family_that_opens_meanwhile_loads_what_is_registered(
    tmp_path: Path, when: str
) -> None:
    house = House(tmp_path, family=True)
    async with house.life():
        await house.open("root")
        await house.put("root", ("a", b""), ("a", b"bad"))
        await house.want()
        await house.end("root")
        await house.open("left", "root")
        opened = []

        async def right() -> None:
            await house.open("right", "root")
            await house.put("right", ("a", b""))

        async def meanwhile() -> None:
            opened.append(asyncio.ensure_future(right()))
            for _ in range(100):
                await asyncio.sleep(0)

        flush = house.redriving.flush

        async def flushes(reason: str) -> None:
            house.redriving.flush = flush
            await meanwhile()
            await flush(reason)

        if when == "they are being registered":
            house.redriving.flush = flushes
        else:
            house.when_letters_have_run(meanwhile)
        await house.redrive()
        await house.pipeline.clock.advance(5)
        await opened[0]
        assert await house.redrive() == 0
        await house.put("left", ("a", b""))
        await house.put("right", ("a", b""))
        assert await house.counts("right") == {"a": 5}
