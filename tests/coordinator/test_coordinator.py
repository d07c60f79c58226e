"""The async shell as its sources see it, over virtual time, the real ledger, and a small engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from coordinator.outcomes import dead_letter
from coordinator.pipeline import RULES, Pipeline

from mldserver.coordinator.watermark import WatermarkRules
from mldserver.coordinator.windows import Tumbling, batches, tumbling_id
from mldserver.errors import GapRefused, LedgerError
from mldserver.records import Sequence
from mldserver.sources.base import ShardOpening
from mldserver.state.batches import batch_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

S = Sequence
W = [tumbling_id(start) for start in range(0, 100_000, 10_000)]


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    return Pipeline(tmp_path)


def named(logged: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in logged if event["event"] == name]


def fail(pipeline: Pipeline, name: str, error: Callable[[], Exception]) -> None:
    """Let every call of a name fail from now on."""

    def hook(called: str, after: bool) -> None:
        if called == name and not after:
            raise error()

    pipeline.faults.hook = hook


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


# Opening.


async def test_a_daemon_that_starts_beyond_the_position_is_refused(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(5, 1000)])
        await pipeline.cycle()
        session.disconnected()
        for start in (S(6), "LATEST", "SHARD_END"):
            with pytest.raises(GapRefused, match=r"beyond the ledger's position \(5\)") as found:
                await pipeline.open("a", start)
            assert found.value.where == {"shard": "a"}
        assert (await pipeline.open("a", S(5))).after == S(5)


async def test_a_daemon_that_starts_at_a_sequence_that_no_ledger_knows_is_refused(pipeline: Pipeline) -> None:
    async with pipeline.life():
        with pytest.raises(GapRefused, match=r"position \(none\)"):
            await pipeline.open("a", S(6))


async def test_a_gap_that_the_operator_accepts_is_told(tmp_path: Path, logged: list[dict[str, Any]]) -> None:
    pipeline = Pipeline(tmp_path, rules=replace(RULES, accept_gap=True))
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(5, 1000)])
        await pipeline.cycle()
        again = await pipeline.open("a", S(9))
        await pipeline.open("b", S(3))
        await pipeline.give(again, [(10, 2000)])
        await again.drain()
        assert again.checkpoint_due() == S(10)
    told = [
        (event["shard"], event["start"], event["position"]) for event in named(logged, "shard.gap_accepted")
    ]
    assert told == [("a", "9", "5"), ("b", "3", None)]


async def test_a_connection_that_is_refused_costs_the_live_one_nothing(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        with pytest.raises(GapRefused):
            await pipeline.open("a", "SHARD_END")
        await pipeline.give(session, [(2, 2000)])
        assert await session.end()
        await pipeline.clock.advance(5)
        assert pipeline.published() == {W[0]: [1, 2]}


async def test_opening_a_shard_again_drops_what_was_not_durable_and_the_old_connection_is_dead(
    pipeline: Pipeline,
) -> None:
    async with pipeline.life():
        old = await pipeline.open("a")
        await pipeline.give(old, [(1, 1000)])
        await pipeline.cycle()
        await pipeline.give(old, [(2, 2000), (3, 3000)])
        new = await pipeline.open("a", S(1))
        assert new.after == S(1)
        await pipeline.give(old, [(4, 4000)])
        await old.drain()
        old.disconnected()
        assert await old.end() is False
        await old.lost()
        assert old.checkpoint_due() is None
        assert pipeline.coordinator.status().shards_connected == 1
        await pipeline.give(new, [(2, 2000)])
        await pipeline.give(new, [(3, 3000), (4, 4000)])
        assert await new.end()
        await pipeline.clock.advance(5)
        assert pipeline.published() == {W[0]: [1, 2, 3, 4]}


async def test_a_shard_that_is_opened_again_while_its_rows_are_written_loses_and_doubles_nothing(
    pipeline: Pipeline, logged: list[dict[str, Any]]
) -> None:
    async with pipeline.life() as coordinator:
        old = await pipeline.open("a")
        other = await pipeline.open("b")
        await pipeline.give(old, [(1, 1000), (2, 31_000)])
        await pipeline.give(other, [(7, 1000), (8, 32_000)])
        opened: list[asyncio.Task[Any]] = []

        def reopen(name: str, after: bool) -> None:
            if name == "write" and not after and not opened:
                # The ledger raises the epoch now; the connection learns of it in some later turn.
                coordinator._ledger.store.open_shard("a")
                opened.append(asyncio.get_running_loop().create_task(pipeline.open("a")))

        pipeline.faults.hook = reopen
        await pipeline.cycle()
        assert named(logged, "flush.refused")[0]["lost_shards"] == ["a"]
        assert pipeline.published() == {}, "nothing is cut in a cycle that lost rows the watermark counted on"
        new = opened[0].result()
        assert new.after is None
        assert old.checkpoint_due() is None
        await pipeline.give(new, [(1, 1000), (2, 31_000)])
        for _ in range(3):
            await pipeline.cycle()
        assert pipeline.published() == {W[0]: [7, 1]}


async def test_a_connection_whose_rows_were_left_out_cannot_claim_the_shards_end(pipeline: Pipeline) -> None:
    async with pipeline.life() as coordinator:
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        coordinator._ledger.store.open_shard("a")  # another server has it now
        assert await session.end() is False
        assert session.checkpoint_due() is None
        assert not session.alive
        assert coordinator.status().shards_missing == ("a",)
    state = pipeline.state().shards["a"]
    assert (state.position, state.ended) == (None, False)


async def test_of_two_openings_at_once_the_later_one_owns_the_shard(pipeline: Pipeline) -> None:
    async with pipeline.life() as coordinator:
        coordinator.know({"p": (), "a": ("p",)})
        waiting = asyncio.Event()
        real = coordinator._ledger.store.end_shards
        first: list[asyncio.Task[Any]] = []

        class Slow:
            def __getattr__(self, name: str) -> Any:
                return getattr(ledger, name)

            async def end_shards(self, shards: frozenset[str]) -> None:
                if not waiting.is_set():
                    waiting.set()
                    await pipeline.clock.sleep(5)
                real(shards, now_ms=0)

        ledger, coordinator._ledger = coordinator._ledger, Slow()
        first.append(asyncio.get_running_loop().create_task(pipeline.open("a")))
        await waiting.wait()
        second = await pipeline.open("a")
        await pipeline.clock.advance(6)
        assert (second.alive, first[0].result().alive) == (True, False)
        await pipeline.give(second, [(1, 1000)])
        await second.drain()
        assert second.checkpoint_due() == S(1)


async def test_a_ledger_that_cannot_note_proved_ends_leaves_the_shard_missing_and_not_half_there(
    pipeline: Pipeline,
) -> None:
    async with pipeline.life() as coordinator:
        coordinator.know({"p": (), "a": ("p",)})
        fail(pipeline, "end_shards", lambda: LedgerError("disk full"))
        with pytest.raises(LedgerError):
            await pipeline.open("a")
        await pipeline.clock.advance(3)
        assert coordinator.status().shards_connected == 0
        assert coordinator.status().reason == "missing"
        pipeline.faults.hook = None
        await pipeline.open("a")
        assert coordinator.status().shards_missing == ()
    assert pipeline.state().shards["p"].ended


# Ends.


async def test_when_every_shard_has_ended_every_window_is_published_and_the_stream_is_over(
    pipeline: Pipeline, logged: list[dict[str, Any]]
) -> None:
    async with pipeline.life() as coordinator:
        one, two = await pipeline.open("a"), await pipeline.open("b")
        await pipeline.give(one, [(1, 1000), (2, 15_000)])
        await pipeline.give(two, [(3, 2000), (4, 95_000)])
        assert await one.end()
        await pipeline.clock.advance(3)
        assert not coordinator.status().stream_ended
        assert await two.end()
        await pipeline.clock.drive(coordinator.over())
        await pipeline.clock.drive(pipeline.runner.idle())
        assert pipeline.published() == {W[0]: [1, 3], W[1]: [2], W[9]: [4]}
        assert coordinator.status().stream_ended
        assert coordinator.status().windows_published == 3
        await pipeline.clock.advance(5)
    assert [event["shards"] for event in named(logged, "stream.ended")] == [2]
    assert [(event["shard"], event["position"]) for event in named(logged, "shard.ended")] == [
        ("a", "2"),
        ("b", "4"),
    ]


async def test_an_end_that_is_not_durable_yet_is_not_told(pipeline: Pipeline) -> None:
    async with pipeline.life() as coordinator:
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        fail(pipeline, "register", lambda: LedgerError("disk full"))
        ending = asyncio.get_running_loop().create_task(session.end())
        await pipeline.clock.advance(20)
        assert not ending.done()
        assert coordinator.status().flush_failing
        pipeline.faults.hook = None
        await pipeline.clock.advance(40)
        assert ending.result() is True
        assert not coordinator.status().flush_failing
    assert pipeline.state().shards["a"].ended


async def test_an_end_right_after_a_reconnect_keeps_the_position(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        await pipeline.cycle()
        again = await pipeline.open("a", S(1))
        assert await again.end()
    state = pipeline.state().shards["a"]
    assert (state.ended, state.position) == (True, S(1))


async def test_a_shard_that_had_ended_may_be_read_and_ended_again(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        await session.end()
    async with pipeline.life():  # the daemon died before it had stored SHARD_END
        again = await pipeline.open("a")
        await pipeline.give(again, [(1, 1000)])
        assert await again.end()
        await pipeline.clock.advance(5)
        assert pipeline.published() == {W[0]: [1]}


async def test_a_child_that_connects_ends_its_parents_durably_and_its_rows_come_after_theirs(
    pipeline: Pipeline,
) -> None:
    async with pipeline.life():
        parent = await pipeline.open("p")
        await pipeline.give(parent, [(1, 5000)])
        await parent.drain()
        parent.disconnected()
        child = await pipeline.open("c", parents=("p",))
        await pipeline.give(child, [(2, 3000)])
        assert await child.end()
        await pipeline.clock.advance(5)
        rows = pipeline.rows("window=*/*.parquet")
        assert [(row["_shard"], row["_time"]) for row in rows] == [("p", 5000), ("c", 5000)]
    assert pipeline.state().shards["p"].ended


@pytest.mark.parametrize("leaves", ["end", "lost", "drain"])
async def test_a_shard_that_waits_for_the_ledger_to_leave_is_not_idle_and_goes_on_elsewhere_in_time(
    pipeline: Pipeline, leaves: str
) -> None:
    async with pipeline.life(), asyncio.TaskGroup() as group:
        leaving, ahead = await pipeline.open("a"), await pipeline.open("z")
        await pipeline.give(leaving, [(1, 1000)])
        await pipeline.give(ahead, [(11, 1500), (12, 25_000)], lag_ms=60_000)
        fail(pipeline, "register", lambda: LedgerError("out of reach"))
        left = group.create_task(getattr(leaving, leaves)())
        await pipeline.clock.advance(12)
        pipeline.faults.hook = None
        while not left.done():
            await pipeline.clock.advance(0.1)
        next_one = await (
            pipeline.open("child", parents=("a",)) if leaves == "end" else pipeline.open("a", S(1))
        )
        await pipeline.give(next_one, [(21, 2000), (22, 25_000)])
        await pipeline.clock.advance(4)
        assert (pipeline.published(), pipeline.late()) == ({W[0]: [1, 11, 21]}, [])


async def test_a_lost_lease_makes_durable_what_it_can_and_lets_go(pipeline: Pipeline) -> None:
    async with pipeline.life() as coordinator:
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        await session.lost()
        assert not session.alive
        assert coordinator.status().shards_missing == ("a",)
        assert (await pipeline.open("a")).after == S(1)


async def test_a_shard_that_the_stream_has_not_named_yet_is_asked_for_before_it_is_opened(
    tmp_path: Path,
) -> None:
    asked = []

    async def ask() -> None:
        asked.append(len(asked))
        pipeline.coordinator.know({"parent": (), "child": ("parent",)})

    pipeline = Pipeline(tmp_path, ask_stream=ask)
    async with pipeline.life() as coordinator:
        parent = await pipeline.open("parent")
        await pipeline.give(parent, [(1, 9000)])
        assert await parent.end()
        coordinator.lineage._nodes.pop("child")
        child = await pipeline.open("child")
        await pipeline.give(child, [(2, 1000)])
        assert asked == [0, 1]
        assert coordinator.lineage["child"].effective_ms == 9000
        assert coordinator.parents("child") == ("parent",)
        await pipeline.open("child")
        assert asked == [0, 1]


async def test_no_window_closes_before_a_shard_that_is_being_opened_however_long_the_answers_take(
    tmp_path: Path,
) -> None:
    async def ask() -> None:
        await pipeline.clock.sleep(5)

    pipeline = Pipeline(tmp_path, ask_stream=ask)
    async with pipeline.life(), asyncio.TaskGroup() as group:
        opening = group.create_task(pipeline.open("ahead"))
        await pipeline.clock.advance(7)
        ahead = await opening
        await pipeline.give(ahead, [(1, 1000)], lag_ms=60_000)
        opening = group.create_task(pipeline.open("slow"))
        await pipeline.clock.advance(1)
        await pipeline.give(ahead, [(2, 25_000)], lag_ms=60_000)
        await pipeline.clock.advance(3)
        assert (opening.done(), pipeline.published()) == (False, {})
        await pipeline.clock.advance(2)
        slow = await opening
        await pipeline.give(slow, [(7, 2000), (8, 25_000)], lag_ms=60_000)
        await pipeline.clock.advance(4)
        assert pipeline.published() == {W[0]: [1, 7]}
        assert pipeline.late() == []


async def test_a_shard_whose_opening_is_given_up_before_the_ledger_knows_it_is_missing(
    pipeline: Pipeline,
) -> None:
    def refuse(name: str, after: bool) -> None:
        if name == "open_shard" and not after:
            raise LedgerError("out of reach")

    async with pipeline.life():
        ahead = await pipeline.open("ahead")
        await pipeline.clock.advance(3)
        pipeline.faults.hook = refuse
        with pytest.raises(LedgerError):
            await pipeline.open("late to come")
        pipeline.faults.hook = None
        await pipeline.give(ahead, [(1, 1000), (2, 25_000)], lag_ms=60_000)
        await pipeline.clock.advance(5)
        assert pipeline.published() == {}
        late = await pipeline.open("late to come")
        await pipeline.give(late, [(7, 2000), (8, 25_000)], lag_ms=60_000)
        await pipeline.clock.advance(4)
        assert (pipeline.published(), pipeline.late()) == ({W[0]: [1, 7]}, [])


async def test_a_shard_that_nobody_has_any_more_is_missing(
    pipeline: Pipeline, logged: list[dict[str, Any]]
) -> None:
    async with pipeline.life() as coordinator:
        session = await pipeline.open("a")
        coordinator.abandon("a")
        coordinator.abandon("never seen")
        assert not session.alive
        await pipeline.clock.advance(60)
        assert named(logged, "shard.missing")[0]["shard"] == "a"


async def test_before_a_shard_is_taken_it_can_be_asked_whether_that_would_be_refused(
    pipeline: Pipeline,
) -> None:
    async with pipeline.life() as coordinator:
        coordinator.check(ShardOpening("a", S(9), tells_lag=True))
        session = await pipeline.open("a")
        coordinator.check(ShardOpening("a", "TRIM_HORIZON", tells_lag=True))
        with pytest.raises(GapRefused):
            coordinator.check(ShardOpening("a", S(9), tells_lag=True))
        session.disconnected()
        coordinator.check(ShardOpening("a", S(9), tells_lag=True))


async def test_what_a_connection_left_behind_is_flushed_after_it_is_gone(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        session.disconnected()
        await pipeline.cycle()
        assert (await pipeline.open("a")).after == S(1)


# Bounds.


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


async def test_while_disk_is_short_the_shard_that_holds_the_watermark_goes_on(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = Pipeline(tmp_path, rules=replace(RULES, segment_bytes=1, flush_bytes=1))
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


# Watermark.


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
        assert (status.held_by, status.reason, status.shards_missing) == ("gone", "missing", ("gone",))
        assert [event["shard"] for event in named(logged, "shard.missing")] == ["gone"]
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
        await pipeline.clock.advance(5)
        assert len(named(logged, "shard.missing")) == 2, "it is told again after it was there"


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
        assert coordinator.know({"a": (), "b": (), "c": ("b",)}) == ("b", "c")
        assert coordinator.know({"a": (), "b": (), "c": ("b",)}) == ()
        assert (coordinator.parents("c"), coordinator.parents("unknown")) == (("b",), ())
        await pipeline.give(session, [(1, 1000), (2, 25_000)])
        await pipeline.clock.advance(3)
        assert pipeline.published() == {}
        assert coordinator.status().shards_missing == ("b",)


async def test_a_stream_cut_on_a_column_closes_its_windows_when_it_is_quiet(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    import pyarrow as pa

    def at(value: int) -> dict[str, Any]:
        return {"value": pa.array([value]), "at": pa.array([1000 * value], pa.timestamp("ms"))}

    rules = replace(RULES, watermark=WatermarkRules(False, 0, 5000, 10_000, 1000))
    pipeline = Pipeline(tmp_path, spec=Tumbling(10_000, "at"), rules=rules)
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
    pipeline = Pipeline(tmp_path, spec=Tumbling(10_000, lateness_ms=5000))
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
        assert coordinator.status().shards_missing == ("a",)
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
        assert "p" in coordinator.lineage
        await pipeline.clock.advance(7200)
        assert "p" not in coordinator.lineage
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
