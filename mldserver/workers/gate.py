"""Decides which of a worker's requests may be in its process at the same time."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import Final

IDLE_CHECKS: Final = 10
"""After so many checks in a row that find the handler idle, requests inside no longer hold up others. One check would
not do: the handler may not have begun a new request yet."""


class Gate:
    """Admits requests in the order in which they come: normal requests share the process, a suspect has it to itself.

    A suspect was in flight when the process died. Alone in the next process it succeeds, or its next death proves that it
    is the cause.

    Requests inside may wait a long time, for an ``initialize`` that is retried until it succeeds, or for a record's retry in
    an hour. They hold up others only while the handler runs (``check``).
    """

    def __init__(self) -> None:
        self._passes = itertools.count()
        self._inside: set[int] = set()
        """The passes of the requests that hold up others."""
        self._alone = False
        """Whether the request inside is a suspect."""
        self._waiting: deque[tuple[bool, asyncio.Future[int]]] = deque()
        self._idle_checks = 0

    def enter_now(self, *, alone: bool = False) -> int | None:
        """Enter if no wait is needed; return a pass as ``enter`` does, or None if the caller must call ``enter``."""
        if self._waiting or self._alone or (alone and self._inside):
            return None
        self._alone = alone
        self._idle_checks = 0
        self._inside.add(pass_ := next(self._passes))
        return pass_

    async def enter(self, *, alone: bool) -> int:
        """Wait for this request's turn; return the pass that ``leave`` takes."""
        pass_ = self.enter_now(alone=alone)
        if pass_ is not None:
            return pass_
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((alone, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._admit()  # others may have waited for this request alone
            else:
                self.leave(turn.result())  # its turn came in the same moment
            raise

    def leave(self, pass_: int) -> None:
        """Leave with the pass that ``enter`` returned."""
        if pass_ in self._inside:
            self._inside.remove(pass_)
            self._alone = False
            if self._waiting:
                self._admit()

    def check(self, *, idle: bool) -> None:
        """Record whether the handler is idle. If it stays so while requests wait, they no longer wait for those inside."""
        self._idle_checks = self._idle_checks + 1 if idle and self._waiting else 0
        if self._idle_checks >= IDLE_CHECKS:
            self._inside.clear()
            self._alone = False
            self._admit()

    def _admit(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        while waiting:
            alone, turn = waiting[0]
            if not turn.cancelled():
                if (pass_ := self.enter_now(alone=alone)) is None:
                    break
                turn.set_result(pass_)
            waiting.popleft()
        self._waiting = waiting
