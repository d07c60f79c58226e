"""Time is passed in: parts ask a clock, tests give them one that they move by hand.

A clock has two readings. ``now_ms`` is the time of day: for values that are stored or shown, never for differences,
since an administrator may set it. ``steady_ms`` measures durations: it never goes back, and has no meaning outside
the process. ``CivilClock`` is the time of day for decisions: no one sets it.

The module also has a counter of durations, and helpers that wait on the event loop: for the first of several, and for a flag.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Awaitable
from email.utils import parsedate_to_datetime
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


_APART_MS: Final = 2000
"""Two clocks that differ by more do not show the same time."""


class CivilClock:
    """The time of day by AWS's clock, as far as this server knows it. It does not follow a jump of the host's clock.

    It is the host's time of day when the server started plus steady time. An arrival time that is ahead of it raises it. The
    ``Date`` of a response from AWS corrects it in both directions.
    """

    __slots__ = ("_clock", "_offset_ms")

    def __init__(self, clock: Clock) -> None:
        """Start with the time of day of ``clock``."""
        self._clock = clock
        self._offset_ms = clock.now_ms() - clock.steady_ms()

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch."""
        return self._clock.steady_ms() + self._offset_ms

    def arrived(self, arrival_ms: int, known_ms: int) -> None:
        """Note that AWS's clock showed at least ``arrival_ms`` at the steady time ``known_ms``."""
        self._offset_ms = max(self._offset_ms, arrival_ms - known_ms)

    def dated(self, date: str | None) -> None:
        """Note the ``Date`` of a response that AWS has sent just now; None, or text that is not a date, changes nothing."""
        try:
            shown = parsedate_to_datetime(date)  # type: ignore[arg-type]  # None raises TypeError
        except (TypeError, ValueError):
            return
        # HTTP cuts the time to whole seconds: this clock is then ahead by less than a second, and by less with each response.
        now_ms, shown_ms = self.now_ms(), round(shown.timestamp() * 1000)
        self._offset_ms += min(max(now_ms, shown_ms), shown_ms + 999) - now_ms

    @property
    def differs_ms(self) -> int:
        """By how much the host's time of day is ahead of this clock; 0: by no more than 2 s."""
        ahead_ms = self._clock.now_ms() - self.now_ms()
        return ahead_ms if abs(ahead_ms) > _APART_MS else 0


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
