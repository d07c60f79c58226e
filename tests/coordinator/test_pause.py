"""The pause of a function: the ledger says it, every server follows, a restart keeps it, and it is told once all is durable."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from coordinator.pipeline import Pipeline, fail, named, two
from coordinator.test_steering import _handed_in, carried_out, giving
from coordinator.timed_house import TimedHouse

from mldserver import cli
from mldserver.consumer.intake import AT_TIP
from mldserver.errors import LedgerError
from mldserver.ledger.contract import FunctionLife, Wanted
from mldserver.records import Sequence

pytestmark = pytest.mark.quick

START = 1_000_000
PAUSED = FunctionLife(Wanted.PAUSED)


async def wanted(pipeline: Pipeline) -> Wanted:
    return (await pipeline.ledger.peek()).life.wanted


async def test_a_pause_lasts_over_a_restart_whose_shards_are_held_from_their_first_batch_on(
    tmp_path: Path,
) -> None:
    pipeline = Pipeline(tmp_path)
    async with pipeline.life():
        assert (await carried_out(pipeline, "pause"))[0]
    async with pipeline.life() as coordinator:
        assert coordinator.is_paused, "before any shard is open"
        session = await pipeline.open("a")
        held = giving(pipeline, session, 1)
        await pipeline.clock.advance(60)
        assert not held.done()
        assert coordinator.is_paused
        assert await carried_out(pipeline, "resume") == (True, "All shards go on.")
        assert held.done()
        assert not coordinator.is_paused
    async with pipeline.life():
        await pipeline.give(await pipeline.open("a", Sequence(1)), [(2, 1000)])


async def test_every_server_follows_a_pause_within_a_flush_interval(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    one, other = two(tmp_path)
    async with one.life(), other.life():
        session = await other.open("b")
        assert (await carried_out(one, "pause"))[0]
        held = giving(other, session, 1)
        await one.clock.advance(2)
        assert not held.done()
        assert other.coordinator.is_paused
        told = [(each["wanted"], each["before"]) for each in named(logged, "function.wanted")]
        assert told == [("paused", "deployed")] * 2, "each server says it once"
        assert (await carried_out(one, "resume"))[0]
        assert held.done()


async def test_what_a_waiting_daemon_gave_is_durable_and_checkpointed_before_the_pause_is_told(
    tmp_path: Path,
) -> None:
    pipeline, stored, may_store = Pipeline(tmp_path), [], asyncio.Event()
    async with pipeline.life() as coordinator:
        session = await pipeline.open("a")

        async def checkpoint() -> None:
            await may_store.wait()
            due = session.checkpoint_due()
            assert due is not None
            session.checkpointed(due)
            stored.append(due)

        await carried_out(pipeline, "pause")
        held = asyncio.create_task(_handed_in(pipeline, session, checkpoint))
        await pipeline.clock.advance(5)
        assert not coordinator.is_paused, "the daemon has not stored the checkpoint"
        may_store.set()
        await pipeline.clock.advance(5)
        assert (stored, coordinator.is_paused, held.done()) == ([Sequence(1)], True, False)
        await carried_out(pipeline, "resume")
        assert (stored, held.done()) == ([Sequence(1)], True), "once"
        assert not coordinator.shards.backpressure.settled, "the next pause asks again"


async def test_a_batch_that_is_worked_on_and_rows_in_memory_are_no_pause_yet(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    async with pipeline.life() as coordinator:
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        fail(pipeline, "register", lambda: LedgerError("out of reach"))
        await carried_out(pipeline, "pause")
        pipeline.faults.hook = None
        assert not coordinator.is_paused, "a row is in memory"
        await pipeline.clock.advance(60)
        assert coordinator.is_paused
        session.batch_began()
        assert not coordinator.is_paused
        assert await carried_out(pipeline, "resume") == (True, "All shards go on."), "it is taken back"


async def test_timers_wait_for_the_end_of_the_pause(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        await house.put("parent", ("a", b"1"))
        await house.wait(1)
        assert await house.pipeline.ledger.change_life(FunctionLife(), PAUSED)
        await house.wait(2)
        assert house.pipeline.coordinator.is_paused
        waiting = asyncio.create_task(house.put("parent"))
        await house.wait(30)
        assert (house.fired, house.timers.held) == ([], 1)
        assert await house.pipeline.ledger.change_life(PAUSED, FunctionLife())
        await house.wait(3)
        await waiting
        await house.tip("parent")
        assert house.fired == [("a", START + 1000)]


async def test_a_portion_of_timers_that_a_handler_works_on_is_no_pause_yet(tmp_path: Path) -> None:
    house, goes_on = TimedHouse(tmp_path), asyncio.Event()
    async with house.life():
        coordinator = house.pipeline.coordinator
        await house.open("parent")
        await house.put("parent", ("a", b"1"))
        process = house.runtime.process

        async def slow(delivery: Any) -> Any:
            await goes_on.wait()
            return await process(delivery)

        house.runtime.process = slow  # type: ignore[method-assign]  # a callback that takes long
        await house.wait(1)
        now_ms = house.pipeline.clock.steady_ms()
        house.consumers["parent"].intake.accept_batch(AT_TIP, now_ms, now_ms)
        coordinator.watermark.answered("parent", now_ms)
        await house.wait(1)
        assert house.timers.running == 1
        assert await house.pipeline.ledger.change_life(FunctionLife(), PAUSED)
        await house.wait(5)
        assert not coordinator.is_paused
        goes_on.set()
        await house.wait(5)
        assert (house.timers.running, coordinator.is_paused, house.fired) == (0, True, [("a", START + 1000)])


async def test_of_two_commands_at_once_one_counts_and_the_other_is_told(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    async with one.life(), other.life():
        change = other.ledger.store.change_life

        def late(before: FunctionLife, after: FunctionLife) -> bool:
            assert one.ledger.store.change_life(before, FunctionLife(Wanted.UNDEPLOYED))
            return bool(change(before, after))

        other.ledger.store.change_life = late
        done, text = await carried_out(other, "pause")
        assert (done, text.split(". ")[:2]) == (
            False,
            [
                "Another command for the function departures came at the same time",
                "This one changed nothing",
            ],
        )
        assert await wanted(one) is Wanted.UNDEPLOYED
        await one.clock.advance(2)
        assert not one.coordinator.shards.backpressure.paused, "its daemons are answered until it has drained"
        done, text = await carried_out(one, "pause")
        assert (done, text.split(".")[0]) == (
            False,
            "The function departures is undeploying: pause is not possible",
        )


async def test_a_restored_ledger_has_the_pause_of_its_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline = Pipeline(tmp_path / "out")
    async with pipeline.life():
        await pipeline.give(await pipeline.open("a"), [(1, 1000)])
        await carried_out(pipeline, "pause")
        assert cli.run(["ledger", "backup", "monday", "--out", "out"]) == 0
        await carried_out(pipeline, "resume")
    shutil.rmtree(tmp_path / "out")
    assert cli.run(["ledger", "restore", "monday", "--out", "out"]) == 0
    async with pipeline.life() as coordinator:
        assert await wanted(pipeline) is Wanted.PAUSED
        assert coordinator.is_paused
