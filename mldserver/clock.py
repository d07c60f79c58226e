"""Time is passed in: parts ask a clock, tests give them one that they move by hand."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

__all__ = ["Clock", "SteadyClock", "SystemClock", "steady"]


class Clock(Protocol):
    """Wall-clock time in milliseconds, and the only way parts of the server wait for time to pass."""

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds`` of this clock."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch."""
        return time.time_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(seconds)


class SteadyClock(SystemClock):
    """The machine's time since some instant: nobody sets it, and it stands still while the machine sleeps."""

    def now_ms(self) -> int:
        """Return milliseconds since that instant."""
        return time.monotonic_ns() // 1_000_000


def steady(clock: Clock) -> Clock:
    """Return what durations are measured by beside ``clock``: the machine's steady time, or the clock itself in tests."""
    return SteadyClock() if isinstance(clock, SystemClock) else clock
