"""The async shell as its sources see it: when windows close, and what holds them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from coordinator.pipeline import RULES, Pipeline, listed, missing, named

from mldserver.coordinator.shards import IntakeSession
from mldserver.output.layout import is_joined
from mldserver.records import Sequence
from mldserver.windows import TimeWindows, time_window_id

pytestmark = pytest.mark.quick

S = Sequence
W = [time_window_id(start) for start in range(0, 100_000, 10_000)]


async def test_a_missing_shard_holds_the_windows_is_told_and_is_left_out_after_the_limit(
    pipeline: Pipeline, logged: list[dict[str, Any]]
) -> None:
    async with pipeline.life() as coordinator:
        gone, there = await pipeline.open("gone"), await pipeline.open("there")
        await pipeline.give(gone, [(1, 1000)])
        await pipeline.give(there, [(1, 2000)])
        await pipeline.cycle()
        gone.disconnected()
        await pipeline.give(there, [(2, 55_000)])
        await pipeline.clock.advance(30)
        assert pipeline.published() == {}
        status = coordinator.status()
        assert (status.held_by, status.reason, missing(coordinator)) == ("gone", "missing", ("gone",))
        (told,) = named(logged, "shard.missing")
        assert told["shard"] == "gone"
        assert "If none is starting, start the one that owns the shard." in told["advice"]
        assert named(logged, "watermark.held") == []
        await pipeline.clock.advance(35)
        assert [event["shard"] for event in named(logged, "shard.left_out")] == ["gone"]
        assert pipeline.published()[W[0]] == [1, 1]
        back = await pipeline.open("gone")
        await pipeline.give(back, [(2, 3000)])
        await pipeline.cycle()
        assert pipeline.late() == [2]
        assert coordinator.status().rows_late == 1
        back.disconnected()
        await pipeline.clock.advance(31)
        assert len(named(logged, "shard.missing")) == 2, "it is told again after it was there"


@pytest.mark.parametrize(("limit_ms", "grace_ms"), [(60_000, 60_000), (600_000, 300_000)])
async def test_a_pipeline_that_had_shards_and_has_none_connected_says_so_after_the_daemons_restart(
    tmp_path: Path, limit_ms: int, grace_ms: int
) -> None:
    pipeline = Pipeline(tmp_path, rules=replace(RULES, missing_limit_ms=limit_ms))
    grace = grace_ms / 1000
    async with pipeline.life() as coordinator:
        coordinator.shards.add_listing(listed({"a": (), "b": ()}))
        await pipeline.clock.advance(700)
        assert coordinator.status().unread_shards == 0, "there was no daemon yet"
        one, two = await pipeline.open("a"), await pipeline.open("b")
        await pipeline.give(one, [(1, 1000)])
        await pipeline.cycle()
        one.disconnected()
        await pipeline.clock.advance(700)
        assert coordinator.status().unread_shards == 0, "another is connected"
        await pipeline.give(two, [(1, 2_000_000)])
        await pipeline.cycle()
        two.disconnected()
        await pipeline.clock.advance(grace - 10)
        assert coordinator.status().unread_shards == 0, "it may be starting again"
        await pipeline.clock.advance(20)
        assert coordinator.status().unread_shards == 2
        await pipeline.clock.advance(700)
        assert coordinator.status().unread_shards == 2, "also once they are left out"
        assert coordinator.status().windows_open == 1
        back = await pipeline.open("a")
        await pipeline.cycle()
        assert coordinator.status().unread_shards == 0
        back.disconnected()
    async with pipeline.life() as coordinator:
        await pipeline.clock.advance(grace - 10)
        assert coordinator.status().unread_shards == 0, "the server itself has just started"
        await pipeline.clock.advance(20)
        assert coordinator.status().unread_shards == 2
        for shard in ("a", "b"):
            assert await (await pipeline.open(shard, S(1))).end()
        await pipeline.clock.advance(700)
        assert (coordinator.status().unread_shards, coordinator.status().stream_ended) == (0, True)


async def test_a_server_whose_shards_another_has_misses_no_daemon(tmp_path: Path) -> None:
    one = Pipeline(tmp_path)
    two = Pipeline(tmp_path, clock=one.clock, server_id="two")
    async with one.life() as idle, two.life():
        session = await two.open("a")
        await two.give(session, [(1, 1000)])
        await one.clock.advance(400)
        assert idle.status().unread_shards == 0


async def test_a_watermark_that_stands_still_is_told_once_a_minute(
    pipeline: Pipeline, logged: list[dict[str, Any]]
) -> None:
    async with pipeline.life():
        slow = await pipeline.open("slow")
        await pipeline.give(slow, [(1, 1000)], lag_ms=99_999)
        await pipeline.clock.advance(150)
    held = named(logged, "watermark.held")
    assert [(event["held_by"], event["reason"]) for event in held] == [("slow", "behind")] * 2


async def test_shards_that_the_stream_lists_are_waited_for(pipeline: Pipeline) -> None:
    async with pipeline.life() as coordinator:
        session = await pipeline.open("a")
        await pipeline.clock.advance(2)
        assert coordinator.shards.add_listing(listed({"a": (), "b": (), "c": ("b",)})) == ("b", "c")
        assert coordinator.shards.add_listing(listed({"a": (), "b": (), "c": ("b",)})) == ()
        assert coordinator.lineage.nodes["c"].parents == ("b",)
        await pipeline.give(session, [(1, 1000), (2, 25_000)])
        await pipeline.clock.advance(3)
        assert pipeline.published() == {}
        assert missing(coordinator) == ("b",)


async def test_a_stream_cut_on_a_column_closes_its_windows_when_it_is_quiet(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    import pyarrow as pa

    def at(value: int) -> dict[str, Any]:
        return {"value": pa.array([value]), "at": pa.array([1000 * value], pa.timestamp("ms"))}

    rules = replace(RULES, on_arrival=False)
    pipeline = Pipeline(tmp_path, spec=TimeWindows(10_000, "at"), rules=rules)
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1)], columns=at(3))
        await pipeline.clock.advance(9)
        assert pipeline.published() == {}
        await pipeline.clock.advance(3)
        assert pipeline.published() == {W[0]: [3]}
        assert len(named(logged, "stream.quiet")) == 1
        await pipeline.give(session, [(2, 2)], columns=at(4))
        await pipeline.cycle()
        assert pipeline.late() == [4]


async def test_lateness_keeps_windows_open(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec=TimeWindows(10_000, lateness_ms=5000))
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (2, 14_999)], lag_ms=1)
        await pipeline.clock.advance(3)
        assert pipeline.published() == {}
        await pipeline.give(session, [(3, 15_000)], lag_ms=1)
        await pipeline.clock.advance(3)
        assert pipeline.published() == {W[0]: [1]}


async def test_rows_that_come_while_windows_are_cut_are_late_and_not_lost(pipeline: Pipeline) -> None:
    async with pipeline.life():
        first = await pipeline.open("a")
        await pipeline.give(first, [(1, 1000), (2, 25_000)], lag_ms=1)
        await pipeline.clock.advance(3)
        assert pipeline.published() == {W[0]: [1]}
        second = await pipeline.open("b")
        await pipeline.give(second, [(3, 2000), (4, 26_000)], lag_ms=1)
        await pipeline.clock.advance(3)
        assert pipeline.late() == [3]
        assert [await first.end(), await second.end()] == [True, True]
        await pipeline.clock.advance(5)
        assert pipeline.published() == {W[0]: [1], W[2]: [2, 4]}


async def test_rows_that_are_accepted_while_others_are_written_close_no_window_before_they_are_durable(
    pipeline: Pipeline,
) -> None:
    async with pipeline.life():
        await pipeline.clock.advance(2)
        session = await pipeline.open("a")
        await pipeline.clock.advance(2)
        await pipeline.give(session, [(1, 1000)], lag_ms=1)
        given: list[asyncio.Task[None]] = []

        def give_more(name: str, after: bool) -> None:
            if name == "write" and not given:
                more = pipeline.give(session, [(2, 5000), (3, 25_000)], lag_ms=1)
                given.append(asyncio.get_running_loop().create_task(more))

        pipeline.faults.hook = give_more
        await pipeline.clock.advance(5)
        assert given[0].done()
        assert pipeline.published() == {W[0]: [1, 2]}
        assert pipeline.late() == []


async def test_a_watermark_that_rows_wait_for_too_long_is_said_to_be_stuck_until_it_moves(
    pipeline: Pipeline, logged: list[dict[str, Any]]
) -> None:
    limit = (pipeline.rules.missing_limit_ms + pipeline.rules.idle_time_ms) // 1000
    async with pipeline.life() as coordinator:
        hung, there = await pipeline.open("hung"), await pipeline.open("there")
        began_ms = pipeline.clock.now_ms()
        await pipeline.give(hung, [(1, began_ms)])
        hung.batch_began()  # and its handler hangs
        stuck = []
        for second in range(limit + 20):
            await pipeline.give(there, [(second + 1, began_ms + 1000 * second)])
            await pipeline.cycle()
            stuck.append(coordinator.status().stuck)
        assert coordinator.status().held_by == "hung"
        # Its row's window ends after 10 s: until then nothing waits.
        assert stuck.index(True) == limit + 9
        assert all(stuck[limit + 9 :])
        await pipeline.give(hung, [(2, pipeline.clock.now_ms())])
        await pipeline.clock.advance(2)
        assert not coordinator.status().stuck
    assert named(logged, "watermark.held")[0]["held_by"] == "hung"


async def test_a_watermark_is_stuck_too_where_shards_wait_for_disk_though_no_window_is_due(
    tmp_path: Path,
) -> None:
    rules = replace(RULES, segment_disk_bytes=1, flush_bytes=1)
    pipeline = Pipeline(tmp_path, spec=TimeWindows(3_600_000), rules=rules)
    async with pipeline.life() as coordinator, asyncio.TaskGroup() as group:
        hung, there = await pipeline.open("hung"), await pipeline.open("there")
        began_ms = pipeline.clock.now_ms()
        given = [group.create_task(pipeline.give(hung, [(1, began_ms)]))]
        await pipeline.cycle()
        hung.batch_began()  # and its handler hangs
        given += [group.create_task(pipeline.give(there, [(1, began_ms + 9000)]))]
        await pipeline.clock.advance((rules.missing_limit_ms + rules.idle_time_ms) / 1000 + 10)
        assert (coordinator.status().held_by, coordinator.status().stuck) == ("hung", True)
        await asyncio.gather(hung.finish(), there.finish())


async def test_a_stream_that_is_idle_is_never_stuck_and_neither_is_one_whose_windows_are_not_due(
    tmp_path: Path,
) -> None:
    for size_ms, lag_ms in ((10_000, 0), (10**9, 5)):
        pipeline = Pipeline(
            tmp_path / str(size_ms),
            spec=TimeWindows(size_ms, on="at"),
            rules=replace(RULES, on_arrival=False, quiet_time_ms=10**9),
        )
        async with pipeline.life() as coordinator:
            session = await pipeline.open("a")
            at = pa.array([1_000_000], pa.timestamp("ms", tz="UTC"))
            await pipeline.give(session, [(1, 1_000_000)], columns={"at": at}, lag_ms=lag_ms)
            await pipeline.clock.advance(300)
            assert (coordinator.status().windows_open, coordinator.status().stuck) == (1, False)


async def test_a_window_of_many_flushes_is_read_from_few_files_in_this_life_and_the_next(
    pipeline: Pipeline,
) -> None:
    flushes = 150

    async def flush(numbers: range, session: IntakeSession) -> None:
        for number in numbers:
            await pipeline.give(session, [(number, 1000 + number)])
            await pipeline.cycle()

    async with pipeline.life():
        await flush(range(1, 71), await pipeline.open("a"))
    async with pipeline.life():
        # What the first life joined is there yet; its last six segments stay as they are.
        session = await pipeline.open("a", S(70))
        await flush(range(71, flushes + 1), session)
        await pipeline.give(session, [(flushes + 1, 25_000)])
        await pipeline.clock.advance(3)
        (job,) = pipeline.engine.jobs
    assert (job.rows, len(job.segments)) == (flushes, 1 + 6 + 1 + 16)
    assert pipeline.published() == {W[0]: list(range(1, flushes + 1))}
    assert [name for name in pipeline.private_files() if is_joined(name)] == []
