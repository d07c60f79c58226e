"""Letters of a handler that keeps state run where the state of their key is now, and count once whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from coordinator.keyed_house import HIGH_KEY, LOW_KEY, House
from coordinator.pipeline import named

pytestmark = pytest.mark.quick


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


async def test_letters_that_are_withdrawn_wait_for_nothing_any_more(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    house = House(tmp_path)
    async with house.life(), asyncio.TaskGroup() as group:
        await house.open("parent")
        await house.put("parent", ("a", b"bad"))
        await house.want()
        await house.end("parent")
        assert (await house.redrive(), await house.redrive()) == (1, 1)
        assert house.redriving.waits_for
        assert len(named(logged, "redrive.waiting")) == 1, "though each round found the same"
        (letter,) = await house.pipeline.ledger.letters(limit=10)
        await house.pipeline.ledger.redrive((letter.id,), wanted=False)
        await house.pipeline.cycle()
        running = group.create_task(house.redriver.run())
        await house.pipeline.clock.advance(1)
        assert house.redriving.waits_for == ""
        running.cancel()


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


async def test_letters_run_on_what_every_shard_of_the_family_has_done(tmp_path: Path) -> None:
    """The letter runs on the session of one shard, which opened with a copy that lacks an outcome of the other."""
    house = House(tmp_path, family=True)
    async with house.life():
        await house.open("root")
        await house.put("root", ("a", b""), ("a", b"bad"))
        await house.want()
        await house.end("root")
        shards = house.pipeline.coordinator.shards
        read = shards.snapshot

        async def read_before_the_batch(session: Any) -> Any:
            shards.snapshot = read
            snapshot = await read(session)
            if "left" not in house.consumers:
                await house.open("left", "root")
                await house.put("left", ("a", b""))
            return snapshot

        shards.snapshot = read_before_the_batch
        await house.open("right", "root")
        assert await house.redrive() == 0
        assert await house.counts("left") == {"a": 3}
