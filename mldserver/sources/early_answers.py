"""Answers batches whose work takes longer than the answer deadline: one watch for all connections.

A task for each would be most of what an idle connection costs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from mldserver.clock import Clock

__all__ = ["Answerable", "EarlyAnswers"]

_AGAIN_SECONDS: Final = 1.0
"""How soon it is looked again at a batch that is due for an early answer but may not get one yet."""


class Answerable(Protocol):
    """Whoever owes its daemon an answer."""

    @property
    def since_ms(self) -> int | None:
        """When what it owes an answer for came; None: it owes none any more."""
        ...

    def answer_early(self) -> None:
        """Answer now, if that is possible now."""
        ...


class EarlyAnswers:
    """Looks after everyone who owes an answer."""

    def __init__(self, *, clock: Clock, deadline_seconds: float | None) -> None:
        """Ask for an early answer after so many seconds; None: never."""
        self._clock = clock
        self.deadline_seconds = deadline_seconds
        self._owing: set[Answerable] = set()
        self._come = asyncio.Event()

    def owes(self, one: Answerable) -> None:
        """Look after one from now on."""
        if self.deadline_seconds is not None:
            self._owing.add(one)
            self._come.set()

    def has_answered(self, one: Answerable) -> None:
        """Look after it no more."""
        self._owing.discard(one)

    async def run(self) -> None:
        """Ask for early answers until cancelled; return at once when there are none to be given."""
        deadline = self.deadline_seconds
        if deadline is None:
            return
        while True:
            if not self._owing:
                self._come.clear()
                await self._come.wait()
                continue
            for one in tuple(self._owing):
                if self._left(one, deadline) <= 0:
                    one.answer_early()
            # Sleeps through all that are done in time; what comes meanwhile is due later than what is there.
            lefts = [self._left(one, deadline) for one in self._owing]
            again = min(_AGAIN_SECONDS, deadline)
            await self._clock.sleep(min([deadline, *(left if left > 0 else again for left in lefts)]))

    def _left(self, one: Answerable, deadline: float) -> float:
        since_ms = one.since_ms
        return deadline if since_ms is None else deadline - (self._clock.steady_ms() - since_ms) / 1000
