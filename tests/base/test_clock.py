"""The machine's clock: one reading that anybody may set, one that nobody does."""

from __future__ import annotations

import asyncio
import time

import pytest

from mldserver.base.clock import SystemClock, in_time
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
