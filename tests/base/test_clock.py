"""The machine's clock: one reading that anybody may set, one that nobody does."""

from __future__ import annotations

import asyncio
import time

import pytest

from mldserver.base.clock import CivilClock, SystemClock, in_time
from mldserver.testing import VirtualClock

pytestmark = pytest.mark.quick


def test_the_time_of_day_may_be_set_and_steady_time_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SystemClock()
    assert abs(clock.now_ms() - time.time() * 1000) < 300_000
    wall, steady = clock.now_ms(), clock.steady_ms()
    set_back_ns = time.time_ns() - 3_600_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: set_back_ns)
    assert clock.now_ms() < wall
    assert clock.steady_ms() >= steady


async def test_it_sleeps_on_the_loop() -> None:
    began = time.monotonic()
    await SystemClock().sleep(0.01)
    assert time.monotonic() - began >= 0.009


async def test_what_is_waited_for_in_time_ends_or_is_cancelled_or_raises_what_it_raises() -> None:
    clock, event = VirtualClock(), asyncio.Event()

    async def fail() -> None:
        raise ValueError("no")

    event.set()
    assert await in_time(event.wait(), clock, 1)
    event.clear()
    waiting = asyncio.create_task(in_time(event.wait(), clock, 1))
    await clock.advance(2)
    assert await waiting is False
    assert not clock.sleepers
    with pytest.raises(ValueError, match="no"):
        await in_time(fail(), clock, 1)


DATE_MS = 1_445_412_480_000
DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


@pytest.mark.parametrize("hour_ms", [3_600_000, -3_600_000])
async def test_a_jump_of_the_hosts_clock_does_not_change_the_civil_time(hour_ms: int) -> None:
    host = VirtualClock()
    civil, began_ms = CivilClock(host), host.now_ms()
    host.step(hour_ms / 1000)
    await host.advance(1.0)
    assert civil.now_ms() == began_ms + 1000
    assert civil.differs_ms == hour_ms


def test_a_small_difference_to_the_host_is_none() -> None:
    host = VirtualClock()
    civil = CivilClock(host)
    host.step(2.0)
    assert civil.differs_ms == 0
    host.step(0.001)
    assert civil.differs_ms == 2001


async def test_an_arrival_time_ahead_of_the_civil_time_raises_it_and_one_behind_it_changes_nothing() -> None:
    host = VirtualClock()
    civil, began_ms = CivilClock(host), host.now_ms()
    known_ms = host.steady_ms()
    await host.advance(1.0)
    civil.arrived(began_ms - 5, known_ms)
    assert civil.now_ms() == began_ms + 1000
    civil.arrived(began_ms + 70, known_ms)
    assert civil.now_ms() == began_ms + 1070


@pytest.mark.parametrize(
    ("ahead_ms", "corrected_ms"),
    [(3_600_000, 999), (-3_600_000, 0), (1000, 999), (999, 999), (400, 400), (0, 0), (-1, 0)],
)
def test_a_date_of_aws_brings_the_civil_time_into_its_second(ahead_ms: int, corrected_ms: int) -> None:
    host = VirtualClock()
    host.step((DATE_MS + ahead_ms - host.now_ms()) / 1000)
    civil = CivilClock(host)
    civil.dated(DATE)
    assert civil.now_ms() == DATE_MS + corrected_ms


@pytest.mark.parametrize("date", [None, "", "yesterday"])
def test_without_a_date_the_civil_time_stays(date: str | None) -> None:
    host = VirtualClock()
    civil, began_ms = CivilClock(host), host.now_ms()
    civil.dated(date)
    assert civil.now_ms() == began_ms
