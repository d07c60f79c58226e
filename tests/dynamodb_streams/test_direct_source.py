"""A stream that is read directly ends in windows: each record once, whatever splits, stops, dies or fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coordinator.pipeline import Crash, Faults, missing
from dynamodb_streams.direct import START_MS, Stream
from support.lanes import seeds

from mldserver.dynamodb_streams.positions import Beginning
from mldserver.dynamodb_streams.shard_tree import LATEST, TRIM_HORIZON, Since
from mldserver.errors import OperatorError


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocking calls run on the loop: scenarios are the same every time."""

    async def inline(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        await asyncio.sleep(0)
        return function(*args, **named)

    monkeypatch.setattr(asyncio, "to_thread", inline)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


async def test_the_rows_of_a_stream_are_its_records_in_order(tmp_path: Path) -> None:
    stream = Stream(tmp_path, shards=3)
    stream.put(50)
    async with stream.serving() as source:
        assert source.waits_for == "DynamoDB has not listed the stream's shards yet"
        await stream.until(lambda: source.waits_for is None)
        assert await source.listening() == stream.fake.arn
        for _ in range(10):
            await stream.clock.advance(7)
            stream.put(20)
        stream.end()
        await stream.until(lambda: stream.pipeline.coordinator.is_over)
        await stream.until(lambda: len(stream.values()) == 250)
    stream.exactly_once()


async def test_children_are_read_behind_their_parents_also_where_they_are_named_late(tmp_path: Path) -> None:
    stream = Stream(tmp_path, shards=2)
    async with stream.serving():
        for seconds in (0, 0.3, 20):
            stream.put(30)
            for shard in stream.fake.open_shards[:2]:
                stream.fake.split(shard, visible_after=seconds)
            stream.put(30)
            await stream.clock.advance(45)
        stream.end()
        await stream.until(lambda: len(stream.values()) == 180)
    stream.exactly_once()
    assert len(stream.fake.shards) == 2 + 3 * 4


async def test_a_restart_goes_on_behind_what_is_durable(tmp_path: Path) -> None:
    stream = Stream(tmp_path, shards=2)
    for number in range(6):
        async with stream.serving():
            stream.put(25)
            if number % 2:
                stream.fake.split(stream.fake.open_shards[0])
                stream.put(25)
            await stream.clock.advance(0.3 + 1.1 * number)
    stream.end()
    async with stream.serving():
        await stream.until(lambda: len(stream.values()) == 225)
    stream.exactly_once()


async def test_an_orderly_stop_ends_after_the_page_in_hand_and_the_next_start_reads_nothing_twice(
    tmp_path: Path,
) -> None:
    stream = Stream(tmp_path)
    stream.put(10)
    async with stream.serving() as source:
        await stream.until(lambda: source.connections == 1 and bool(stream.handler.opened))
        await stream.clock.advance(2)
        stream.handler.seconds = 3
        stream.put(5)
        await stream.clock.advance(2)
        await stream.clock.drive(source.drain())
        assert (source.connections, source.waits_for) == (0, "no shard is taken any more")
        await stream.clock.drive(stream.pipeline.coordinator.flush("shutdown"))
    assert [hook for _, hook in stream.handler.hooks] == ["SHUTDOWN_REQUESTED"]
    async with stream.serving():
        stream.put(5)
        stream.end()
        await stream.until(lambda: len(stream.values()) == 20)
        (shard,) = stream.fake.shards
        assert stream.handler.opened[0] == (
            shard,
            stream.fake.shards[shard].records[14]["dynamodb"]["SequenceNumber"],
        )
    stream.exactly_once()


async def test_trouble_that_passes_costs_time_and_nothing_else(tmp_path: Path) -> None:
    stream = Stream(tmp_path, shards=3, seed=5)
    stream.fake.trouble = 0.3
    stream.fake.shuffled, stream.fake.page_shards, stream.fake.page_records = True, 2, 7
    async with stream.serving():
        for _ in range(6):
            stream.put(40)
            stream.fake.split(stream.random.choice(stream.fake.open_shards), visible_after=1)
            await stream.clock.advance(20)
        stream.end()
        await stream.until(lambda: len(stream.values()) == 240, seconds=1200)
    stream.exactly_once()


async def test_trap_13_a_slow_shard_delays_no_other(tmp_path: Path) -> None:
    stream = Stream(tmp_path, shards=2)
    slow, quick = stream.fake.open_shards
    stream.fake.slow[slow] = 30.0
    stream.put(20, shard_id=quick)
    async with stream.serving():
        await stream.clock.advance(6)
        assert stream.pipeline.coordinator.status().rows_durable == 20


async def test_trap_14_a_shard_that_only_the_ledger_knows_is_ended_with_a_gap(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    stream = Stream(tmp_path, shards=2)
    gone, stays = stream.fake.open_shards
    stream.put(10, shard_id=gone)
    stream.put(10, shard_id=stays)
    async with stream.serving():
        await stream.clock.advance(10)
    stream.put(5, shard_id=gone)
    (child,) = stream.fake.split(gone, children=1)
    stream.fake.trim(gone)
    stream.put(5, shard_id=child)
    async with stream.serving():
        stream.put(5, shard_id=stays)
        stream.end()
        await stream.until(lambda: len(stream.values()) == 30)
        assert missing(stream.pipeline.coordinator) == ()
    assert [entry["shard"] for entry in logged if entry["event"] == "stream.shard_gone"] == [gone]
    assert sorted(set(stream.written()) - set(stream.values())) == [20, 21, 22, 23, 24]


@pytest.mark.parametrize("action", ["GetRecords", "GetShardIterator"])
async def test_a_shard_that_aws_lists_and_does_not_know_is_neither_ended_nor_lost(
    tmp_path: Path, action: Any, logged: list[dict[str, Any]]
) -> None:
    stream = Stream(tmp_path)
    stream.put(10)
    async with stream.serving():
        await stream.clock.advance(5)
        stream.fake.fail("GetRecords", "ExpiredIteratorException", times=action == "GetShardIterator")
        stream.fake.fail(action, "ResourceNotFoundException", times=1000)
        await stream.clock.advance(90)
        assert not any(shard.ended for shard in stream.pipeline.state().shards.values())
    assert {entry["event"] for entry in logged if entry["event"].startswith("stream.")} == {
        "stream.shard_unknown"
    }
    async with stream.serving():
        await stream.clock.advance(10)
        stream.fake.fail_no_more()
        stream.put(10)
        await stream.clock.advance(10)
        stream.end()
        await stream.until(lambda: len(stream.values()) == 20)
    stream.exactly_once()


@pytest.mark.parametrize("read", [False, True], ids=["never read", "read in part"])
async def test_a_parent_that_a_listing_leaves_out_for_a_moment_is_read_before_its_children(
    tmp_path: Path, read: bool
) -> None:
    stream = Stream(tmp_path, list_seconds=1)
    (parent,) = stream.fake.open_shards
    stream.put(10)
    if read:
        async with stream.serving():
            await stream.clock.advance(5)
    stream.put(10)
    stream.fake.split(parent)
    stream.put(10)
    stream.fake.shards[parent].visible_ms = stream.clock.steady_ms() + 600
    stream.end()
    async with stream.serving():
        await stream.until(lambda: len(stream.values()) == 30, seconds=60)
    stream.exactly_once()


async def test_what_was_trimmed_meanwhile_is_a_gap_that_is_told(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    stream = Stream(tmp_path)
    (shard,) = stream.fake.open_shards
    stream.put(10)
    async with stream.serving():
        await stream.clock.advance(10)
    stream.put(10)
    stream.fake.trim(shard, through=int(stream.fake.shards[shard].records[14]["dynamodb"]["SequenceNumber"]))
    stream.end()
    async with stream.serving():
        await stream.until(lambda: len(stream.values()) == 15)
    assert sorted(stream.values()) == [*range(10), *range(15, 20)]
    assert [entry["shard"] for entry in logged if entry["event"] == "stream.gap"] == [shard]


async def test_trap_10_roots_that_appear_later_are_read_from_their_beginning(tmp_path: Path) -> None:
    stream = Stream(tmp_path, beginning=Beginning(LATEST), list_seconds=5)
    stream.put(5)
    async with stream.serving():
        await stream.clock.advance(5)
        root = stream.fake.add_root(visible_after=3)
        stream.put(7, shard_id=root)
        await stream.clock.advance(20)
        stream.end()
        await stream.until(lambda: len(stream.values()) == 7)
    assert sorted(stream.values()) == [*range(5, 12)]


@pytest.mark.parametrize("restart", [0.05, 0.3, 1.0, 3.0])
async def test_latest_begins_where_the_first_server_began_however_soon_it_dies(
    tmp_path: Path, restart: float
) -> None:
    stream = Stream(tmp_path, shards=2, beginning=Beginning(LATEST))
    stream.put(30)
    stream.fake.split(stream.fake.open_shards[0])
    stream.put(10)
    await stream.clock.advance(10)
    async with stream.serving() as source:
        await stream.until(lambda: source.waits_for is None)
        await stream.until(lambda: not source._starts_to_store)
        stream.put(20)
        await stream.clock.advance(restart)
    stream.put(10)
    stream.fake.split(stream.fake.open_shards[1])
    stream.put(10)
    stream.end()
    async with stream.serving():
        await stream.until(lambda: len(stream.values()) == 40)
        await stream.clock.advance(60)
    assert sorted(stream.values()) == [*range(40, 80)]


async def test_a_time_begins_with_what_was_created_then_also_behind_shards_that_have_nothing_of_it(
    tmp_path: Path,
) -> None:
    stream = Stream(tmp_path)
    for _ in range(4):
        stream.put(10)
        await stream.clock.advance(100)
        stream.fake.split(stream.fake.open_shards[0], children=1)
    stream.put(10)
    stream.end()
    begun = Beginning(Since(START_MS + 200_000))
    async with stream.serving(beginning=begun):
        await stream.clock.advance(1.2)
    for _ in range(3):
        async with stream.serving():  # what was begun with counts, not what is said later
            await stream.clock.advance(2.5)
    async with stream.serving():
        await stream.until(lambda: len(stream.values()) == 30)
        await stream.clock.advance(60)
    assert stream.values() == [*range(20, 50)]


async def test_another_stream_than_the_ledgers_is_refused_unless_the_gap_is_accepted(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.put(5)
    async with stream.serving():
        await stream.clock.advance(5)
    await stream.clock.advance(5)
    stream.fake.enable()
    stream.put(5)
    with pytest.raises(OperatorError, match="none of the shards that the ledger knows"):
        async with stream.serving():
            await stream.clock.advance(5)
    async with stream.serving(accept_gap=True):
        stream.end()
        await stream.until(lambda: len(stream.values()) == 10)


async def test_a_handler_that_halts_stops_its_own_shard_and_is_tried_again(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    stream = Stream(tmp_path, shards=2)
    bad, good = stream.fake.open_shards
    stream.put(10, shard_id=bad)
    stream.put(10, shard_id=good)
    async with stream.serving():
        stream.handler.halts = lambda number: number == 3
        await stream.clock.advance(20)
        assert stream.pipeline.coordinator.status().rows_durable == 10
        failures = [entry for entry in logged if entry["event"] == "shard.failed"]
        assert {entry["shard"] for entry in failures} == {bad}
        assert {entry["error"] for entry in failures} == {"HandlerHalted"}
        assert 3 <= len(failures) <= 8
        stream.handler.halts = lambda _: False
        stream.end()
        await stream.until(lambda: len(stream.values()) == 20)
    stream.exactly_once()


async def test_what_nobody_expected_ends_one_shard_for_a_while_and_is_told_whole(
    tmp_path: Path, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(tmp_path)
    stream.put(10)
    async with stream.serving():
        with monkeypatch.context() as broken:
            broken.setattr(stream.handler, "process", None)
            await stream.clock.advance(5)
        stream.end()
        await stream.until(lambda: len(stream.values()) == 10)
    failed = next(entry for entry in logged if entry["event"] == "shard.failed")
    assert failed["what"] == """Unexpected TypeError("'NoneType' object is not callable")"""
    stream.exactly_once()


async def test_a_shard_that_cannot_be_opened_for_long_is_given_up_by_the_stop(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    async with stream.serving() as source:
        opening = asyncio.Event()
        stream.handler.open = lambda *_: opening.wait()  # type: ignore[method-assign,assignment]  # it never ends
        await stream.clock.advance(5)
        assert source.connections == 1
        await stream.clock.drive(source.drain())
        assert source.connections == 0
    async with stream.serving():
        stream.put(10)
        stream.end()
        await stream.until(lambda: len(stream.values()) == 10)


async def test_two_servers_share_and_hand_over_when_a_third_comes_and_when_one_dies(tmp_path: Path) -> None:
    stream = Stream(tmp_path, shards=6, servers=3)
    async with contextlib.AsyncExitStack() as lives:
        one = await lives.enter_async_context(stream.serving("one"))
        stream.put(60)
        await stream.clock.advance(10)
        assert one.connections == 6
        two = await lives.enter_async_context(stream.serving("two"))
        stream.put(60)
        await stream.until(lambda: (one.connections, two.connections) == (3, 3))
        async with stream.serving("three") as three:
            stream.put(60)
            await stream.until(lambda: (one.connections, two.connections, three.connections) == (2, 2, 2))
            stream.fake.split(stream.fake.open_shards[0])
            stream.put(60)
            await stream.clock.advance(20)
        stream.put(60)
        stream.end()
        await stream.until(lambda: len(stream.values()) == 300)
    stream.exactly_once()
    handed_over = [hook for handler in stream.handlers.values() for _, hook in handler.hooks]
    assert handed_over.count("SHUTDOWN_REQUESTED") >= 5


async def test_all_descendants_of_a_root_are_read_by_one_server_which_hands_them_over_together(
    tmp_path: Path,
) -> None:
    stream = Stream(tmp_path, shards=3, servers=2, keyed=True)

    def places() -> dict[str, set[str]]:
        """Return which servers read shards of each family now."""
        state = stream.pipeline.coordinator.shards.ledger_snapshot().shards
        found: dict[str, set[str]] = {}
        for name, source in stream.sources.items():
            for shard_id in source._reading:
                found.setdefault(state[shard_id].store if shard_id in state else "", set()).add(name)
        return found

    async with stream.serving("one") as one:
        for _ in range(3):
            stream.put(30)
            for shard_id in stream.fake.open_shards:
                stream.fake.split(shard_id)
            await stream.clock.advance(30)
        assert one.connections == 24
        async with stream.serving("two") as two:
            await stream.until(lambda: (one.connections, two.connections) == (16, 8))
            await stream.clock.advance(5)
            assert sorted(len(each) for each in places().values()) == [1, 1, 1]
            (moved,) = [family for family, names in places().items() if names == {"two"}]
            stream.fake.split(stream.fake.open_shards[0])
            stream.fake.split(stream.fake.open_shards[-1])
            stream.put(30)
            await stream.clock.advance(30)
            assert one.connections + two.connections == 26
            assert (len(places()), places()[moved]) == (3, {"two"})
        stream.end()
        await stream.until(lambda: len(stream.values()) == 120)
    stream.exactly_once()


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("seed", seeds(4))
async def test_servers_that_come_and_die_at_random_lose_and_double_nothing(
    tmp_path: Path, seed: int, keyed: bool
) -> None:
    stream = Stream(tmp_path, shards=3, servers=3, seed=seed, keyed=keyed)
    stream.fake.trouble, chance = 0.05, stream.random
    stream.fake.ahead_ms = chance.choice((-3_600_000, 0, 3_600_000))
    begins = Beginning(chance.choice((TRIM_HORIZON, LATEST)))
    if begins.everywhere is LATEST:
        async with stream.serving("one", beginning=begins) as source:
            await stream.until(lambda: len(stream.handler.opened) == 3 and not source._starts_to_store)
    lives: dict[str, contextlib.AsyncExitStack] = {}
    for _ in range(25):
        stream.put(chance.randrange(20))
        if chance.random() < 0.3 and len(stream.fake.shards) < 20:
            stream.fake.split(
                chance.choice(stream.fake.open_shards),
                children=chance.choice((1, 2)),
                visible_after=chance.random(),
            )
        name = chance.choice(("one", "two", "three"))
        if name in lives:
            await lives.pop(name).aclose()
        else:
            lives[name] = contextlib.AsyncExitStack()
            await lives[name].enter_async_context(stream.serving(name, beginning=begins))
        await stream.clock.advance(chance.choice((0.1, 1, 3, 8)))
    for life in lives.values():
        await life.aclose()
    stream.end()
    async with stream.serving("one"):
        await stream.until(lambda: len(stream.values()) == len(stream.written()))
    stream.exactly_once()


@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
@pytest.mark.parametrize("at", range(6, 56, 9))
async def test_a_crash_at_any_call_of_the_ledger_or_the_folder_loses_and_doubles_nothing(
    tmp_path: Path, at: int, after: bool
) -> None:
    stream = Stream(tmp_path, shards=2)
    stream.put(20)
    stream.pipeline.faults.at, stream.pipeline.faults.after = at, after
    try:
        async with stream.serving():
            await stream.clock.advance(4)
            stream.put(20)
            stream.fake.split(stream.fake.open_shards[0])
            stream.put(20)
            await stream.clock.advance(30)
    except* Crash:
        pass
    stream.pipeline.faults = Faults()
    stream.end()
    async with stream.serving():
        await stream.until(lambda: len(stream.values()) == len(stream.written()))
    stream.exactly_once()
    assert stream.written()
