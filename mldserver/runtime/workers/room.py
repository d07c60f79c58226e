"""Room for lines in the arena: taken at once where there is some, else in the order of asking.

Whoever gives room back wakes as many of those who wait as it is enough for, and nobody else: with 2,000 lines on their
way, a look by each of them at each line that is done would be most of the server's work.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing import Any

__all__ = ["Room"]


class _Arena(Protocol):
    def take(self, size: int, /) -> int | None: ...
    def give_back(self, offset: int, /) -> Any: ...


class Room:
    """Who has room in one arena, and who waits for it."""

    def __init__(self, arena: _Arena) -> None:
        """Hand out what ``arena`` has free."""
        self._arena = arena
        self._waiting: deque[tuple[int, asyncio.Future[int | None]]] = deque()
        """How many bytes each wants, first come first; cancelled ones are passed over."""
        self._closed = False

    def at_once(self, size: int) -> int | None:
        """Return the offset of ``size`` bytes; None when there are none, or when others wait for them already."""
        return None if self._waiting else self._arena.take(size)

    async def wait(self, size: int) -> int | None:
        """Return the offset of ``size`` bytes once it is this caller's turn; None when there will be none any more.

        To be asked for no more than the whole arena can hold. A caller that is cancelled has taken nothing.
        """
        if self._closed:
            return None
        future: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, future))
        self._hand_out()
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and (offset := future.result()) is not None:
                self._arena.give_back(offset)
            self._hand_out()
            raise

    def give_back(self, offset: int) -> None:
        """Let go of room; those who wait come first. Raises KeyError for what is not taken."""
        self._arena.give_back(offset)
        if self._waiting:
            self._hand_out()

    def close(self) -> None:
        """Let nobody wait any longer."""
        self._closed = True
        for _, future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    def _hand_out(self) -> None:
        while self._waiting:
            size, future = self._waiting[0]
            if not future.done():
                # A long line is not passed by short ones, or it might wait for ever.
                offset = self._arena.take(size)
                if offset is None:
                    return
                future.set_result(offset)
            self._waiting.popleft()
