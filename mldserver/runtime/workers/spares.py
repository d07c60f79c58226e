"""A process in reserve, its imports done and its handler loaded, for the worker that dies next."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import TYPE_CHECKING, Final

import structlog

from mldserver.errors import HandlerError, HandlerInvalid
from mldserver.runtime.workers.life import Deaths
from mldserver.runtime.workers.process import WorkerGone, WorkerProcess

if TYPE_CHECKING:
    from mldserver.clock import Clock
    from mldserver.runtime.workers import wire

__all__ = ["Spares"]

log = structlog.get_logger("mldserver")

_FIRST_STARTS: Final = 3
"""Processes that may be killed in a row while the server has not begun, until that is told instead of tried again."""
_PAUSE_MS: Final = 200
"""At least, between a start that came to nothing and the next."""


class Spares:
    """Keeps one process ready, and makes more, several at a time, while more are wanted."""

    def __init__(self, start: wire.Start, *, clock: Clock) -> None:
        """Processes begin with ``start``."""
        self._start = start
        self._clock = clock
        self._ready: deque[WorkerProcess] = deque()
        self._wanted = 0
        """How many wait for one."""
        self._making = 0
        self._changed = asyncio.Condition()
        self._deaths = Deaths()

    @property
    def handler(self) -> str:
        """The handler's dotted path."""
        return self._start.handler

    async def first(self) -> wire.Loaded:
        """Start a process and return what it found in the handler. Raises HandlerError.

        A process that is killed while it loads says nothing of the handler, so that two of them may be; one that ends
        otherwise would end so again.
        """
        killed = 0
        while True:
            process = await WorkerProcess.start(self._start, self._clock, again=False)
            try:
                loaded = await process.loaded()
            except WorkerGone as gone:
                killed += 1
                if not process.was_killed or killed == _FIRST_STARTS:
                    raise HandlerInvalid(
                        f"Loading the handler ended its process: {gone.ending}.",
                        advice="`mldserver check` says where.",
                        traceback=process.last_words or None,
                    ) from gone
                await self._pause(gone)
            except BaseException:
                await process.close()
                raise
            else:
                self._ready.append(process)
                return loaded

    async def take(self) -> WorkerProcess:
        """Return a process that has loaded the handler."""
        async with self._changed:
            self._wanted += 1
            self._changed.notify_all()
            try:
                while True:
                    await self._changed.wait_for(lambda: self._ready)
                    process = self._ready.popleft()
                    if process.is_open:
                        return process
                    await process.close()
                    self._changed.notify_all()
            finally:
                self._wanted -= 1
                self._changed.notify_all()

    async def run(self) -> None:
        """Make new ones when they are taken, until cancelled."""
        async with asyncio.TaskGroup() as group:
            # Most of the time that it takes is the processor's.
            for _ in range(os.cpu_count() or 1):
                group.create_task(self._make())

    async def _make(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: len(self._ready) + self._making <= self._wanted)
                self._making += 1
            process = None
            try:
                process = await self._made()
            finally:
                self._making -= 1
            async with self._changed:
                if process is not None:
                    self._ready.append(process)
                self._changed.notify_all()

    async def _made(self) -> WorkerProcess | None:
        process: WorkerProcess | None = None
        try:
            process = await WorkerProcess.start(self._start, self._clock)
            await process.loaded()
        except (OSError, HandlerError, WorkerGone) as error:
            if process is not None:
                await process.close()
            await self._pause(error)
            return None
        except BaseException:
            if process is not None:
                await process.close()
            raise
        self._deaths.worked()
        return process

    async def _pause(self, error: Exception) -> None:
        """Say why a process did not start, and wait before the next."""
        delay_seconds = max(_PAUSE_MS, self._deaths.died(self._clock.now_ms(), useful=False)) / 1000
        what = (
            f"Loading the handler ended its process: {error}."
            if isinstance(error, WorkerGone)
            else str(error)
        )
        log.error("worker.not_started", what=what, delay_seconds=delay_seconds)
        await self._clock.sleep(delay_seconds)

    async def close(self) -> None:
        """End what is ready."""
        while self._ready:
            await self._ready.popleft().close()
