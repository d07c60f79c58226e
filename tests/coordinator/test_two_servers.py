"""Two coordinators on one ledger: what either does is right for both, wherever leases go and whoever dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from coordinator.pipeline import QUICK, Pipeline, missing, named, two
from support.store import SqliteStore

from mldserver.coordinator.cleanup import recover
from mldserver.coordinator.shards import IntakeSession
from mldserver.errors import GapRefused, LedgerError, ServerExpired
from mldserver.ledger.contract import Commit, WindowState
from mldserver.output.layout import LEDGER, SERVERS, server_tag
from mldserver.records import Sequence
from mldserver.windows import time_window_id

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("joins_early")]

W = [time_window_id(start) for start in range(0, 100_000, 10_000)]


@contextlib.asynccontextmanager
async def both(one: Pipeline, other: Pipeline) -> AsyncIterator[None]:
    async with one.life(), other.life():
        await one.clock.advance(3)
        yield


# The watermark of several.


async def test_a_window_waits_for_the_shards_of_every_server_and_holds_the_rows_of_all(
    tmp_path: Path,
) -> None:
    one, other = two(tmp_path)
    async with both(one, other):
        ahead, behind = await one.open("a"), await other.open("b")
        await one.give(ahead, [(1, 1000), (2, 25_000)])
        await other.give(behind, [(7, 2000)])
        await one.clock.advance(6)
        assert one.published() == {}
        status = one.coordinator.status()
        assert (status.held_by_server, status.held_by, status.servers) == ("two", "b", 2)
        await other.give(behind, [(8, 12_000)])
        await one.clock.advance(3)
        assert one.published() == {W[0]: [1, 7]}
        assert sum(each.coordinator.status().windows_published for each in (one, other)) == 1


async def test_a_server_without_shards_holds_nothing_and_knows_who_reads_them(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    async with both(one, other):
        session = await one.open("a")
        await one.give(session, [(1, 1000), (2, 11_000)])
        await one.clock.advance(3)
        assert one.published() == {W[0]: [1]}
        assert missing(other.coordinator) == ()


async def test_a_shard_without_a_server_holds_the_windows_of_all(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    async with both(one, other):
        moving, staying = await one.open("a"), await other.open("b")
        await one.give(moving, [(1, 1000)])
        await other.give(staying, [(7, 1000)])
        await one.cycle()
        await moving.lost()
        await other.give(staying, [(8, 25_000)])
        await one.clock.advance(3)
        assert one.published() == {}
        assert missing(one.coordinator) == ("a",)
        assert missing(other.coordinator) == ("a",)
        again = await other.open("a", Sequence(1))
        await one.clock.advance(3)
        assert one.published() == {}
        await other.give(again, [(2, 12_000)])
        await one.clock.advance(3)
        assert one.published() == {W[0]: [1, 7]}
        assert missing(one.coordinator) == ()


async def test_a_shard_that_was_just_taken_is_counted_before_anyone_else_drops_it(tmp_path: Path) -> None:
    """Between two beats the new owner's word says nothing of the shard: the old owner still holds it."""
    one, other = two(tmp_path)
    async with both(one, other):
        moving, ahead = await one.open("a"), await other.open("b")
        await one.give(moving, [(1, 1000)])
        await other.give(ahead, [(7, 45_000)])
        await one.clock.advance(6.5)
        assert one.state().servers["two"].watermark_ms == 45_000
        taken = await other.open("a", Sequence(1))
        await moving.lost()
        for _ in range(3):  # cycles of the one, and no beat of the other
            await one.coordinator.flush("test")
        assert one.state().windows[W[0]].state is WindowState.OPEN
        await one.clock.advance(4)
        assert one.published() == {}
        await other.give(taken, [(2, 2000), (3, 15_000)])
        await one.clock.advance(3)
        assert one.published() == {W[0]: [1, 2]}
        assert one.late() == []


async def test_the_stream_is_over_only_when_it_is_over_for_all(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    async with both(one, other):
        first, second = await one.open("a"), await other.open("b")
        await one.give(first, [(1, 1000)])
        await other.give(second, [(7, 1000)])
        assert await first.end()
        await one.clock.advance(4)
        assert one.published() == {}
        assert not one.coordinator.status().stream_ended
        assert await second.end()
        await one.clock.advance(5)
        assert one.published() == {W[0]: [1, 7]}
        assert one.coordinator.status().stream_ended
        assert other.coordinator.status().stream_ended


async def test_a_child_goes_on_behind_its_parent_wherever_either_is_read(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    async with both(one, other):
        parent = await one.open("p")
        await one.give(parent, [(1, 1000), (2, 9000)])
        assert await parent.end()
        child = await other.open("c", parents=("p",))
        await other.give(child, [(5, 3000), (6, 9000)])
        assert await child.end()
        await one.clock.advance(6)
    rows = one.rows("window=*/*.parquet")
    assert [(row["value"], row["_time"]) for row in rows] == [(1, 1000), (2, 9000), (5, 9000), (6, 9000)]


# Fencing.


async def test_a_shard_that_another_server_opened_is_left_out_here_and_doubled_nowhere(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    one, other = two(tmp_path)
    async with both(one, other):
        old, beside = await one.open("a"), await one.open("z")
        await one.give(old, [(1, 1000), (2, 2000)])
        await one.give(beside, [(9, 3000)])
        new = await other.open("a")
        assert new.after is None
        await other.give(new, [(1, 1000)])
        await one.cycle()
        assert not old.alive
        assert named(logged, "flush.refused")[0]["lost_shards"] == ["a"]
        await one.give(old, [(3, 3000)])
        assert old.checkpoint_due() is None
        assert await old.end() is False
        await other.give(new, [(2, 2000), (3, 3000)])
        assert await new.end()
        assert await beside.end()
        await one.clock.advance(5)
        assert one.published() == {W[0]: [1, 2, 3, 9]} or one.published() == {W[0]: [1, 2, 9, 3]}


async def test_a_connection_without_rows_learns_that_its_shard_is_elsewhere(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    async with both(one, other):
        old = await one.open("a")
        await other.open("a")
        await one.clock.advance(3)
        assert not old.alive
        assert len(one.coordinator.lineage.connected()) == 0
        assert missing(one.coordinator) == ()


@pytest.mark.parametrize("call", ["register", "cut", "commit", "published", "open_shard", "release_shard"])
async def test_a_call_whose_answer_is_lost_is_not_done_twice(tmp_path: Path, call: str) -> None:
    pipeline = Pipeline(tmp_path, rules=QUICK)
    failed: list[str] = []

    def lose(name: str, after: bool) -> None:
        if name == call and after and not failed:
            failed.append(name)
            raise LedgerError("the answer was lost")

    async with pipeline.life():
        if call == "open_shard":
            pipeline.faults.hook = lose
            with pytest.raises(LedgerError):
                await pipeline.open("a")
        session = await pipeline.open("a")
        gone = await pipeline.open("b")
        pipeline.faults.hook = lose
        await pipeline.give(session, [(1, 1000), (2, 2000)])
        await pipeline.clock.advance(1.2)
        await pipeline.give(session, [(3, 3000)])
        await pipeline.clock.advance(2)
        gone.disconnected()
        await pipeline.clock.advance(2)
        gone = await pipeline.open("b")
        assert await session.end()
        assert await gone.end()
        await pipeline.clock.advance(8)
        assert failed
        assert pipeline.published() == {W[0]: [1, 2, 3]}
    assert pipeline.late() == []
    async with pipeline.life():
        assert pipeline.nameless_files() == []


# Gaps.


async def test_a_gap_that_was_accepted_in_the_ledger_is_accepted_once(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, rules=QUICK)
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(5, 1000)])
        await pipeline.cycle()
        session.disconnected()
        with pytest.raises(GapRefused):
            await pipeline.open("a", Sequence(9))
        assert pipeline.ledger.store.accept_gap("a")
        again = await pipeline.open("a", Sequence(9))
        again.disconnected()
        with pytest.raises(GapRefused):
            await pipeline.open("a", Sequence(11))
    async with pipeline.life():
        session = await pipeline.open("a", Sequence(9))
        await pipeline.give(session, [(10, 1000)])
        await pipeline.cycle()


async def test_a_shard_that_another_server_has_read_on_is_no_gap_though_this_one_has_not_heard_of_it(
    tmp_path: Path,
) -> None:
    one, other = two(tmp_path)
    async with both(one, other):
        await one.give(await one.open("a"), [(5, 1000)])
        await one.cycle()
        await other.give(await other.open("a", Sequence(5)), [(8, 2000)])
        await other.cycle()
        with pytest.raises(GapRefused, match=r"position \(8\)"):
            await one.open("a", Sequence(9))
        assert (await one.open("a", Sequence(8))).alive
    async with both(one, other):
        await one.open("a", Sequence(8))
        assert one.ledger.store.accept_gap("a")
        await one.open("a", Sequence(9))


# Death.


async def test_a_server_that_died_after_a_cut_is_expired_and_its_window_published_by_the_other(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    one, other = two(tmp_path)
    async with one.life():
        session = await cut_and_stuck(one)
    assert one.state().windows[W[0]].owner == "one"
    async with other.life():
        await one.clock.advance(4)
        assert other.published() == {}
        await one.clock.advance(4)
        assert other.published() == {W[0]: [1]}
        assert missing(other.coordinator) == ("a",)
        assert named(logged, "server.expired")[0]["server"] == "one"
        again = await other.open("a")
        assert again.after == session.after == Sequence(2)
        assert await again.end()
        await one.clock.advance(4)
        assert other.published() == {W[0]: [1], W[1]: [2]}
    assert other.private_files() == []


async def test_a_server_whose_lock_is_free_is_expired_at_once(tmp_path: Path) -> None:
    one, other = two(tmp_path, locks=True)
    async with one.life():
        await cut_and_stuck(one)
    async with other.life():
        await one.clock.advance(1)
        assert other.published() == {W[0]: [1]}
        assert [path.name for path in (tmp_path / SERVERS).iterdir()] == [f"{server_tag('two')}.lock"]


async def cut_and_stuck(server: Pipeline) -> IntakeSession:
    """Bring a server to where it has cut a window and cannot compute it."""
    await server.clock.advance(0)
    server.engine._ready.clear()
    session = await server.open("a")
    await server.give(session, [(1, 1000), (2, 11_000)])
    await server.clock.advance(4)
    assert server.state().windows[W[0]].state is WindowState.CUT
    return session


async def live_and_be_expired(server: Pipeline, other: Pipeline) -> None:
    async with server.life():
        session = await server.open("a")
        await server.give(session, [(1, 1000)])
        seen = server.state().servers[server.server_id]
        assert other.ledger.store.expire_servers({server.server_id: seen.beat_ms})
        await server.clock.advance(2)


async def test_a_start_that_takes_longer_than_servers_wait_for_each_other_is_not_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two(tmp_path)

    async def sweep_much(*args: Any) -> None:
        await one.clock.sleep(3 * QUICK.server_timeout_ms / 1000)
        await recover(*args)

    async with one.life():
        monkeypatch.setattr("mldserver.coordinator.coordinator.recover", sweep_much)
        starting = asyncio.create_task(other.build().start())
        await one.clock.advance(4 * QUICK.server_timeout_ms / 1000)
        await starting
    await other.close_ledger()


async def test_a_start_that_fails_says_why_though_it_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find_no_folder(*_args: Any) -> None:
        raise FileNotFoundError("gone")

    monkeypatch.setattr("mldserver.coordinator.coordinator.recover", find_no_folder)
    with pytest.raises(FileNotFoundError, match="gone"):
        async with Pipeline(tmp_path).life():
            pass


async def test_a_server_that_was_expired_stops_and_what_it_held_comes_again(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    async with other.life():
        with pytest.raises(ExceptionGroup) as found:
            await live_and_be_expired(one, other)
        assert found.value.split(ServerExpired)[1] is None
        again = await other.open("a")
        assert again.after is None
        await other.give(again, [(1, 1000)])
        assert await again.end()
        await one.clock.advance(5)
        assert other.published() == {W[0]: [1]}


async def test_a_server_that_leaves_is_waited_for_by_nobody(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    async with other.life():
        async with one.life() as leaving:
            session = await one.open("a")
            await one.give(session, [(1, 1000)])
            await one.cycle()
            await leaving.leave()
            assert one.state().servers.keys() == {"two"}
        await one.clock.advance(2)
        assert missing(other.coordinator) == ("a",)


async def late_and_not_shown(server: Pipeline) -> None:
    """Bring a server to where a late row is registered and cannot be made visible."""
    await server.clock.advance(3)
    await server.give(await server.open("a"), [(1, 1000), (2, 25_000)])
    await server.clock.advance(5)
    assert server.published() == {W[0]: [1]}

    def refuse(name: str, after: bool) -> None:
        if name == "rename" and not after:
            raise OSError("no")

    server.faults.hook = refuse
    await server.give(await server.open("b"), [(3, 2000)])
    await server.clock.advance(2)
    assert (len(server.state().late_segments), server.late()) == (1, [])


async def test_late_rows_of_a_server_that_died_are_shown_although_the_first_try_fails(
    tmp_path: Path,
) -> None:
    one, other = two(tmp_path)
    async with one.life():
        await late_and_not_shown(one)
    one.faults.hook = None
    failed: list[str] = []

    def fail_once(name: str, after: bool) -> None:
        if name == "peek" and "expire_servers" in other.faults.calls and not failed:
            failed.append(name)
            raise LedgerError("out of reach")

    other.faults.hook = fail_once
    async with other.life():
        await other.clock.advance(12)
        assert failed
        assert other.late() == [3]
        assert other.state().late_segments == ()


async def test_late_rows_of_a_server_that_left_before_they_were_shown_are_shown_by_another(
    tmp_path: Path,
) -> None:
    one, other = two(tmp_path)
    async with other.life():
        async with one.life() as leaving:
            await late_and_not_shown(one)
            await leaving.leave()
        await other.clock.advance(3)
        assert other.late() == [3]


# Files that nobody is told of any more.


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_segment_that_a_server_freed_and_died_is_deleted_by_the_living_one_that_wrote_it(
    tmp_path: Path, *, comes_back: bool
) -> None:
    pipeline = Pipeline(tmp_path, rules=QUICK)
    dying = SqliteStore(tmp_path / LEDGER, pipeline="test", server_id="dying")
    async with pipeline.life():
        await pipeline.open("b")  # it holds the watermark
        await pipeline.give(await pipeline.open("a"), [(1, 1000), (2, 11_000)])
        await pipeline.cycle()
        dying.open(now_ms=pipeline.clock.now_ms())
        await pipeline.cycle()
        dying.cut((W[0],))
        dying.begin_attempts((W[0],))
        assert dying.commit((Commit(W[0], 1, "_mldserver/staging/w", (), 1),)) == {W[0]}
        (freed,) = dying.published({W[0]: 1}, now_ms=pipeline.clock.now_ms(), retain=False)
        await pipeline.cycle()
        assert (tmp_path / freed.path).exists(), "who freed it lives, and is about to delete it"
        if comes_back:
            dying.close()
            dying.open(now_ms=pipeline.clock.now_ms())
            dying.claim(pipeline.state().folder)
            await pipeline.cycle()
        else:
            await pipeline.clock.advance(10)
            assert pipeline.state().servers.keys() == {"one"}
        assert not (tmp_path / freed.path).exists()
        assert pipeline.nameless_files() == []
        assert len(pipeline.private_files()) == 1, "what the ledger names stays"
    dying.close()
