"""Lets many through at once, or one alone."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Gate"]


class Gate:
    """Requests that go together, and suspects that must go alone; suspects come first, so that they are soon done."""

    def __init__(self) -> None:
        """Begin open."""
        self._inside = 0
        self._alone = False
        self._waiting_alone: deque[asyncio.Future[None]] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()

    def leave(self) -> None:
        """Go out again."""
        self._inside -= 1
        self._alone = False
        self._wake()

    async def enter(self, *, alone: bool) -> None:
        """Come in, once it is this request's turn."""
        queue = self._waiting_alone if alone else self._waiting
        if self._alone or self._waiting_alone or (alone and self._inside):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            queue.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self.leave()  # its turn came in the same moment
                elif turn in queue:
                    queue.remove(turn)
                    self._wake()
                raise
            return
        self._inside += 1
        self._alone = alone

    def _wake(self) -> None:
        """Let in whose turn it is now."""
        for queue in (self._waiting_alone, self._waiting):
            while queue and queue[0].cancelled():
                queue.popleft()
        if self._alone:
            return
        if self._waiting_alone:
            if not self._inside:
                self._inside, self._alone = 1, True
                self._waiting_alone.popleft().set_result(None)
            return
        for turn in self._waiting:
            if not turn.cancelled():
                self._inside += 1
                turn.set_result(None)
        self._waiting.clear()
