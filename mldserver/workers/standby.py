"""Standby workers: processes that have loaded the handler and wait to replace the next worker that dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Final

import structlog
from msgspec.structs import replace

from mldserver.base.backoff import Backoff
from mldserver.base.clock import Clock
from mldserver.children.supervise import ChildExit, supervise
from mldserver.errors import HandlerError, HandlerInvalid, QueryFailed
from mldserver.handler.queries import QueryResult, discard
from mldserver.handler.spec import HandlerSpec
from mldserver.workers import wire
from mldserver.workers.worker_process import WorkerGone, WorkerProcess
from mldserver.workers.worker_queries import QueryPort

log = structlog.get_logger("mldserver")

_FIRST_STARTS: Final = 3
"""How many processes in a row may be killed at the server's start before the server raises an error."""
_FIRST_PAUSE_SECONDS: Final = 0.2
_LOAD_SECONDS: Final = 600.0
"""How long a process may take to load the handler once another process has loaded it. Then the process is replaced."""
_LONG_MS: Final = 30_000
"""How long a worker may wait for a process that has loaded the handler until the server is not ready."""


class StandbyWorkers:
    """Keeps one process ready, and starts more, several at a time, while workers wait for one."""

    def __init__(self, start: wire.StartWorker, *, clock: Clock, queries: QueryPort | None = None) -> None:
        """``start`` is the first message to each process; ``queries`` runs the handler's queries."""
        self._start = start
        self._queries = queries
        self._lookups: dict[str, tuple[int, QueryResult]] = {}
        """The present table of each lookup, with a serial number. A process gets them before it is ready."""
        self.handler = start.handler
        """The handler's dotted path."""
        self._clock = clock
        self._ready: deque[WorkerProcess] = deque()
        self._wanted = 0
        """How many workers wait for a process."""
        self._wanted_since_ms: int | None = None
        self._starting = 0
        self._round = 0
        """A reload begins a new round: processes of earlier rounds have loaded old code."""
        self._changed = asyncio.Event()
        self._failures = Backoff(base=0.2, cap=15.0)

    @property
    def trouble(self) -> str | None:
        """What an operator should look at: a worker has waited too long for a process; else None."""
        since_ms = self._wanted_since_ms
        waited_ms = 0 if since_ms is None else self._clock.steady_ms() - since_ms
        if waited_ms < _LONG_MS:
            return None
        return f"no worker process has loaded the handler for {waited_ms // 1000} s: see worker.not_started"

    async def first(self) -> wire.HandlerLoaded:
        """Start a process and return what it found in the handler. Raises HandlerError.

        If the process is killed while it loads, start another, up to three in all: the cause may be outside. If it exits,
        the next one would exit too.
        """
        for attempt in range(1, _FIRST_STARTS + 1):
            process = await WorkerProcess.start(self._start, self._clock, self._queries)
            process.again = False
            try:
                loaded = await self._load(process, None)
            except WorkerGone as gone:
                if not process.was_killed or attempt == _FIRST_STARTS:
                    raise HandlerInvalid(
                        _loading(gone),
                        advice="`mldserver check` says where.",
                        traceback=process.last_words or None,
                    ) from gone
                _report(_loading(gone), _FIRST_PAUSE_SECONDS)
                await self._clock.sleep(_FIRST_PAUSE_SECONDS)
            else:
                self._start = replace(self._start, code=loaded.code)
                return loaded
        raise AssertionError("the last attempt returns or raises")

    @contextlib.asynccontextmanager
    async def start_afresh(
        self, count: int, code: dict[str, tuple[str, bytes]] | None = None, directory: str | None = None
    ) -> AsyncIterator[tuple[HandlerSpec, list[WorkerProcess]]]:
        """Start ``count`` processes and yield what they found in the handler. Raises HandlerError.

        ``code``: the modules that they load (``HandlerSpec.code``). Without modules the first process loads those on the disk,
        in ``directory`` first (default: the working directory), and the others load what the first one has loaded. Processes
        that are still in the list when the block ends are closed.
        """
        started: list[WorkerProcess] = []
        loaded: list[wire.HandlerLoaded] = []
        start = replace(self._start, code=code or {})
        if directory is not None:
            path = [*start.python_path, start.directory]
            start = replace(start, python_path=path, directory=directory)
        try:
            for _ in range(count):
                started.append(await WorkerProcess.start(start, self._clock, self._queries))
                started[-1].again = len(started) > 1
                try:
                    async with asyncio.timeout(_LOAD_SECONDS):
                        loaded.append(await started[-1].loaded())
                        await self.fill_lookups(started[-1])
                except TimeoutError:
                    raise HandlerInvalid(_TOO_LONG) from None
                except WorkerGone as gone:
                    raise HandlerInvalid(_loading(gone), advice="`mldserver check` says where.") from gone
                start = replace(start, code=loaded[0].code)
            if any(each != loaded[0] for each in loaded):
                raise HandlerInvalid("The handler has changed while it was loaded.", advice="Ask again.")
            yield wire.spec_of(self.handler, loaded[0]), started
        finally:
            for process in started:
                await process.close()

    def replace_ready(
        self, processes: Iterable[WorkerProcess], code: dict[str, tuple[str, bytes]]
    ) -> list[WorkerProcess]:
        """Keep these processes ready, and return those that were ready before, for the caller to close.

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

    async def acquire(self) -> WorkerProcess:
        """Wait for a process that has loaded the handler, and return it."""
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
        """Start processes when others are taken or have ended, until cancelled."""
        async with asyncio.TaskGroup() as group:
            # Several at once: most of the time that a start takes is CPU time.
            for _ in range(os.cpu_count() or 1):
                group.create_task(supervise(self._start_one, backoff=self._failures, clock=self._clock))

    def set_log_level(self, level: int) -> None:
        """Make processes that are ready, and all later ones, log from ``level`` on."""
        self._start = replace(self._start, log_level=level)
        for process in self._ready:
            process.send(wire.LogLevel(level))

    async def replace_lookup(
        self, name: str, result: QueryResult, others: Callable[[], Iterable[WorkerProcess]]
    ) -> None:
        """Replace the table of a lookup in processes that are ready and in ``others``, and in later ones.

        Raises QueryFailed if the result has no unique key.
        """
        old = self._lookups.pop(name, None)
        self._lookups[name] = (0 if old is None else old[0]) + 1, result
        try:
            for process in {*self._ready, *others()}:
                with contextlib.suppress(WorkerGone):  # the process after it gets the table at its start
                    await self.fill_lookups(process)
        except QueryFailed:
            discard(self._lookups.pop(name)[1])
            if old is not None:
                self._lookups[name] = old
            raise
        if old is not None:
            discard(old[1])

    async def fill_lookups(self, process: WorkerProcess) -> None:
        """Give a process the tables of lookups that it does not have. Raises WorkerGone and QueryFailed."""
        for name in tuple(self._lookups):
            serial, result = self._lookups[name]
            if process.lookups.get(name, 0) < serial:
                process.lookups[name] = serial
                message = wire.FillLookup(next(process.ids), "", name, result.order)
                await process.ask(message, (os.dup(result.file),))

    async def close(self) -> None:
        """End the processes that are ready, and close the tables of lookups."""
        while self._ready:
            await self._ready.popleft().close()
        while self._lookups:
            discard(self._lookups.popitem()[1][1])

    async def _start_one(self) -> ChildExit | None:
        """Start a process once another is needed. Return how it ended if it failed, or if a process that was ready has ended."""
        while len(self._ready) + self._starting > self._wanted:
            if (ended := next((each for each in self._ready if not each.is_open), None)) is not None:
                self._ready.remove(ended)
                await ended.close()
                return _exit(f"A standby worker ended before it was used: {await ended.ending()}.")
            self._changed.clear()
            await self._changed.wait()
        self._starting += 1
        try:
            process = await WorkerProcess.start(self._start, self._clock, self._queries)
            await self._load(process, _LOAD_SECONDS)
        except TimeoutError:
            return _exit(_TOO_LONG)
        except WorkerGone as gone:
            return _exit(_loading(gone))
        except (OSError, HandlerError) as error:
            return _exit(str(error))
        finally:
            self._starting -= 1
            self._changed.set()
        self._failures.worked()
        return None

    async def _load(self, process: WorkerProcess, seconds: float | None) -> wire.HandlerLoaded:
        """Keep a process once it has loaded the handler, else close it. Raises TimeoutError, and as ``loaded`` does."""
        round_ = self._round
        try:
            async with asyncio.timeout(seconds):
                loaded = await process.loaded()
                await self.fill_lookups(process)
        except BaseException:
            await process.close()
            raise
        if round_ != self._round:
            await process.close()
            return loaded
        process.on_end = self._changed.set
        process.send(wire.LogLevel(self._start.log_level))  # it may have changed meanwhile
        self._ready.append(process)
        self._changed.set()
        return loaded


_TOO_LONG: Final = f"Loading the handler took longer than {_LOAD_SECONDS:g} s."


def _exit(what: str) -> ChildExit:
    return ChildExit(partial(_report, what))


def _report(what: str, delay_seconds: float) -> None:
    log.error("worker.not_started", what=what, delay_seconds=delay_seconds)


def _loading(gone: WorkerGone) -> str:
    return f"Loading the handler ended its process: {gone.ending}."
