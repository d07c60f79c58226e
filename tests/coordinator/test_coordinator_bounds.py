"""The async shell as its sources see it: who waits, and who goes on, while memory, disk or the ledger is short."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from coordinator.outcomes import outcome
from coordinator.pipeline import RULES, Pipeline, fail, named

from mldserver.errors import LedgerError
from mldserver.records import Sequence
from mldserver.windows import TimeWindows, time_window_id

S = Sequence
W = [time_window_id(start) for start in range(0, 100_000, 10_000)]


async def test_a_shard_that_is_ahead_is_held_back_and_released_when_there_is_room(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = Pipeline(tmp_path, rules=replace(RULES, buffer_bytes=1))
    async with pipeline.life():
        ahead, behind = await pipeline.open("far"), await pipeline.open("low")
        await pipeline.clock.drive(pipeline.give(behind, [(1, 1000)]))
        await pipeline.cycle()
        await pipeline.clock.drive(pipeline.give(ahead, [(1, 90_000)]))
        await pipeline.cycle()
        assert pipeline.coordinator.status().held_by == "low"
        fail(pipeline, "write", lambda: OSError(28, "No space left"))
        held = asyncio.get_running_loop().create_task(pipeline.give(ahead, [(2, 95_000)]))
        await pipeline.clock.advance(10)
        assert not held.done()
        pipeline.faults.hook = None
        await pipeline.clock.advance(40)
        assert held.done()
    assert named(logged, "shard.held")[-1]["shard"] == "far"
    assert named(logged, "shard.held")[-1]["short_of"] == "memory"
    assert (
        named(logged, "shard.held")[-1]["used_bytes"] > named(logged, "shard.held")[-1]["budget_bytes"] == 1
    )
    assert named(logged, "shard.released")[-1]["seconds"] > 0


async def test_while_memory_is_short_the_shard_that_holds_the_watermark_goes_on(tmp_path: Path) -> None:
    measured = Pipeline(tmp_path / "measured")
    async with measured.life() as coordinator:
        await measured.give(await measured.open("low"), [(1, 1000)])
        one_batch = coordinator.buffer.bytes
    pipeline = Pipeline(tmp_path / "real", rules=replace(RULES, buffer_bytes=5 * one_batch))
    async with pipeline.life() as coordinator:
        ahead, behind = await pipeline.open("far"), await pipeline.open("low")
        await pipeline.give(behind, [(1, 1000)])
        await pipeline.give(ahead, [(1, 90_000)])
        await pipeline.cycle()
        fail(pipeline, "write", lambda: OSError(28, "No space left"))
        for number in (2, 3, 4):
            await pipeline.give(ahead, [(number, 90_000 + number)])
        # What is left of the room is for the other one.
        stuck = asyncio.get_running_loop().create_task(pipeline.give(ahead, [(5, 90_005)]))
        await pipeline.clock.advance(1)
        assert not stuck.done()
        await pipeline.give(behind, [(2, 1001)])
        assert coordinator.status().buffered_bytes == 5 * one_batch
        full = asyncio.get_running_loop().create_task(pipeline.give(behind, [(3, 1002)]))
        await pipeline.clock.advance(1)
        assert not full.done()
        pipeline.faults.hook = None
        await pipeline.clock.advance(40)
        assert stuck.done()
        assert full.done()


async def test_a_shard_that_is_held_back_is_let_go_when_the_server_stops(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, rules=replace(RULES, buffer_bytes=1))
    async with pipeline.life():
        session = await pipeline.open("a")
        fail(pipeline, "write", lambda: OSError(28, "No space left"))
        held = asyncio.get_running_loop().create_task(pipeline.give(session, [(1, 1000)]))
        await pipeline.clock.advance(10)
        assert not held.done()
        await session.finish()
        await pipeline.clock.advance(1)
        assert held.done()


async def test_batches_that_were_answered_early_wait_for_room_also_when_the_server_stops(
    tmp_path: Path,
) -> None:
    """Without the wait each batch in flight would come in at once, far above the bound."""
    pipeline = Pipeline(tmp_path, rules=replace(RULES, buffer_bytes=1))
    async with pipeline.life() as coordinator:
        session = await pipeline.open("a")
        fail(pipeline, "write", lambda: OSError(28, "No space left"))

        async def in_flight() -> None:
            for number in (1, 2, 3):
                batch = outcome("a", [(number, 1000)], after=session.after)
                if not session.accept_batch(batch, pipeline.clock.steady_ms()):
                    await session.wait_for_room(answered=number < 3)

        work = asyncio.get_running_loop().create_task(in_flight())
        await pipeline.clock.advance(5)
        await session.finish()
        await pipeline.clock.advance(5)
        assert session.after == Sequence(1), "the second batch waits for room"
        pipeline.faults.hook = None
        await pipeline.clock.advance(40)
        assert work.done()
        assert coordinator.status().rows_durable == 3


async def test_while_disk_is_short_the_shard_that_holds_the_watermark_goes_on(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = Pipeline(tmp_path, rules=replace(RULES, segment_disk_bytes=1, flush_bytes=1))
    async with pipeline.life():
        ahead, behind = await pipeline.open("far"), await pipeline.open("low")
        loop = asyncio.get_running_loop()
        await pipeline.cycle()
        first = [loop.create_task(pipeline.give(s, [(1, ms)])) for s, ms in ((ahead, 90_000), (behind, 1000))]
        await pipeline.cycle()
        assert pipeline.coordinator.status().segment_bytes > 1
        stuck = loop.create_task(pipeline.give(ahead, [(2, 91_000)]))
        for number in range(2, 6):
            await pipeline.give(behind, [(number, 1000 * number)])
            await pipeline.cycle()
        assert not stuck.done()
        # It catches up: its windows close, the disk has room again, and the other goes on.
        await pipeline.give(behind, [(9, 99_000)])
        await pipeline.clock.advance(5)
        assert behind.alive
        assert all(task.done() for task in first)
        await behind.end()
        await pipeline.clock.advance(5)
        assert stuck.done()
    assert {each["short_of"] for each in named(logged, "shard.held")} == {"disk"}


async def test_when_nothing_can_be_written_everyone_waits_and_goes_on_later(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = Pipeline(tmp_path, rules=replace(RULES, buffer_bytes=1))
    async with pipeline.life() as coordinator:
        sessions = [await pipeline.open("far"), await pipeline.open("low")]
        fail(pipeline, "write", lambda: OSError(28, "No space left on device"))
        loop = asyncio.get_running_loop()
        tasks = [
            loop.create_task(pipeline.give(session, [(1, ms)]))
            for session, ms in zip(sessions, (90_000, 1000), strict=True)
        ]
        await pipeline.clock.advance(60)
        assert coordinator.status().flush_failing
        assert not any(task.done() for task in tasks)
        assert pipeline.private_files() == []
        pipeline.faults.hook = None
        await pipeline.clock.advance(60)
        assert all(task.done() for task in tasks)
        assert [session.checkpoint_due() for session in sessions] == [S(1), S(1)]
    failed = named(logged, "flush.failed")
    assert [event["attempt"] for event in failed[:4]] == [1, 2, 3, 4]
    assert [event["delay_seconds"] for event in failed[:6]] == [1, 2, 4, 8, 16, 30]
    assert "No space left" in failed[0]["what"]


async def test_a_held_connection_that_is_replaced_waits_no_longer(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, rules=replace(RULES, buffer_bytes=1))
    async with pipeline.life():
        old = await pipeline.open("a")
        fail(pipeline, "register", lambda: LedgerError("disk full"))
        held = asyncio.get_running_loop().create_task(pipeline.give(old, [(1, 1000)]))
        await pipeline.clock.advance(2)
        assert not held.done()
        await pipeline.open("a")
        pipeline.faults.hook = None
        await pipeline.clock.advance(40)
        assert held.done()


async def test_a_failing_ledger_keeps_the_rows_and_recovers_without_doubling_them(pipeline: Pipeline) -> None:
    async with pipeline.life() as coordinator:
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        fail(pipeline, "register", lambda: LedgerError("disk full"))
        await pipeline.clock.advance(5)
        await pipeline.give(session, [(2, 2000)])
        assert coordinator.status().buffered_bytes > 0
        assert session.checkpoint_due() is None
        pipeline.faults.hook = None
        await pipeline.clock.advance(40)
        assert coordinator.status().buffered_bytes == 0
        assert await session.end()
        await pipeline.clock.advance(5)
        assert pipeline.published() == {W[0]: [1, 2]}


async def test_a_flush_whose_caller_gave_up_is_done_all_the_same(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await session.drain()
        await pipeline.cycle()
        assert session.checkpoint_due() == S(1)


@pytest.mark.parametrize("gave", [True, False])
async def test_a_busy_shard_whose_records_give_no_rows_holds_nobody_for_good_where_disk_is_short(
    tmp_path: Path, gave: bool
) -> None:
    rules = replace(RULES, segment_disk_bytes=1, flush_bytes=1, on_arrival=False)
    pipeline = Pipeline(tmp_path, spec=TimeWindows(10_000, on="at"), rules=rules)

    def row(now_ms: int) -> dict[str, Any]:
        return {"at": pa.array([now_ms], pa.timestamp("ms", tz="UTC"))}

    async with pipeline.life() as coordinator:
        barren, other = await pipeline.open("barren"), await pipeline.open("other")
        giving: asyncio.Task[None] | None = None
        for number in range(1, 101):
            now_ms = pipeline.clock.now_ms()
            rows = None if gave and number == 1 else []
            await pipeline.give(barren, [(number, now_ms)], rows=rows, columns=row(now_ms))
            if giving is None or giving.done():
                work = pipeline.give(other, [(number, now_ms)], columns=row(now_ms))
                giving = asyncio.get_running_loop().create_task(work)
            await pipeline.cycle()
        assert coordinator.status().windows_published >= 4
        await other.finish()
