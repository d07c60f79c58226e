"""A clock that stands still until a test moves it, and whose time of day a test may set."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

_NS_PER_MS = 1_000_000
_SETTLE_PASSES = 25
"""Turns of the event loop after each wake-up: enough for a chain of awaits that many links long."""

T = TypeVar("T")


class VirtualClock:
    """``mldserver.base.clock.Clock`` for tests: nobody wakes before ``advance`` reaches their time."""

    def __init__(self, now_ms: int = 1_800_000_000_000) -> None:
        """Start at ``now_ms`` milliseconds since the Unix epoch; steady time starts at zero."""
        self._wall_ms = now_ms
        self._now_ns = 0
        self._order = itertools.count()
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch."""
        return self._wall_ms + self.steady_ms()

    def steady_ms(self) -> int:
        """Return milliseconds since the start."""
        return self._now_ns // _NS_PER_MS

    def step(self, seconds: float) -> None:
        """Set the time of day forward, or back when negative; nobody sleeps shorter or longer for it."""
        self._wall_ms += round(seconds * 1000)

    @property
    def sleepers(self) -> int:
        """How many tasks wait for this clock."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """Return once the clock was advanced by ``seconds``; zero and less only give way to other tasks."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_ns + round(seconds * 1e9), next(self._order), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Move on by ``seconds``, waking each sleeper at its own time and in order.

        After each wake-up the loop gets the turns it needs to settle, so that a task that sleeps again inside the
        span is woken again. Raises ValueError for negative spans: time does not go back.
        """
        if seconds < 0:
            raise ValueError(f"time does not go back: {seconds}")
        target = self._now_ns + round(seconds * 1e9)
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= target:
            due, _, future = heapq.heappop(self._sleepers)
            if future.done():  # its task was cancelled
                continue
            self._now_ns = max(self._now_ns, due)
            future.set_result(None)
            await _settle()
        self._now_ns = target

    async def drive(self, work: Coroutine[object, object, T], *, step: float = 0.05) -> T:
        """Run ``work`` to its end, advancing by ``step`` seconds whenever the loop has had its turns."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work)
            while not task.done():
                await self.advance(step)
        return task.result()


async def _settle() -> None:
    for _ in range(_SETTLE_PASSES):
        await asyncio.sleep(0)
