"""Time is passed in: parts ask a clock, tests give them one that they move by hand.

A clock has two readings. ``now_ms`` is the time of day: for what is stored or shown, and never for a difference, since
anybody may set it. ``steady_ms`` is what durations are measured by: it never goes back, and says nothing to others.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from mldserver.base.aio import first_of


class Clock(Protocol):
    """Time in milliseconds, and the only way parts of the server wait for it to pass."""

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch, as this host has them now."""

    def steady_ms(self) -> int:
        """Return milliseconds since some instant: nobody sets them."""

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds`` of steady time."""


class SystemClock:
    """The machine's own clocks. Its steady time stands still while the machine sleeps."""

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch, as this host has them now."""
        return time.time_ns() // 1_000_000

    def steady_ms(self) -> int:
        """Return milliseconds since some instant: nobody sets them."""
        return time.monotonic_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(seconds)


async def happens(event: asyncio.Event, clock: Clock, seconds: float) -> bool:
    """Wait for an event, but no longer than ``seconds`` of ``clock``; return whether it is set."""
    await first_of(clock.sleep(seconds), event.wait())
    return event.is_set()
