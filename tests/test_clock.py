"""Which clock durations are measured by."""

from __future__ import annotations

import time

from mldserver.clock import SteadyClock, SystemClock, steady
from mldserver.testing.clock import VirtualClock


def test_the_system_clock_tells_the_time_of_day_and_the_steady_one_does_not_follow_it() -> None:
    assert abs(SystemClock().now_ms() - time.time() * 1000) < 5000
    assert abs(SteadyClock().now_ms() - time.monotonic() * 1000) < 5000


async def test_both_sleep_on_the_loop() -> None:
    began = time.monotonic()
    await SteadyClock().sleep(0.01)
    assert time.monotonic() - began >= 0.009


def test_durations_are_measured_by_the_steady_clock_unless_time_is_simulated() -> None:
    assert isinstance(steady(SystemClock()), SteadyClock)
    virtual = VirtualClock()
    assert steady(virtual) is virtual
