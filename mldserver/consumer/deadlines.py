"""When a source that waits for a batch is acknowledged although the batch is not done.

One watch serves all connections: a task for each would be most of what an idle connection costs.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from mldserver.base.clock import Clock

_AGAIN_SECONDS: Final = 1.0
"""Until the next attempt to acknowledge a batch whose deadline is over, if there was no room."""


class Waiting(Protocol):
    """A consumer whose source may wait for a batch."""

    @property
    def owed_since_ms(self) -> int | None:
        """Steady time at which the batch came that the source waits for; None: it waits for none."""

    def acknowledge_late(self) -> None:
        """Acknowledge that batch, if possible."""


class AnswerDeadlines:
    """Watches the batches that sources wait for."""

    def __init__(self, *, clock: Clock, seconds: float | None) -> None:
        """Acknowledge a batch ``seconds`` after it came; None: never before it is done."""
        self._clock = clock
        self.seconds = seconds
        self.waiting: set[Waiting] = set()
        """The consumers to watch; a consumer removes itself."""
        self._come = asyncio.Event()

    def watch(self, consumer: Waiting) -> None:
        """Watch a consumer from now on."""
        if self.seconds is not None:
            self.waiting.add(consumer)
            self._come.set()

    async def run(self) -> None:
        """Acknowledge late batches until cancelled; return at once if there is no deadline."""
        deadline = self.seconds
        if deadline is None:
            return
        while True:
            if not self.waiting:
                self._come.clear()
                await self._come.wait()
                continue
            now_ms, pause = self._clock.steady_ms(), deadline
            for consumer in tuple(self.waiting):
                if (since_ms := consumer.owed_since_ms) is None:
                    continue
                left = deadline - (now_ms - since_ms) / 1000
                if left <= 0:
                    consumer.acknowledge_late()
                    left = deadline if consumer.owed_since_ms is None else _AGAIN_SECONDS
                pause = min(pause, left)
            # Batches that come during this sleep are due later than those that are watched.
            await self._clock.sleep(pause)
