"""A stream that is read directly, at its edges: servers that stop or die while shards are opened, answers that are short."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coordinator.pipeline import Crash, Faults
from dynamodb_streams.direct import Stream

from mldserver.dynamodb_streams.positions import Beginning, ReadPosition, Token
from mldserver.dynamodb_streams.shard_tree import LATEST, After


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocking calls run on the loop: scenarios are the same every time."""

    async def inline(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        await asyncio.sleep(0)
        return function(*args, **named)

    monkeypatch.setattr(asyncio, "to_thread", inline)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


async def test_a_crash_before_any_place_is_durable_begins_where_the_operator_said(
    tmp_path: Path,
) -> None:
    stream = Stream(tmp_path, beginning=Beginning(LATEST))
    stream.put(10)
    (child,) = stream.fake.split(stream.fake.open_shards[0], children=1)
    stream.put(10)
    await stream.clock.advance(20)

    def die(name: str, after: bool) -> None:
        # The closed parent is proved ended when the child is opened: before the child's place is durable.
        if name == "end_shards" and after:
            stream.pipeline.faults.dead = True
            raise Crash(name)

    stream.pipeline.faults.hook = die
    with contextlib.suppress(BaseExceptionGroup, Crash):
        async with stream.serving():
            await stream.clock.advance(5)
    shards = stream.pipeline.state().shards
    assert [(name, shard.position, shard.ended) for name, shard in shards.items() if name != child] == [
        (next(iter(stream.fake.shards)), None, True)
    ]
    stream.pipeline.faults = Faults()
    async with stream.serving():
        await stream.clock.advance(5)
        stream.put(10)
        stream.end()
        await stream.until(lambda: len(stream.values()) >= 10)
        await stream.clock.advance(30)
    assert stream.values() == [*range(20, 30)]


@pytest.mark.parametrize("turns", range(0, 60, 3))
async def test_a_stop_in_any_moment_of_an_opening_ends_at_once(tmp_path: Path, turns: int) -> None:
    stream = Stream(tmp_path, shards=2)
    stream.put(10)
    async with stream.serving() as source:

        async def stop() -> None:
            for _ in range(10_000):
                if source.connections:
                    break
                await asyncio.sleep(0)
            for _ in range(turns):
                await asyncio.sleep(0)
            await source.drain()

        stopping = asyncio.ensure_future(stop())
        await stream.clock.advance(10)
        assert stopping.done()
        assert source.connections == 0


async def test_a_stop_ends_at_once_while_the_shards_that_failed_are_still_forgotten(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    (shard,) = stream.fake.open_shards
    stream.fake.fail("GetShardIterator", "AccessDeniedException", shard_id=shard)
    async with stream.serving(beginning=Beginning(LATEST)) as source:
        visited, leave = asyncio.Event(), asyncio.Event()
        stopping: list[asyncio.Task[None]] = []

        async def forget(_: str) -> None:
            visited.set()
            await leave.wait()

        stream.handler.forget = forget  # type: ignore[method-assign]
        await stream.until(visited.is_set)
        stopping.append(asyncio.ensure_future(source.drain()))
        await stream.clock.advance(0.1)
        leave.set()
        await stream.clock.advance(1)
        assert stopping[0].done()


async def test_no_window_closes_before_the_children_of_a_shard_that_ended_are_named(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.put(10)
    async with stream.serving():
        await stream.clock.advance(11)
        stream.put(10)
        stream.fake.split(stream.fake.open_shards[0], visible_after=5)
        stream.put(10)
        await stream.clock.advance(30)
        stream.end()
        await stream.until(lambda: len(stream.values()) == 30)
    stream.exactly_once()
    assert stream.pipeline.late() == []


async def test_a_server_that_cannot_read_the_stream_does_not_starve_the_shards(tmp_path: Path) -> None:
    stream = Stream(tmp_path, shards=4, servers=2)
    async with stream.serving("one") as one:
        await stream.until(lambda: one.connections == 4)
        cut_off = stream.pipelines["two"]
        async with cut_off.life():  # its ledger is in reach, AWS is not
            await stream.clock.advance(20)
            counts = []
            for _ in range(30):
                await stream.clock.advance(1)
                counts.append(one.connections)
    assert min(counts) == 4


async def test_latest_loses_nothing_by_a_crash_where_this_hosts_clock_is_ahead_of_aws(tmp_path: Path) -> None:
    stream = Stream(tmp_path, beginning=Beginning(LATEST))

    def put(number: int) -> None:
        stream.fake.put({"id": number, "n": number}, at_ms=stream.clock.now_ms() - 3000)

    put(1)
    await stream.clock.advance(10)
    async with stream.serving() as source:
        await stream.until(lambda: bool(stream.handler.opened))
        assert not source._starts_to_store
        put(2)
    async with stream.serving():
        stream.end()
        await stream.until(lambda: bool(stream.values()))
    assert stream.values() == [2]


@pytest.mark.parametrize("ahead_hours", [-1, 1], ids=["ahead of AWS", "behind AWS"])
async def test_latest_counts_by_aws_time_wherever_this_hosts_clock_is(
    tmp_path: Path, ahead_hours: int
) -> None:
    stream = Stream(tmp_path, shards=2, beginning=Beginning(LATEST), list_seconds=1)
    stream.fake.ahead_ms = ahead_hours * 3_600_000
    first, second = stream.fake.open_shards
    stream.put(10)
    await stream.clock.advance(20)
    async with stream.serving() as source:
        await stream.until(lambda: len(stream.handler.opened) == 2)
        assert not source._starts_to_store
    stream.put(10)  # after a crash
    for shard in (first, second):
        stream.fake.split(shard, children=1)
    stream.put(10)  # for children of shards that have brought nothing yet
    async with stream.serving():
        await stream.clock.advance(20)
        stream.put(10, shard_id=stream.fake.add_root())  # for a shard that turns up later
        await stream.clock.advance(20)
        stream.end()
        await stream.until(lambda: len(stream.values()) >= 30)
        await stream.clock.advance(20)
    assert sorted(stream.values()) == [*range(10, 40)]


async def test_no_page_is_handled_of_a_shard_that_was_lost_while_it_was_fetched(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    (shard,) = stream.fake.open_shards
    handled: list[int] = []
    async with stream.serving():
        await stream.clock.advance(5)
        stream.handler.halts = lambda number: handled.append(number) is not None
        session = stream.pipeline.coordinator.shards.sessions.live(shard)
        assert session is not None
        session.disconnected()
        stream.put(3)
        await stream.until(lambda: bool(stream.handler.hooks))
        assert (stream.handler.hooks, handled) == ([(shard, "LEASE_LOST")], [])
        stream.end()
        await stream.until(lambda: len(stream.values()) == 3)
    stream.exactly_once()


@pytest.mark.parametrize("hidden", [3, 40])
async def test_a_parent_that_listings_leave_out_for_long_is_read_before_its_children(
    tmp_path: Path, hidden: int
) -> None:
    stream = Stream(tmp_path, list_seconds=1)
    (parent,) = stream.fake.open_shards
    stream.put(10)
    stream.fake.split(parent)
    stream.put(10)
    stream.fake.shards[parent].visible_ms = stream.clock.steady_ms() + hidden * 1000
    stream.end()
    async with stream.serving():
        await stream.until(lambda: len(stream.values()) == 20, seconds=120)
    stream.exactly_once()


async def test_a_listing_that_aws_refuses_is_logged_once_in_each_listing_interval(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    """A shard that is unresolved is a reason to list again after a second, but not while AWS refuses to list."""
    stream = Stream(tmp_path, list_seconds=30)
    stream.put(10)
    async with stream.serving():
        await stream.clock.advance(10)
        (root,) = stream.fake.open_shards
        (hidden,) = stream.fake.split(root, children=1, visible_after=60)
        stream.put(10)
        (child,) = stream.fake.split(hidden, children=1)
        stream.fake.shards[child].visible_ms = 0
        stream.put(10)
        await stream.clock.advance(31)
        stream.fake.fail("DescribeStream", "AccessDeniedException", times=1000)
        await stream.clock.advance(100)
        refusals = [entry for entry in logged if entry["event"] == "stream.unlisted"]
        assert 3 <= len(refusals) <= 4
        stream.fake.fail_no_more()
        stream.end()
        await stream.until(lambda: len(stream.values()) == 30, seconds=200)
    stream.exactly_once()


@pytest.mark.parametrize("restart", [False, True], ids=["at the first start", "after a restart without it"])
async def test_a_token_does_not_bring_old_shards_again_while_a_listing_is_incomplete(
    tmp_path: Path, restart: bool
) -> None:
    stream = Stream(tmp_path, list_seconds=1)
    chain = [*stream.fake.open_shards]
    for _ in range(3):
        stream.put(10)
        chain += stream.fake.split(chain[-1], children=1)
    last = chain[-1]
    begin = After(int(stream.fake.shards[last].first))
    token = Token(stream.fake.arn, (ReadPosition(last, chain[-2], begin),))
    for shard in chain[1:3]:
        stream.fake.shards[shard].visible_ms = stream.clock.steady_ms() + 60_000
    if restart:
        async with stream.serving(beginning=Beginning.of(token)):
            stream.put(5)
            await stream.clock.advance(15)
    async with stream.serving(beginning=Beginning() if restart else Beginning.of(token)):
        stream.put(10 if not restart else 5)
        await stream.clock.advance(90)
        stream.end()
        await stream.until(lambda: stream.pipeline.coordinator.is_over)
    assert stream.values() == [*range(30, 40)]


# A stream that is disabled, deleted or replaced while the server runs.


def replaced(logged: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(entry["stream"], entry["newest"]) for entry in logged if entry["event"] == "stream.replaced"]


@pytest.mark.parametrize("by_arn", [False, True], ids=["the table is named", "the stream is named"])
async def test_a_stream_that_is_enabled_again_is_reported_and_not_read_unless_the_gap_is_accepted(
    tmp_path: Path, by_arn: bool, logged: list[dict[str, Any]]
) -> None:
    stream = Stream(tmp_path, list_seconds=5, accept_gap=by_arn)
    old = stream.fake.arn
    stream.put(10)
    if by_arn:
        stream.fake.table = old
    async with stream.serving() as source:
        stream.fake.table = "orders"
        await stream.clock.advance(5)
        assert source.waits_for is None
        stream.put(10)
        new = stream.fake.enable()
        stream.put(10)
        await stream.until(lambda: source.waits_for is not None, seconds=6)
        assert (
            source.waits_for == f"the stream {old} was disabled, and its table's new one, {new}, is not read"
        )
        await stream.until(lambda: len(stream.values()) == 20)
        await stream.clock.advance(60)
        assert source.waits_for is not None
    assert stream.values() == [*range(20)]
    assert replaced(logged) == [(old, new)]


@pytest.mark.parametrize("servers", [1, 2])
async def test_a_stream_that_is_enabled_again_is_read_behind_the_old_one_where_the_gap_is_accepted(
    tmp_path: Path, servers: int, logged: list[dict[str, Any]]
) -> None:
    stream = Stream(tmp_path, shards=2, servers=servers, list_seconds=5, accept_gap=True)
    async with contextlib.AsyncExitStack() as lives:
        sources = [await lives.enter_async_context(stream.serving(name)) for name in ("one", "two")[:servers]]
        stream.put(30)
        await stream.clock.advance(5)
        for number in range(2):
            stream.put(20)
            old, new = stream.fake.arn, stream.fake.enable(shards=1 + number)
            stream.put(20)
            await stream.until(lambda: all(source.status().address == new for source in sources))  # noqa: B023  # at once
            assert {source.waits_for for source in sources} == {None}
            assert replaced(logged)[-servers:] == [(old, new)] * servers
            await stream.clock.advance(10)
        stream.end()
        await stream.until(lambda: len(stream.values()) == 110)
    assert sorted(stream.values()) == [*range(110)]


@pytest.mark.parametrize("accept_gap", [False, True])
async def test_a_deleted_table_is_reported_and_one_that_is_made_again_is_read_where_the_gap_is_accepted(
    tmp_path: Path, accept_gap: bool, logged: list[dict[str, Any]]
) -> None:
    stream = Stream(tmp_path, list_seconds=5, accept_gap=accept_gap)
    stream.put(10)
    async with stream.serving() as source:
        await stream.clock.advance(5)
        old = stream.fake.arn
        stream.fake.disable()
        await stream.until(lambda: source.waits_for is not None)
        assert source.waits_for == f"the stream {old} was disabled, and its table has no enabled one"
        await stream.until(lambda: len(stream.values()) == 10)  # it is read to its end
        new = stream.fake.enable()
        stream.fake.forget(old)
        stream.put(10)
        if accept_gap:
            await stream.until(lambda: source.status().address == new)
            assert source.waits_for is None
            stream.end()
            await stream.until(lambda: len(stream.values()) == 20)
        else:
            await stream.clock.advance(60)
            assert "is not read" in str(source.waits_for)
    assert stream.values() == [*range(20 if accept_gap else 10)]
    assert replaced(logged) == [(old, ""), (old, new)]


async def test_a_stream_that_is_gone_at_once_costs_what_it_still_held_and_no_more(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    stream = Stream(tmp_path, list_seconds=5, accept_gap=True)
    stream.put(10)
    async with stream.serving() as source:
        await stream.clock.advance(5)
        old = stream.fake.arn
        stream.fake.enable()
        stream.fake.forget(old)
        stream.put(10)
        await stream.until(lambda: source.status().address == stream.fake.arn)
        await stream.clock.advance(60)
        stream.end()
        await stream.until(lambda: stream.pipeline.coordinator.is_over)
    assert stream.values() == [*range(20)]
    assert [entry["event"] for entry in logged if entry["event"] == "stream.shard_gone"] == [
        "stream.shard_gone"
    ]


async def test_a_state_that_is_wrong_for_a_moment_changes_nothing(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    stream = Stream(tmp_path, list_seconds=5, accept_gap=True)
    async with stream.serving() as source:
        await stream.clock.advance(4)
        stream.fake.fail("DescribeStream", "ResourceNotFoundException", times=2)
        await stream.clock.advance(20)
        assert source.waits_for is None
    assert replaced(logged) == []
