"""Lets many through at once, or one alone.

What is inside may wait for something that is far off: an ``initialize`` that is tried until it succeeds, a record that
is to be called again in an hour. Nobody else waits for that: as soon as nothing of what is inside is worked on, it holds
up others no more.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from operator import itemgetter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_SECONDS: Final = 2.5
"""How often it is looked, while somebody waits, whether those inside are worked on; twice in a row that must not be so:
a request that has just been made is not worked on yet."""


class Exclusive:
    """Requests that go together, and suspects that must go alone; suspects come first, so that they are soon done."""

    def __init__(
        self, *, idle: Callable[[], bool] = lambda: False, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Begin open; ``idle``: whether nothing of what is inside is worked on now."""
        self._idle = idle
        self._patience_seconds = patience_seconds
        self._inside = 0
        self._alone = False
        self._round = 0
        """Those of earlier rounds hold up nobody any more."""
        self._waiting: list[tuple[bool, asyncio.Future[int]]] = []
        """Whether it goes with others, and its turn: suspects first, and else in the order in which they came."""
        self._look: asyncio.TimerHandle | None = None
        self._idled = False

    def enter_now(self, *, alone: bool = False) -> int | None:
        """Come in if nobody is to be waited for; return as ``enter`` does, None: it must be called."""
        if self._waiting or self._alone or (alone and self._inside):
            return None
        self._inside += 1
        self._alone = alone
        return self._round

    async def enter(self, *, alone: bool) -> int:
        """Come in, once it is this request's turn; return what to ``leave`` with."""
        pass_ = self.enter_now(alone=alone)
        if pass_ is not None:
            return pass_
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        insort(self._waiting, (not alone, turn), key=itemgetter(0))
        if self._look is None:
            self._look_later()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._let_in()  # it may have been the one that others wait for
            else:
                self.leave(turn.result())  # its turn came in the same moment
            raise

    def leave(self, pass_: int) -> None:
        """Go out again, with what ``enter`` returned."""
        if pass_ == self._round:
            self._inside -= 1
            self._alone = self._idled = False
            if self._waiting:
                self._let_in()

    def _let_in(self) -> None:
        """Let in whose turn it is now."""
        self._waiting = [waits for waits in self._waiting if not waits[1].cancelled()]
        while self._waiting and not self._alone and (self._waiting[0][0] or not self._inside):
            together, turn = self._waiting.pop(0)
            self._inside += 1
            self._alone = not together
            turn.set_result(self._round)
        if self._look is not None:  # those that come in now get their time
            self._look.cancel()
            self._look = None
        self._idled = False
        if self._waiting:
            self._look_later()

    def _look_later(self) -> None:
        self._look = asyncio.get_running_loop().call_later(self._patience_seconds, self._look_inside)

    def _look_inside(self) -> None:
        """Wait no longer for those inside if they wait themselves."""
        self._look = None
        idled, self._idled = self._idled, self._idle()
        if idled and self._idled:
            self._round += 1
            self._inside, self._alone = 0, False
            self._let_in()
        else:
            self._look_later()
