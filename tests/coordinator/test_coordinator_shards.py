"""The async shell as its sources see it: a shard is opened, opened again, ends, and is lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from coordinator.pipeline import RULES, Pipeline, fail, listed, missing, named

from mldserver.consumer.intake import ShardOpening
from mldserver.errors import GapRefused, LedgerError, PeerError
from mldserver.records import Sequence
from mldserver.windows import time_window_id

pytestmark = pytest.mark.quick

S = Sequence
W = [time_window_id(start) for start in range(0, 100_000, 10_000)]


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


async def test_where_a_shard_begins_is_durable_before_its_first_record_and_moves_no_position(
    pipeline: Pipeline,
) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        session.begin(S(0, 7))
        assert session.after == S(0, 7)
        await session.drain()
        assert (
            pipeline.coordinator.shards.ledger_snapshot().shards["a"].position is None
        )  # as the cycle found it
        await pipeline.cycle()
        assert pipeline.coordinator.shards.ledger_snapshot().shards["a"].position == S(0, 7)
        await pipeline.give(session, [(5, 1000)])
        session.begin(S(0, 9))
        assert session.after == S(5)


async def test_a_source_sees_who_has_which_shard_and_loses_what_another_server_opened(
    pipeline: Pipeline,
) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.cycle()
        seen = pipeline.coordinator.shards.ledger_snapshot()
        assert (seen.server_id, seen.servers, seen.shards["a"].owner) == ("one", {"one"}, "one")
        assert session.alive
        other = pipeline.ledger.store
        state = other.peek().shards["a"]
        other.server_id = "two"
        assert other.open_shard("a").epoch == state.epoch + 1
        other.server_id = "one"
        await pipeline.cycle()
        assert not session.alive


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
        assert len(pipeline.coordinator.lineage.connected()) == 1
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
        assert missing(coordinator) == ("a",)
    state = pipeline.state().shards["a"]
    assert (state.position, state.ended) == (None, False)


async def test_of_two_openings_at_once_the_later_one_owns_the_shard(pipeline: Pipeline) -> None:
    async with pipeline.life() as coordinator:
        coordinator.shards.add_listing(listed({"p": (), "a": ("p",)}))
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

        ledger, coordinator.shards.ledger = coordinator._ledger, Slow()
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
        coordinator.shards.add_listing(listed({"p": (), "a": ("p",)}))
        fail(pipeline, "end_shards", lambda: LedgerError("disk full"))
        with pytest.raises(LedgerError):
            await pipeline.open("a")
        await pipeline.clock.advance(3)
        assert len(coordinator.lineage.connected()) == 0
        assert coordinator.status().reason == "missing"
        pipeline.faults.hook = None
        await pipeline.open("a")
        assert missing(coordinator) == ()
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


async def test_a_stream_that_was_over_and_gets_a_child_is_over_when_that_has_ended_too(
    pipeline: Pipeline, logged: list[dict[str, Any]]
) -> None:
    async with pipeline.life() as coordinator:
        parent = await pipeline.open("p")
        await pipeline.give(parent, [(1, 1000)])
        assert await parent.end()
        await pipeline.clock.drive(coordinator.over())
        child = await pipeline.open("c", parents=("p",))
        assert not coordinator.status().stream_ended, "at once, not with the next cycle"
        waiting = asyncio.get_running_loop().create_task(coordinator.over())
        await pipeline.give(child, [(2, 15_000)])
        await pipeline.clock.advance(10)
        assert not waiting.done()
        assert await child.end()
        await pipeline.clock.advance(5)
        assert waiting.done()
        assert len(pipeline.runner.unfinished) == coordinator.status().windows_open == 0
        assert pipeline.published() == {W[0]: [1], W[1]: [2]}
    assert [event["shards"] for event in named(logged, "stream.ended")] == [1, 2]


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
        assert missing(coordinator) == ("a",)
        assert (await pipeline.open("a")).after == S(1)


async def test_a_shard_that_the_stream_has_not_named_yet_is_asked_for_before_it_is_opened(
    tmp_path: Path,
) -> None:
    asked = []

    async def ask() -> bool:
        asked.append(len(asked))
        pipeline.coordinator.shards.add_listing(listed({"parent": (), "child": ("parent",)}))
        return True

    pipeline = Pipeline(tmp_path, ask_stream=ask)
    async with pipeline.life() as coordinator:
        parent = await pipeline.open("parent")
        await pipeline.give(parent, [(1, 9000)])
        assert await parent.end()
        coordinator.lineage.nodes.pop("child")
        child = await pipeline.open("child")
        await pipeline.give(child, [(2, 1000)])
        assert asked == [0, 1]
        assert coordinator.lineage.nodes["child"].effective_ms == 9000
        assert coordinator.lineage.nodes["child"].parents == ("parent",)
        await pipeline.open("child")
        assert asked == [0, 1]


@dataclass
class Stream:
    """AWS, which answers after a while: with what it lists, or not at all."""

    listing: dict[str, tuple[str, ...]]
    seconds: float = 1
    answers: bool = True
    pipeline: Pipeline = field(init=False)

    async def ask(self) -> bool:
        await self.pipeline.clock.sleep(self.seconds)
        if self.answers:
            self.pipeline.coordinator.shards.add_listing(listed(self.listing))
        return self.answers

    def pipe(self, out: Path, **changes: Any) -> Pipeline:
        self.pipeline = Pipeline(out, ask_stream=self.ask, rules=replace(RULES, **changes))
        return self.pipeline


async def test_a_name_that_the_stream_does_not_list_is_refused_and_holds_no_window(tmp_path: Path) -> None:
    pipeline = Stream({"a": ()}).pipe(tmp_path)
    async with pipeline.life() as coordinator, asyncio.TaskGroup() as group:
        opening = group.create_task(pipeline.open("a"))
        await pipeline.clock.advance(2)
        session = await opening

        async def refused() -> None:
            with pytest.raises(PeerError, match="shard made-up, which the stream does not have") as found:
                await pipeline.open("made-up")
            assert found.value.where == {"shard": "made-up"}

        both = [group.create_task(refused()) for _ in range(2)]
        given_up = group.create_task(pipeline.open("other"))
        await pipeline.clock.advance(0.5)
        assert missing(coordinator) == ("made-up", "other"), (
            "until the stream has answered they may be shards"
        )
        given_up.cancel()
        await asyncio.wait([given_up])
        assert missing(coordinator) == ("made-up",)
        await pipeline.clock.advance(1)
        assert all(one.done() for one in both)
        assert set(coordinator.lineage.nodes) == {"a"}
        await pipeline.give(session, [(1, 1000), (2, 25_000)])
        await pipeline.clock.advance(3)
        assert W[0] in pipeline.published()
    assert set(pipeline.state().shards) == {"a"}


async def test_a_shard_is_known_until_the_last_of_its_connections_is_given_up(tmp_path: Path) -> None:
    pipeline = Stream({"a": ()}).pipe(tmp_path)
    async with pipeline.life() as coordinator, asyncio.TaskGroup() as group:
        given_up = group.create_task(pipeline.open("a"))
        await pipeline.clock.advance(0.5)
        opening = group.create_task(pipeline.open("a"))
        await pipeline.clock.advance(0.1)
        given_up.cancel()
        await asyncio.wait([given_up])
        assert missing(coordinator) == ("a",)
        await pipeline.clock.advance(2)
        assert (await opening).alive


async def test_a_shard_that_a_reshard_has_just_made_is_found_by_asking_again(tmp_path: Path) -> None:
    stream = Stream({"a": ()})
    pipeline = stream.pipe(tmp_path)
    async with pipeline.life() as coordinator, asyncio.TaskGroup() as group:
        coordinator.shards.add_listing(listed(stream.listing))
        stream.listing |= {"b": ("a",)}
        opening = group.create_task(pipeline.open("b"))
        await pipeline.clock.advance(2)
        assert (await opening).alive


@pytest.mark.parametrize(("answers", "accept_gap"), [(False, False), (True, True)])
async def test_a_name_is_not_refused_where_aws_does_not_say_or_the_operator_accepts_another_stream(
    tmp_path: Path, answers: bool, accept_gap: bool
) -> None:
    pipeline = Stream({"a": ()}, answers=answers).pipe(tmp_path, accept_gap=accept_gap)
    async with pipeline.life(), asyncio.TaskGroup() as group:
        opening = group.create_task(pipeline.open("unlisted"))
        await pipeline.clock.advance(2)
        assert (await opening).alive


async def test_a_shard_that_the_ledger_knows_is_let_in_though_the_stream_lists_it_no_more(
    tmp_path: Path,
) -> None:
    stream = Stream({}, answers=False)
    pipeline = stream.pipe(tmp_path)
    for stream.answers in (False, True):
        async with pipeline.life(), asyncio.TaskGroup() as group:
            opening = group.create_task(pipeline.open("trimmed"))
            await pipeline.clock.advance(2)
            assert (await opening).alive


async def test_a_shard_that_is_removed_from_the_ledger_holds_nothing_in_a_server_that_runs(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    stream = Stream({"a": (), "listed": ()}, answers=False)
    pipeline = stream.pipe(tmp_path)
    async with pipeline.life() as coordinator, asyncio.TaskGroup() as group:
        names = ("a", "made-up", "listed")
        openings = [group.create_task(pipeline.open(name)) for name in names]
        await pipeline.clock.advance(2)
        sessions = [await opening for opening in openings]
        for session in sessions[1:]:
            session.disconnected()
        await pipeline.give(sessions[0], [(1, 1000), (2, 25_000)])
        await pipeline.cycle()
        coordinator.shards.add_listing(listed(stream.listing))
        assert missing(coordinator) == ("made-up", "listed")
        assert await pipeline.ledger.forget_shards(frozenset(names)) == {"made-up", "listed"}
        await pipeline.cycle()
        assert missing(coordinator) == ("listed",)
    assert named(logged, "flush.failed") == []


async def test_no_window_closes_before_a_shard_that_is_being_opened_however_long_the_answers_take(
    tmp_path: Path,
) -> None:
    async def ask() -> bool:
        await pipeline.clock.sleep(5)
        return False

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
        coordinator.shards.abandon("a")
        coordinator.shards.abandon("never seen")
        assert not session.alive
        await pipeline.clock.advance(60)
        assert named(logged, "shard.missing")[0]["shard"] == "a"


async def test_before_a_shard_is_taken_it_can_be_asked_whether_that_would_be_refused(
    pipeline: Pipeline,
) -> None:
    async with pipeline.life() as coordinator:
        await coordinator.shards.check(ShardOpening("a", S(9), tells_lag=True))
        session = await pipeline.open("a")
        await coordinator.shards.check(ShardOpening("a", "TRIM_HORIZON", tells_lag=True))
        with pytest.raises(GapRefused):
            await coordinator.shards.check(ShardOpening("a", S(9), tells_lag=True))
        session.disconnected()
        await coordinator.shards.check(ShardOpening("a", S(9), tells_lag=True))


async def test_what_a_connection_left_behind_is_flushed_after_it_is_gone(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        session.disconnected()
        await pipeline.cycle()
        assert (await pipeline.open("a")).after == S(1)
