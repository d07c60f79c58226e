"""Watches the calls into the user's code that are running: what is beyond its deadline is told, or cancelled.

One task for all calls of a runtime, which sleeps through those that are done in time: a task for each call costs more
than a small batch does.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from mldserver.base.clock import Clock

log = structlog.get_logger("mldserver")


@dataclass(slots=True, eq=False)
class Watch:
    """Seen from both sides: since when the present call runs, whether anyone still wants it, whether it was cancelled."""

    hook: str = ""
    shard: str = ""
    task: asyncio.Task[None] | None = None
    """The task of asynchronous calls, which can be cancelled; a synchronous one cannot be stopped."""
    started_ms: int | None = None
    abandoned: bool = False
    expired_ms: int | None = None
    """When its deadline cancelled an asynchronous call."""
    told_ms: int | None = None
    """When it was last looked at because it was overdue."""

    @property
    def beyond_ms(self) -> int | None:
        """Since when it is in the hands of the handler alone: an asynchronous call not before its cancellation."""
        return self.started_ms if self.task is None else self.expired_ms


class Deadlines:
    """The calls of one runtime that run, or wait for their thread."""

    def __init__(self, *, handler: str, clock: Clock, seconds: float | None) -> None:
        """A call of ``handler`` (its dotted path, for the log) may take ``seconds``; None: any time."""
        self._handler = handler
        self._clock = clock
        self.seconds = seconds
        self.limit_ms = math.inf if seconds is None else seconds * 1000
        self._watches: set[Watch] = set()
        self._come = asyncio.Event()
        self.here: Watch | None = None
        """Of calls that are made at once on the event loop."""

    def begin(self, watch: Watch) -> None:
        """Watch calls from now on."""
        self._watches.add(watch)
        self._come.set()

    def end(self, watch: Watch) -> None:
        """Nobody waits for these calls any more. One that runs on, on its thread, is watched to its end."""
        watch.abandoned = True
        if watch.task is not None or watch.started_ms is None:
            self._watches.discard(watch)
        else:
            self._forget_ended()

    def tell_here(self) -> None:
        """Tell once of a call that holds up the event loop for longer than it may: when it is done, or beside it."""
        here = self.here
        started_ms = (
            None if here is None else here.started_ms
        )  # once: another thread may end the call meanwhile
        if here is None or started_ms is None or here.told_ms is not None:
            return
        took_ms = self._clock.steady_ms() - started_ms
        if took_ms >= self.limit_ms:
            here.told_ms = started_ms + took_ms
            self._tell_slow(
                here,
                took_ms / 1000,
                did="The call holds up every shard of its process.",
                advice="Give the handler's own calls time-outs, or write blocking = True in it.",
            )

    def running_ms(self) -> int:
        """Return how long the longest call that cannot be stopped has run; from any thread.

        An asynchronous call is one from when it goes on after its cancellation. Those that nobody waits for count too:
        no other can begin on their thread.
        """
        now_ms = self._clock.steady_ms()
        since = [watch.beyond_ms for watch in tuple(self._watches)]
        here = self.here
        since.append(None if here is None else here.started_ms)
        return max((now_ms - each for each in since if each is not None), default=0)

    async def run(self) -> None:
        """Look after deadlines until cancelled; return at once when there is none.

        With the end of it asynchronous calls end too, also those that hold on when their batch is cancelled: nobody
        would cancel them any more.
        """
        if self.seconds is None:
            return
        try:
            while True:
                await self._look(self.seconds)
        finally:
            now_ms = self._clock.steady_ms()
            for watch in self._watches:
                _expire(watch, now_ms)

    async def _look(self, seconds: float) -> None:
        self._forget_ended()
        if not self._watches:
            self._come.clear()
            await self._come.wait()
            return
        overdue = [watch for watch in self._watches if self._left(watch, seconds) <= 0]
        for watch in overdue:
            self._see_to(watch)
        # Calls that begin meanwhile are due later than the first of those that run.
        await self._clock.sleep(min(self._left(watch, seconds) for watch in self._watches))

    def _forget_ended(self) -> None:
        self._watches -= {watch for watch in self._watches if watch.abandoned and watch.started_ms is None}

    def _left(self, watch: Watch, seconds: float) -> float:
        """Return the seconds until a watch must be looked at."""
        now_ms = self._clock.steady_ms()
        left = seconds - _running(watch, now_ms)
        if watch.told_ms is not None:
            left = max(left, seconds - (now_ms - watch.told_ms) / 1000)
        return left

    def _see_to(self, watch: Watch) -> None:
        """Cancel an asynchronous call; tell of one that cannot be stopped, or does not let itself be cancelled."""
        watch.told_ms = self._clock.steady_ms()
        if _expire(watch, watch.told_ms):
            return
        self._tell_slow(
            watch,
            _running(watch, watch.told_ms),
            did="The call cannot be stopped; it is waited for.",
            advice="Give the handler's own calls time-outs.",
        )

    def _tell_slow(self, watch: Watch, seconds: float, **told: str) -> None:
        log.warning(
            "handler.slow",
            shard=watch.shard,
            handler=self._handler,
            hook=watch.hook,
            seconds=seconds,
            **told,
        )


def _expire(watch: Watch, now_ms: int) -> bool:
    """Cancel an asynchronous call, once."""
    if watch.task is None or watch.expired_ms is not None:
        return False
    watch.expired_ms = now_ms
    # In the loop's next turn: one that comes together with the cancellation of the batch would be one with it.
    asyncio.get_running_loop().call_soon(watch.task.cancel)
    return True


def _running(watch: Watch, now_ms: int) -> float:
    started = watch.started_ms
    return 0.0 if started is None else (now_ms - started) / 1000
