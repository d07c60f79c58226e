"""The async shell as its sources see it, over virtual time, the real ledger, and a small engine: positions and lives."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from coordinator.outcomes import dead_letter
from coordinator.pipeline import RULES, Pipeline, fail, missing

from mldserver.ledger.contract import batch_id
from mldserver.records import Sequence
from mldserver.windows import batches, time_window_id

pytestmark = pytest.mark.quick

S = Sequence
W = [time_window_id(start) for start in range(0, 100_000, 10_000)]


# Positions and checkpoints.


async def test_a_batch_may_be_checkpointed_once_it_is_durable_and_not_before(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (2, 2000)])
        assert (session.after, session.checkpoint_due()) == (S(2), None)
        await pipeline.cycle()
        assert session.checkpoint_due() == S(2)
        session.checkpointed(S(2))
        assert session.checkpoint_due() is None
        await pipeline.give(session, [(3, 3000)])
        assert session.checkpoint_due() is None
        await pipeline.cycle()
        assert session.checkpoint_due() == S(3)


async def test_draining_makes_everything_that_was_accepted_durable_at_once(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        await session.drain()
        assert session.checkpoint_due() == S(1)


async def test_a_batch_of_dead_letters_only_moves_the_position_too(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)], rows=[], letters=[dead_letter("a", 1)])
        await session.drain()
        assert session.checkpoint_due() == S(1)
        assert pipeline.coordinator.status().dead_letters == 1
    assert pipeline.stored_dead_letters() == [("a", S(1))]


async def test_many_rows_are_flushed_before_the_interval_is_over(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, rules=replace(RULES, flush_bytes=1))
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        await pipeline.clock.advance(0)
        assert session.checkpoint_due() == S(1)


async def test_the_nearer_a_windows_end_the_fewer_rows_are_flushed_at_once(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, rules=replace(RULES, flush_bytes=4000))
    async with pipeline.life():
        shards = pipeline.coordinator.shards
        session = await pipeline.open("a")
        least: list[int] = []
        for number, second in enumerate((1, 5, 9), 1):
            await pipeline.give(session, [(number, second * 1000)])
            await pipeline.cycle()
            least.append(shards.flush_at)
        written = pipeline.coordinator._flusher.uncut_bytes  # what it goes by
        assert least[2] == max(250, int(written / 18))
        assert least == sorted(least, reverse=True)
        await pipeline.give(session, [(4, 12_000)])
        await pipeline.cycle()
        assert pipeline.published() == {W[0]: [1, 2, 3]}
        assert shards.flush_at == 1000, "nothing of the next window is known"


async def test_rows_that_a_flush_is_writing_do_not_ask_for_the_next(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, rules=replace(RULES, flush_bytes=400))
    async with pipeline.life() as coordinator:
        session = await pipeline.open("a")
        given: list[asyncio.Task[None]] = []

        def give_more(name: str, after: bool) -> None:
            if name == "write" and not given:
                more = pipeline.give(session, [(9, 1000)])
                given.append(asyncio.get_running_loop().create_task(more))

        pipeline.faults.hook = give_more
        await pipeline.give(session, [(number, 1000) for number in range(1, 9)])
        assert coordinator.buffer.bytes >= coordinator.shards.flush_at
        await pipeline.clock.advance(0)
        assert given[0].done()
        assert session.checkpoint_due() == S(8), "the ninth waits for the interval"
        await pipeline.cycle()
        assert session.checkpoint_due() == S(9)


async def test_what_is_delivered_again_with_other_borders_is_dropped(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (2, 2000)])
        await pipeline.cycle()
        again = await pipeline.open("a")
        assert again.after == S(2)
        await pipeline.give(again, [(1, 1000)])
        await pipeline.give(again, [(2, 2000), (3, 3000)])
        await pipeline.give(again, [(4, 15_000)])
        await pipeline.cycle()
        assert await again.end()
        await pipeline.clock.advance(5)
        assert pipeline.published() == {W[0]: [1, 2, 3], W[1]: [4]}
        assert pipeline.coordinator.status().rows_accepted == 4


# Batches.


async def test_batches_are_cut_when_they_are_full(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec=batches(max_rows=3, max_age="1 hour"))
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(n, n) for n in range(1, 8)])
        await pipeline.clock.advance(3)
        assert pipeline.published() == {batch_id(0): [1, 2, 3], batch_id(1): [4, 5, 6]}
        assert pipeline.coordinator.status().windows_open == 1


async def test_batches_are_cut_when_they_are_old(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec=batches(max_rows=100, max_age="10 s"))
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1)])
        await pipeline.clock.advance(9)
        assert pipeline.published() == {}
        await pipeline.clock.advance(3)
        assert pipeline.published() == {batch_id(0): [1]}
        await pipeline.give(session, [(2, 2)])
        await pipeline.clock.advance(12)
        assert pipeline.published() == {batch_id(0): [1], batch_id(1): [2]}


# Lives.


async def test_a_restart_in_the_middle_gives_every_row_once(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (2, 8000), (3, 12_000)], lag_ms=1)
        await pipeline.clock.advance(3)
        await pipeline.give(session, [(4, 13_000)], lag_ms=1)
    async with pipeline.life() as coordinator:
        assert missing(coordinator) == ("a",)
        session = await pipeline.open("a", S(1))
        assert session.after == S(3)
        await pipeline.give(session, [(2, 8000)], lag_ms=1)
        await pipeline.give(session, [(3, 12_000), (4, 13_000), (5, 22_000)], lag_ms=1)
        assert await session.end()
        await pipeline.clock.advance(5)
    assert pipeline.published() == {W[0]: [1, 2], W[1]: [3, 4], W[2]: [5]}


async def test_after_a_restart_no_window_closes_before_every_shard_is_back(pipeline: Pipeline) -> None:
    async with pipeline.life():
        one, two = await pipeline.open("a"), await pipeline.open("b")
        await pipeline.give(one, [(1, 1000)], lag_ms=1)
        await pipeline.give(two, [(2, 2000)], lag_ms=1)
        await pipeline.cycle()
    async with pipeline.life():
        one = await pipeline.open("a")
        await pipeline.give(one, [(3, 55_000)], lag_ms=1)
        await pipeline.clock.advance(20)
        assert pipeline.published() == {}
        two = await pipeline.open("b")
        await pipeline.give(two, [(4, 55_000)], lag_ms=1)
        await pipeline.clock.advance(3)
        assert pipeline.published() == {W[0]: [1, 2]}


async def test_a_handler_without_rows_ends_its_stream_too(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, without_rows=True)
    async with pipeline.life() as coordinator:
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)], rows=[])
        assert await session.end()
        await pipeline.clock.drive(coordinator.over())
        status = coordinator.status()
        assert (status.windows_open, status.windows_published, status.windows_halted) == (0, 0, ())


async def test_old_windows_and_shards_are_forgotten_every_hour(tmp_path: Path) -> None:
    rules = replace(RULES, flush_interval_ms=600_000, retention_ms=3_600_000, shard_retention_ms=7_200_000)
    pipeline = Pipeline(tmp_path, rules=rules)
    async with pipeline.life() as coordinator:
        parent = await pipeline.open("p")
        await pipeline.give(parent, [(1, 1000)])
        ending = asyncio.get_running_loop().create_task(parent.end())
        await pipeline.clock.advance(1200)
        assert ending.result()
        assert coordinator.status().stream_ended
        await pipeline.clock.advance(3600)
        assert "p" in coordinator.lineage.nodes
        await pipeline.clock.advance(7200)
        assert "p" not in coordinator.lineage.nodes
    state = pipeline.state()
    assert (state.windows, state.shards) == ({}, {})
    assert pipeline.published() == {W[0]: [1]}


async def test_a_fault_that_is_a_bug_ends_the_server(pipeline: Pipeline) -> None:
    async def life() -> None:
        async with pipeline.life():
            session = await pipeline.open("a")
            await pipeline.give(session, [(1, 1000)])
            fail(pipeline, "register", lambda: ZeroDivisionError("a bug"))
            await session.drain()

    with pytest.raises(ExceptionGroup) as found:
        await life()
    assert found.value.subgroup(ZeroDivisionError) is not None


async def test_a_window_waits_cut_in_the_ledger_while_the_engine_is_not_there(pipeline: Pipeline) -> None:
    async with pipeline.life() as coordinator:
        await pipeline.clock.advance(0)
        pipeline.engine._ready.clear()
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        assert await session.end()
        await pipeline.clock.advance(5)
        assert coordinator.status().windows_waiting == 1
        pipeline.engine._ready.set()
        await pipeline.clock.advance(1)
        assert pipeline.published() == {W[0]: [1]}
    assert pipeline.state().windows == {}, "published, and not retained"
