"""Hosts' clocks go wrong in every way, and no row, window or server suffers for it: durations are steady time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from coordinator.pipeline import QUICK, Pipeline, named, two

from mldserver.coordinator.shards import IntakeSession
from mldserver.errors import LedgerError
from mldserver.ledger.contract import ServerState, WindowEntry, WindowState
from mldserver.testing import VirtualClock
from mldserver.windows import Batches, TimeWindows, time_window_id

HOUR = 3600
W = [time_window_id(start) for start in range(0, 100_000, 10_000)]


class HostClock(VirtualClock):
    """One host's: time passes as on the clock that all share, and its time of day is its own."""

    def __init__(self, shared: VirtualClock) -> None:
        super().__init__(shared.now_ms())
        self.steady_ms = shared.steady_ms  # type: ignore[method-assign]  # time that passes is one for all
        self.sleep = shared.sleep  # type: ignore[method-assign]  # as above
        self.advance = shared.advance  # type: ignore[method-assign]  # as above


def hosts(out: Path, **changes: Any) -> tuple[Pipeline, Pipeline]:
    """Return two servers of one pipeline, whose times of day can be set apart."""
    one, other = two(out, **changes)
    one.clock, other.clock = HostClock(one.clock), HostClock(other.clock)
    return one, other


async def empties(pipeline: Pipeline, session: IntakeSession, seconds: int) -> None:
    for _ in range(seconds):
        await pipeline.give(session, [], lag_ms=0)
        await pipeline.clock.advance(1)


def at(*times_ms: int) -> dict[str, Any]:
    return {
        "value": pa.array(times_ms, pa.int64()),
        "at": pa.array(times_ms, pa.timestamp("ms", tz="UTC")),
    }


# One host.


@pytest.mark.parametrize("seconds", [-HOUR, -10, 10, HOUR])
async def test_wherever_the_clock_is_set_a_silent_shards_window_closes_in_its_time(
    pipeline: Pipeline, seconds: int
) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        pipeline.clock.step(seconds)
        await empties(pipeline, session, 8)
        assert pipeline.published() == {}, "for AWS it is not over yet"
        await empties(pipeline, session, 10)
        assert pipeline.published() == {W[0]: [1]}


@pytest.mark.parametrize("seconds", [-HOUR, 10, HOUR])
async def test_a_clock_that_is_ahead_or_behind_makes_no_row_late(pipeline: Pipeline, seconds: int) -> None:
    """AWS stamps rows by its own clock, while time carries shards that are caught up."""
    aws = pipeline.clock.now_ms
    pipeline.clock = HostClock(pipeline.clock)
    pipeline.clock.step(seconds)
    async with pipeline.life() as coordinator:
        session = await pipeline.open("a")
        for number in range(1, 21):
            if number == 10:
                pipeline.clock.step(-2 * seconds)
            await pipeline.give(session, [(number, aws())], lag_ms=0)
            await empties(pipeline, session, 7)
        assert coordinator.status().rows_late == 0
        assert sum(map(len, pipeline.published().values())) >= 18, "and windows close all the while"


async def test_a_server_whose_shards_never_had_a_record_goes_by_the_arrival_times_of_the_others(
    tmp_path: Path,
) -> None:
    one, other = hosts(tmp_path, rules=replace(QUICK, idle_time_ms=5000, quiet_time_ms=10_000))
    one.clock.step(-HOUR)
    other.clock.step(HOUR)
    async with one.life(), other.life():
        full, empty = await one.open("full"), await other.open("empty")
        for number, ms in enumerate(range(1000, 41_000, 1000)):
            await one.give(full, [(number + 1, ms)], lag_ms=5)
            await empties(other, empty, 1)
        assert set(one.published()) >= set(W[:2])
        assert one.coordinator.status().rows_late == other.coordinator.status().rows_late == 0


async def test_a_batch_closes_at_its_age_though_the_clock_is_set_back(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec=Batches(1000, 5000))
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        await pipeline.cycle()
        pipeline.clock.step(-HOUR)
        await pipeline.clock.advance(3)
        assert pipeline.published() == {}
        await pipeline.clock.advance(3)
        assert list(pipeline.published().values()) == [[1]]


async def test_a_window_is_computed_again_after_its_delay_though_the_clock_is_set_back(
    tmp_path: Path,
) -> None:
    pipeline = Pipeline(tmp_path, recompute=True)
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (2, 11_000)])
        await pipeline.clock.advance(3)
        late = await pipeline.open("b")
        await pipeline.give(late, [(3, 2000)])
        await pipeline.cycle()
        pipeline.clock.step(-HOUR)
        await pipeline.clock.advance(4)
        assert pipeline.published()[W[0]] == [1, 3]


async def test_a_missing_shard_is_left_out_after_its_limit_though_the_clock_is_set_back(
    pipeline: Pipeline, logged: list[dict[str, Any]]
) -> None:
    async with pipeline.life():
        gone = await pipeline.open("gone")
        gone.disconnected()
        pipeline.clock.step(-HOUR)
        await pipeline.clock.advance(62)
    assert [event["shard"] for event in named(logged, "shard.left_out")] == ["gone"]


# Several hosts.


async def test_a_server_whose_clock_is_set_back_beats_on_and_is_not_expired(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    """Its cycles are longer than the others' patience: only its beats keep it alive."""
    one, other = hosts(tmp_path)
    one.rules = replace(one.rules, flush_interval_ms=30_000)
    async with one.life(), other.life():
        await other.clock.advance(3)
        one.clock.step(-HOUR)
        await other.clock.advance(60)
        assert set(other.state().servers) == {"one", "two"}
    assert named(logged, "server.expired") == []


def retained(pipeline: Pipeline) -> bool:
    return pipeline.state().windows.get(W[0], GONE).retained


GONE = WindowEntry(W[0], WindowState.PUBLISHED, retained=False)
RETAINS = replace(QUICK, retention_ms=600_000)
DAYS = [48 * HOUR, -48 * HOUR]


@pytest.mark.parametrize("publisher", [0, 1])
@pytest.mark.parametrize("seconds", DAYS)
async def test_a_host_whose_clock_is_days_off_lets_no_window_expire_too_early_or_too_late(
    tmp_path: Path, seconds: int, publisher: int
) -> None:
    servers = hosts(tmp_path, rules=RETAINS, recompute=True)
    right, wrong = servers
    wrong.clock.step(seconds)
    async with right.life():
        async with wrong.life():
            session = await servers[publisher].open("a")
            await servers[publisher].give(session, [(1, 1000), (2, 21_000)])
            await right.clock.advance(300)
            assert retained(right)
            await right.clock.drive(session.lost())
        await right.clock.advance(240)
        assert retained(right), "nor once the one whose clock was wrong has left"
        await right.clock.advance(180)
        assert not retained(right)


@pytest.mark.parametrize("seconds", DAYS)
async def test_a_host_whose_clock_is_days_off_and_that_starts_after_the_others_have_left_expires_nothing(
    tmp_path: Path, seconds: int
) -> None:
    right, wrong = hosts(tmp_path, rules=RETAINS, recompute=True)
    wrong.clock.step(seconds)
    async with right.life():
        session = await right.open("a")
        await right.give(session, [(1, 1000), (2, 21_000)])
        await right.clock.advance(60)
        await right.clock.drive(session.lost())
    async with wrong.life():
        await wrong.clock.advance(300)
        assert retained(wrong)
    async with right.life():
        await right.clock.advance(120)
        assert retained(right)
        await right.clock.advance(240)
        assert not retained(right)


@pytest.mark.parametrize("seconds", DAYS)
async def test_a_clock_that_is_set_neither_stops_retention_nor_ends_it(tmp_path: Path, seconds: int) -> None:
    pipeline = Pipeline(tmp_path, rules=RETAINS, recompute=True)
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (2, 21_000)])
        await pipeline.clock.advance(60)
        pipeline.clock.step(seconds)
        await pipeline.clock.advance(400)
        assert retained(pipeline)
        await pipeline.clock.advance(240)
        assert not retained(pipeline)


async def test_a_server_that_beats_again_while_it_is_being_expired_lives(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    one, other = hosts(tmp_path)
    async with one.life(), other.life():
        await other.clock.advance(3)
        beats = itertools.count(other.state().servers["one"].beat_ms - 1000 * HOUR, -1)
        one.faults.hook = _unreachable

        def beat_before_it(name: str, after: bool) -> None:
            if name == "expire_servers" and not after:
                one.ledger.store.sync(ServerState("one", next(beats)))

        other.faults.hook = beat_before_it
        await other.clock.advance(20)
        assert "expire_servers" in other.faults.calls
        assert "one" in other.state().servers, "its beat is another, though it shows an earlier time"
        assert named(logged, "server.expired") == []
        other.faults.hook = None
        await other.clock.advance(20)
        assert [event["seconds"] for event in named(logged, "server.expired")] == [5.0]
        one.faults.hook = None


def _unreachable(name: str, after: bool) -> None:
    if not after and name != "leave":
        raise LedgerError(f"{name} is out of reach")


async def test_a_server_that_cannot_beat_is_not_idle_for_the_others(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    """Its shards bring rows that it cannot store: until it is expired, and read elsewhere, their windows stay open."""
    rules = replace(QUICK, server_timeout_ms=8000, on_arrival=False, idle_time_ms=3000)
    one, other = hosts(tmp_path, rules=rules, spec=TimeWindows(10_000, on="at"))
    async with one.life():
        async with other.life():
            await one.clock.advance(2)
            a, b = await one.open("a"), await other.open("b")
            await one.give(a, [(1, 1)], columns=at(1000), lag_ms=5)
            await other.give(b, [(1, 1)], columns=at(2000), lag_ms=0)
            await empties(other, b, 6)
            await one.give(a, [(2, 2)], columns=at(25_000), lag_ms=5)
            await one.clock.advance(3)
            assert list(one.published()) == W[:1], "an idle server holds nothing"
            other.faults.hook = _unreachable
            await one.clock.advance(5)
            await other.give(b, [(2, 2)], columns=at(31_000), lag_ms=0)
            await one.give(a, [(3, 3)], columns=at(95_000), lag_ms=5)
            await one.clock.advance(2)
            status = one.coordinator.status()
            assert (status.held_by_server, status.reason) == ("two", "silent")
            await one.clock.advance(3)
            assert [event["server"] for event in named(logged, "server.expired")] == ["two"]
            await one.clock.advance(3)
            assert (one.coordinator.status().held_by, one.coordinator.status().reason) == ("b", "missing")
            other.faults.dead = True
        again = await one.open("b")
        await one.give(again, [(1, 1), (2, 2)], rows=[2], columns=at(31_000), lag_ms=0)
        await empties(one, again, 8)
        assert one.published()[W[3]] == [31_000]
        assert one.coordinator.status().rows_late == 0


@pytest.mark.parametrize("seconds", [0.5, 4.5])
async def test_of_a_shard_that_moves_between_servers_none_says_that_it_is_missing(
    tmp_path: Path, logged: list[dict[str, Any]], seconds: float
) -> None:
    one, other = hosts(tmp_path)
    async with one.life(), other.life():
        await one.clock.advance(3)
        session = await one.open("a")
        await one.give(session, [(1, 1000)])
        await one.clock.advance(3)
        await one.clock.drive(session.lost())
        await one.clock.advance(seconds)
        there = await other.open("a")
        await other.give(there, [(2, 12_000)])
        await one.clock.advance(20)
        assert other.published() == {W[0]: [1]}
    assert named(logged, "shard.missing") == []
