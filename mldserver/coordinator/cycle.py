"""When the cycle runs: at every interval, at once when something asks for it, and again after a while when it failed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from mldserver.base.backoff import backoff
from mldserver.errors import LedgerError, ServerBuried, told_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mldserver.base.clock import Clock

__all__ = ["Cycle"]

log = structlog.get_logger("mldserver")

_LONGEST_SECONDS: Final = 30.0
"""The longest pause before a cycle that keeps failing is tried again."""


class Cycle:
    """Calls one cycle after the other, never two at once."""

    def __init__(
        self,
        cycle: Callable[[str], Awaitable[None]],
        *,
        after: Callable[[], Awaitable[None]],
        interval_ms: int,
        clock: Clock,
    ) -> None:
        """``cycle`` takes the reason for which it runs; ``after`` is awaited after each, whether or not it failed."""
        self.failing = False
        """Whether the latest has failed."""
        self._cycle = cycle
        self._after = after
        self._interval_ms = interval_ms
        self._clock = clock
        self._asked = asyncio.Event()
        self._waiters: list[tuple[str, asyncio.Future[None]]] = []

    def soon(self) -> None:
        """Let a cycle follow at once."""
        self._asked.set()

    async def whole(self, reason: str) -> None:
        """Return when a whole cycle that began after this call is done."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((reason, waiter))
        self._asked.set()
        await waiter

    async def run(self) -> None:
        """Take turns until cancelled. Raises ServerBuried, and whatever else of a cycle is not worth another try."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tick(), name="ticks")
            group.create_task(self._cycles(), name="cycles")

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(self._interval_ms / 1000)
            self._asked.set()

    async def _cycles(self) -> None:
        failures = 0
        while True:
            await self._asked.wait()
            self._asked.clear()
            waiters, self._waiters = self._waiters, []
            try:
                await self._cycle(waiters[0][0] if waiters else "interval")
            except ServerBuried:
                raise
            except (LedgerError, OSError) as error:
                # Rows stay in memory, positions stay where they are: nothing is lost while this is tried again.
                failures += 1
                self._waiters = waiters + self._waiters
                await self._fail(failures, error)
                continue
            failures, self.failing = 0, False
            for _, waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
            await self._after()

    async def _fail(self, failures: int, error: LedgerError | OSError) -> None:
        delay = backoff(failures, 1.0, _LONGEST_SECONDS)
        log.error("flush.failed", attempt=failures, delay_seconds=delay, **told_of(error))
        self.failing = True
        await self._after()
        await self._clock.sleep(delay)
        self._asked.set()
