"""The machine's clock: one reading that anybody may set, one that nobody does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mldserver.base.clock import SystemClock

if TYPE_CHECKING:
    import pytest


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
