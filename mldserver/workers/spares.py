"""A process in reserve, its imports done and its handler loaded, for the worker that dies next."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Final

import structlog
from msgspec.structs import replace

from mldserver.base.backoff import Backoff
from mldserver.base.clock import Clock
from mldserver.errors import HandlerError, HandlerInvalid
from mldserver.handler.spec import HandlerSpec
from mldserver.workers import wire
from mldserver.workers.worker_process import WorkerGone, WorkerProcess

log = structlog.get_logger("mldserver")

_FIRST_STARTS: Final = 3
"""How many processes in a row may be killed at the server's start before the server raises an error."""
_PAUSE_SECONDS: Final = 0.2
"""The least pause between a failed start and the next."""
_LOAD_SECONDS: Final = 600.0
"""How long a process may take to load the handler, once one has loaded it: then it hangs, and another may not."""
_LONG_MS: Final = 30_000
"""How long a worker may wait for a process that has loaded the handler until a person should look."""


class Spares:
    """Keeps one process ready, and makes more, several at a time, while more are wanted."""

    def __init__(self, start: wire.Start, *, clock: Clock) -> None:
        """Processes begin with ``start``."""
        self._start = start
        self.handler = start.handler
        """Its dotted path."""
        self._clock = clock
        self._ready: deque[WorkerProcess] = deque()
        self._wanted = 0
        """How many wait for one."""
        self._wanted_since_ms: int | None = None
        self._making = 0
        self._round = 0
        """Processes of earlier rounds have loaded what the handler was."""
        self._changed = asyncio.Event()
        self._backoff = Backoff(base=_PAUSE_SECONDS, cap=15.0, free=2)

    @property
    def trouble(self) -> str | None:
        """What an operator should look at: a worker has waited too long for a process; else None."""
        since_ms = self._wanted_since_ms
        waited_ms = 0 if since_ms is None else self._clock.steady_ms() - since_ms
        if waited_ms < _LONG_MS:
            return None
        return f"no worker process has loaded the handler for {waited_ms // 1000} s: see worker.not_started"

    async def first(self) -> wire.Loaded:
        """Start a process and return what it found in the handler. Raises HandlerError.

        A process that is killed while it loads says nothing of the handler, so that two of them may be; one that ends
        otherwise would end so again.
        """
        killed = 0
        while True:
            process = await WorkerProcess.start(self._start, self._clock)
            process.again = False
            try:
                loaded = await self._load(process, None)
            except WorkerGone as gone:
                killed += 1
                if not process.was_killed or killed == _FIRST_STARTS:
                    raise HandlerInvalid(
                        _loading(gone),
                        advice="`mldserver check` says where.",
                        traceback=process.last_words or None,
                    ) from gone
                await self._pause(_loading(gone))
            else:
                self._start = replace(self._start, code=loaded.code)
                return loaded

    @contextlib.asynccontextmanager
    async def anew(self, count: int) -> AsyncIterator[tuple[HandlerSpec, list[WorkerProcess]]]:
        """Give so many new processes, and what they found in the handler as it is now. Raises HandlerError.

        The first one loads what lies on the disk, the others what the first one has loaded. What is in the list when the
        block ends is closed.
        """
        made: list[WorkerProcess] = []
        loaded: list[wire.Loaded] = []
        start = replace(self._start, code={})
        try:
            for _ in range(count):
                made.append(await WorkerProcess.start(start, self._clock))
                made[-1].again = len(made) > 1
                try:
                    async with asyncio.timeout(_LOAD_SECONDS):
                        loaded.append(await made[-1].loaded())
                except TimeoutError:
                    raise HandlerInvalid(
                        f"Loading the handler took longer than {_LOAD_SECONDS:g} s."
                    ) from None
                except WorkerGone as gone:
                    raise HandlerInvalid(_loading(gone), advice="`mldserver check` says where.") from gone
                start = replace(start, code=loaded[0].code)
            if any(replace(each, code=start.code) != loaded[0] for each in loaded):
                raise HandlerInvalid("The handler has changed while it was loaded.", advice="Ask again.")
            yield wire.spec_of(self.handler, loaded[0]), made
        finally:
            for process in made:
                await process.close()

    def renew(
        self, processes: Iterable[WorkerProcess], code: dict[str, tuple[str, bytes]]
    ) -> list[WorkerProcess]:
        """Keep these ready, and none that began to load before; return those that were kept.

        Later processes load ``code``, as these have.
        """
        old = list(self._ready)
        self._start = replace(self._start, code=code)
        self._ready = deque(processes)
        for process in self._ready:
            process.on_end = self._changed.set
        self._round += 1
        self._changed.set()
        return old

    async def take(self) -> WorkerProcess:
        """Return a process that has loaded the handler."""
        self._wanted += 1
        self._changed.set()
        if self._wanted_since_ms is None:
            self._wanted_since_ms = self._clock.steady_ms()
        try:
            while (process := next((each for each in self._ready if each.is_open), None)) is None:
                self._changed.clear()
                await self._changed.wait()
            self._ready.remove(process)
        finally:
            self._wanted -= 1
            self._wanted_since_ms = self._clock.steady_ms() if self._wanted else None
            self._changed.set()
        return process

    async def run(self) -> None:
        """Make new ones when they are taken, or end, until cancelled."""
        async with asyncio.TaskGroup() as group:
            # Most of the time that it takes is the processor's.
            for _ in range(os.cpu_count() or 1):
                group.create_task(self._make())

    def set_log_level(self, level: int) -> None:
        """Let those that are ready, and all that follow, log from ``level`` on."""
        self._start = replace(self._start, log_level=level)
        for process in self._ready:
            process.tell(wire.LogLevel(level))

    async def close(self) -> None:
        """End what is ready."""
        while self._ready:
            await self._ready.popleft().close()

    async def _make(self) -> None:
        while True:
            ended = next((process for process in self._ready if not process.is_open), None)
            if ended is not None:
                self._ready.remove(ended)
                await ended.close()
                await self._pause(f"A spare process ended before it was used: {await ended.ending()}.")
                continue
            if len(self._ready) + self._making > self._wanted:
                self._changed.clear()
                await self._changed.wait()
                continue
            self._making += 1
            try:
                process = await WorkerProcess.start(self._start, self._clock)
                await self._load(process, _LOAD_SECONDS)
                self._backoff.worked()
            except TimeoutError:
                await self._pause(f"Loading the handler took longer than {_LOAD_SECONDS:g} s.")
            except WorkerGone as gone:
                await self._pause(_loading(gone))
            except (OSError, HandlerError) as error:
                await self._pause(str(error))
            finally:
                self._making -= 1
                self._changed.set()

    async def _load(self, process: WorkerProcess, seconds: float | None) -> wire.Loaded:
        """Keep a process once it has loaded the handler, else close it. Raises TimeoutError, and as ``loaded`` does."""
        round_ = self._round
        try:
            async with asyncio.timeout(seconds):
                loaded = await process.loaded()
        except BaseException:
            await process.close()
            raise
        if round_ != self._round:
            await process.close()
            return loaded
        process.on_end = self._changed.set
        process.tell(wire.LogLevel(self._start.log_level))  # it may have changed meanwhile
        self._ready.append(process)
        self._changed.set()
        return loaded

    async def _pause(self, what: str) -> None:
        """Say what became of a process, and wait before the next."""
        delay_seconds = max(_PAUSE_SECONDS, self._backoff.failed())
        log.error("worker.not_started", what=what, delay_seconds=delay_seconds)
        await self._clock.sleep(delay_seconds)


def _loading(gone: WorkerGone) -> str:
    return f"Loading the handler ended its process: {gone.ending}."
