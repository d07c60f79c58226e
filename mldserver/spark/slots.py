"""The slots for jobs that run at the same time, shared fairly by the functions of a server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable


class FairSlots:
    """A semaphore with a queue for each function. The next slot goes to the waiting function that was served longest ago.

    So the jobs of one function, however many wait, delay a job of another function by one job at most.
    """

    def __init__(self, count: int) -> None:
        """Create ``count`` free slots."""
        self._count = self._free = count
        self._idle = asyncio.Event()
        self._idle.set()
        self.idle = self._idle.wait
        """Returns once all slots are free."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By function, the jobs that wait; functions without such a job are left out."""
        self._turns = itertools.count(1)
        self._served: dict[str, int] = {}
        """The latest turn of each function."""

    @contextlib.asynccontextmanager
    async def hold(self, function: str) -> AsyncIterator[Callable[[], None]]:
        """Wait for a slot and hold it while the context lasts. The block receives a function that frees the slot early."""
        await self._acquire(function)
        self._idle.clear()
        release_once = contextlib.ExitStack()
        release_once.callback(self._release)
        with release_once:
            yield release_once.close

    async def _acquire(self, function: str) -> None:
        if self._free and not self._waiting:
            self._free -= 1
            self._served[function] = next(self._turns)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(function, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()  # the slot came at the moment of the cancellation
            else:
                self._forget(function, turn)
            raise

    def _release(self) -> None:
        """Free a slot, and give it to the waiting function that was served longest ago."""
        self._free += 1
        while self._free and self._waiting:
            function = min(self._waiting, key=lambda name: self._served.get(name, 0))
            turn = self._waiting[function][0]
            self._forget(function, turn)
            if not turn.done():  # else its job was cancelled in this turn of the event loop
                self._free -= 1
                self._served[function] = next(self._turns)
                turn.set_result(None)
        if self._free == self._count:
            self._idle.set()

    def _forget(self, function: str, turn: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(function, deque())
        with contextlib.suppress(ValueError):
            waiting.remove(turn)
        if not waiting:
            self._waiting.pop(function, None)
