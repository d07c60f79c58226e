"""Time is passed in: parts ask a clock, tests give them one that they move by hand.

A clock has two readings. ``now_ms`` is the time of day: for values that are stored or shown, never for differences,
since an administrator may set it. ``steady_ms`` measures durations: it never goes back, and has no meaning outside
the process.

The module also has a counter of durations, and helpers that wait on the event loop: for the first of several, and for a flag.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Awaitable
from typing import Any, Final, Protocol


class Clock(Protocol):
    """Time in milliseconds, and the only way parts of the server wait for it to pass."""

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch, as this host has them now."""

    def steady_ms(self) -> int:
        """Return milliseconds since an arbitrary instant; they never go back."""

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds`` of steady time."""


class SystemClock:
    """The machine's own clocks. Its steady time stands still while the machine sleeps."""

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch, as this host has them now."""
        return time.time_ns() // 1_000_000

    def steady_ms(self) -> int:
        """Return milliseconds since an arbitrary instant; they never go back."""
        return time.monotonic_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(seconds)


BOUNDS_MS: Final = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000),
    *(minutes * 60_000 for minutes in (1, 2, 5, 10, 30, 60)),
)
"""From a quick batch to a large window."""


class Durations:
    """Counts durations up to each of ``BOUNDS_MS`` and above the bound before it; the last count: longer ones."""

    __slots__ = ("counts", "sum_ms")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_MS) + 1)
        self.sum_ms = 0

    def add(self, took_ms: int) -> None:
        """Count a duration."""
        self.counts[bisect_left(BOUNDS_MS, took_ms)] += 1
        self.sum_ms += took_ms


async def first_of(*waits: Awaitable[Any]) -> None:
    """Return when one of the waits is over; the others are cancelled, and have ended. Raises what one of them raises."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()


async def in_time(work: Awaitable[Any], clock: Clock, seconds: float) -> bool:
    """Wait for something, but no longer than ``seconds`` of ``clock``; return whether it came to its end.

    What did not is cancelled, and has ended. Raises what it raises.
    """
    task = asyncio.ensure_future(work)
    await first_of(task, clock.sleep(seconds))
    return not task.cancelled()


class Flag:
    """As ``asyncio.Event``, in 100 bytes.

    Thousands of connections wait with one, idle most of the time. ``asyncio.Event`` and ``asyncio.Queue`` keep a deque for
    waiters, of 760 bytes in CPython 3.11, however empty: seven of them took a third of what an idle shard costs.
    """

    __slots__ = ("_waiters", "up")

    def __init__(self) -> None:
        self.up = False
        """Whether it is set."""
        self._waiters: list[asyncio.Future[None]] | None = None

    def set(self) -> None:
        """Set the flag, and wake all waiters."""
        self.up = True
        waiters, self._waiters = self._waiters, None
        for each in waiters or ():
            if not each.done():
                each.set_result(None)

    def clear(self) -> None:
        """Unset it."""
        self.up = False

    async def wait(self) -> None:
        """Return once it is set, or was for a moment."""
        if self.up:
            return
        if self._waiters is None:
            self._waiters = []
        waiter = asyncio.get_running_loop().create_future()
        waiters = self._waiters
        waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in waiters:
                waiters.remove(waiter)
            raise
