"""One worker process, from its start to its end: its requests, its answers, its heartbeats and its output.

Each process has a separate channel, which closes with the process. Late answers of an old process are never read,
so answers need no generation number.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import structlog

import mldserver
from mldserver.base.clock import Clock, first_of
from mldserver.children.channel import Channel, Descriptors, WireError, pair
from mldserver.children.process import ChildProcess, ending
from mldserver.errors import StateMoved
from mldserver.observe.logging import LineLimit
from mldserver.protocol.messages import Line
from mldserver.records import Sequence, Shard, pack_sequence
from mldserver.runtime.interface import Delivery
from mldserver.workers import wire
from mldserver.workers.child import STACKS_SIGNAL
from mldserver.workers.shared_memory import Arena
from mldserver.workers.worker_queries import QueryDesk, QueryPort

log = structlog.get_logger("mldserver")

_STACKS_SECONDS: Final = 1.0
"""How long a worker may take to write its stacks before it is killed."""
_KEPT_LINES: Final = 200
"""How many of the lines that a worker prints are kept, for the log when it dies."""
INLINE_BYTES: Final = 4096
"""Shorter lines are sent inside the message: one more copy is cheaper than managing room in the arena."""
_MOST_FILES: Final = 64
"""How many lines a worker may have in separate files at a time; each is an open descriptor."""
_TOGETHER_SECONDS: Final = 0.002
"""How long a ``patient`` request may wait to be sent with others: waking a worker costs as much as several batches of
one record."""
_ROOT: Final = str(Path(mldserver.__file__).parents[1])


class WorkerGone(Exception):
    """The process ended before it answered. ``alone``: it ran the handler, with this request only."""

    def __init__(self, ending: str, *, alone: bool) -> None:
        """``ending``: how the process ended, as text."""
        super().__init__(ending)
        self.ending = ending
        self.guilt = 1.0 if alone else 0.1
        """How strongly the death incriminates the request: another request may have killed the process first."""
        self.died = f"WorkerDied: the handler ended its process: {ending}"
        """The error of the request's records, if they were the cause."""


class Unopened(WorkerGone):
    """The process ended while it opened a shard: the request that needed the shard has not begun."""


@dataclass(slots=True)
class _RawOutput:
    """What a worker prints outside Python's own streams, or in its last moment."""

    limit: LineLimit = field(default_factory=LineLimit)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    silent: bool = False
    """Whether lines are kept, and not logged."""

    def log_lines(self, lines: list[str]) -> bool:
        """Keep lines, and log them; return whether all of them were within the limit."""
        self.last += lines
        passed = True
        for line in lines:
            if line and not self.silent:
                if self.limit.passes():
                    log.info("handler.output", stream="stderr", text=line)
                else:
                    passed = False
        return passed


class WorkerProcess:
    """A running process. Its owner waits for ``ended`` and then closes it."""

    def __init__(
        self,
        child: ChildProcess,
        printed: _RawOutput,
        arena: Arena,
        clock: Clock,
        desk: QueryDesk | None = None,
    ) -> None:
        """Own a process, the memory shared with it, and the desk for its queries."""
        assert child.end is not None, "workers are started with a socket"
        self._child = child
        self.pid = child.pid
        self._printed = printed
        self._clock = clock
        self.arena = arena
        self._desk = desk
        self.lookups: dict[str, int] = {}
        """The serial number of the table that each lookup has here. Its owner keeps it."""
        self.ids = itertools.count(1)
        """Gives requests their numbers."""
        self._requests: dict[
            int, tuple[str, asyncio.Future[Any], int | None, Callable[[WorkerGone | StateMoved], Any] | None]
        ] = {}
        """The unanswered requests, by number: shard, answer, place of the line in the arena, and ``otherwise`` (see
        ``post``)."""
        self.files = asyncio.Semaphore(_MOST_FILES)
        """Limits the lines that are sent in separate files."""
        self._loaded: asyncio.Future[wire.HandlerLoaded] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()
        self.is_open = True
        """Whether it accepts requests."""
        self._closed = False
        self.blamed = True
        """Whether its requests may have caused its end."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when it accepts no more requests."""
        self.again = True
        """Whether to drop its ``handler.loaded`` lines, because another process has logged them."""
        self.done = 0
        """How many batches it has completed; parts of batches do not count. Its owner counts them."""
        self.lost: Counter[str] = Counter()
        """How many requests of a shard were unanswered when it ended."""
        self.beat: wire.BeatMessage | None = None
        self._beat_ms = clock.steady_ms()
        self._channel = Channel[wire.HandlerLoaded](
            child.end, wire.FromWorker, receive=self._receive, ended=self._end
        )

    @classmethod
    async def start(
        cls, start: wire.StartWorker, clock: Clock, queries: QueryPort | None = None
    ) -> WorkerProcess:
        """Start a process, which then loads the handler. ``queries`` runs the handler's queries. Raises OSError."""
        printed = _RawOutput()
        # With this path the worker finds this package, whatever the server's working directory is.
        paths = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
        with contextlib.ExitStack() as undo:
            # Before there is a process: nothing can fail any more then.
            arena = Arena(start.arena_bytes)
            undo.callback(arena.close)
            files = [os.dup(arena.fd)]
            undo.callback(os.close, files[0])
            here = None
            if queries is not None:
                here, there = pair()
                undo.callback(here.close)
                files.append(there.detach())
                undo.callback(os.close, files[1])
            child = await ChildProcess.start(
                [sys.executable, "-m", "mldserver.workers.child"],
                environment={**os.environ, "PYTHONPATH": paths},
                output=[printed.log_lines],
                talks=True,
            )
            undo.pop_all()
        desk = None if here is None or queries is None else QueryDesk(here, queries)
        process = cls(child, printed, arena, clock, desk)
        process._channel.send(start, files)
        return process

    @property
    def silent_ms(self) -> int:
        """Milliseconds since its last heartbeat."""
        return self._clock.steady_ms() - self._beat_ms

    @property
    def in_hand(self) -> int:
        """How many of its requests are unanswered."""
        return len(self._requests)

    @property
    def is_busy(self) -> bool:
        """Whether the handler is running, or was when the process ended."""
        return not self._closed and self.arena.marked

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it: a handler's code does not do that by mistake."""
        return self._child.exit_code == -signal.SIGKILL

    @property
    def last_words(self) -> str:
        """The last lines that it printed outside Python's own streams."""
        return "\n".join(self._printed.last)

    async def loaded(self) -> wire.HandlerLoaded:
        """Return what it found in the handler. Raises HandlerError, and WorkerGone if the process ends first."""
        # The socket alone does not show the end: a process that the handler's module started may hold it.
        await first_of(asyncio.wait({self._loaded}), self._gone.wait(), self._child.wait())
        if not self._loaded.done():
            await self.close()
        if self._loaded.done():
            return self._loaded.result()
        raise WorkerGone(await self.ending(), alone=True)

    async def ended(self) -> None:
        """Return once the process has ended or closed its socket: without the socket it is useless."""
        await first_of(self._child.wait(), self._gone.wait())
        self.is_open = False  # another process may hold its socket

    async def close(self) -> None:
        """Kill it and wait for its end: every request that is unanswered raises WorkerGone. Closing again does nothing."""
        await self._child.close()
        self._channel.drain()
        ended = await self.ending()
        alone = len(self._requests) == 1 and self.is_busy and self.blamed
        if not self._closed:
            self._closed = True
            self._channel.close()
            if self._desk is not None:
                self._desk.close()
            self.arena.close()
            self._printed.limit.report()
        self.is_open = False
        self._gone.set()
        for shard_id, future, _, otherwise in self._requests.values():
            self.lost[shard_id] += 1
            if future.done():
                continue
            gone = WorkerGone(ended, alone=alone)
            if otherwise is None:
                future.set_exception(gone)
            else:
                future.set_result(otherwise(gone))
        self._requests.clear()

    def drain(self) -> None:
        """Read what it has sent already: heartbeats wait while the event loop is blocked."""
        self._channel.drain()

    def kill(self) -> None:
        """Kill the process and its process group, if it lives."""
        if self._child.exit_code is None:
            self._child.kill()

    async def stacks(self) -> str:
        """Ask for the stacks of its threads; return what it prints in time."""
        self._printed.silent = True
        self._printed.last.clear()
        self._child.outputs[0].go_on()
        self._child.signal(STACKS_SIGNAL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STACKS_SECONDS):
                await self._gone.wait()
        return self.last_words

    async def ending(self) -> str:
        """Wait for its end and return how it ended, as text."""
        return ending(await self._child.wait())

    async def ask(
        self, message: wire.WorkerRequest, files: tuple[int, ...] = (), *, offset: int | None = None
    ) -> Any:
        """Send a request, whose id is one of ``ids``, and return its answer: the outcome of a Process, else Finished.

        ``files`` are closed here; the line's room at ``offset`` is free once it is answered. Raises WorkerGone, and the
        error that the worker answered with. If the caller is cancelled, the worker receives a CancelRequest and still
        answers.
        """
        future = self.post(message, files, offset=offset)
        try:
            return await future
        except asyncio.CancelledError:
            self.cancel(message.id)
            raise

    def post(
        self,
        message: wire.WorkerRequest,
        files: tuple[int, ...] = (),
        *,
        offset: int | None = None,
        otherwise: Callable[[WorkerGone | StateMoved], Any] | None = None,
        patient: bool = False,
    ) -> asyncio.Future[Any]:
        """Do as ``ask`` does, but return a future of the answer. A caller that no longer wants it calls ``cancel``.

        ``otherwise`` makes the answer if the process ends without one, or answers StateMoved. ``patient``: the request may be sent together with
        later requests.
        """
        if not self.is_open:
            for each in files:
                os.close(each)
            raise WorkerGone("it has ended", alone=False)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requests[message.id] = message.shard, future, offset, otherwise
        self._channel.send(message, files, within_seconds=_TOGETHER_SECONDS if patient else 0)
        return future

    def send(
        self, message: wire.WorkerNumber | wire.Forget | wire.LogLevel | wire.CancelRequest | wire.StateRoom
    ) -> None:
        """Send a message that needs no answer, if the process takes requests. Forget has id 0: a call may hang."""
        if self.is_open:
            self._channel.send(message)

    async def open(
        self,
        shard: Shard,
        parked: Mapping[str, Sequence] | None,
        store: wire.SentStore | None = None,
        *files: int,
    ) -> None:
        """Open a shard here, some of whose keys may be ``parked``. Raises WorkerGone, HandlerHalted.

        ``files``: the file of the ``store``; it is closed here.
        """
        await self.ask(wire.Open(next(self.ids), shard.id, shard.start, shard.start_sub, store), files)
        if parked:
            await self.ask(wire.Park(next(self.ids), shard.id, wire.packed_keys(parked)))

    def cancel(self, request_id: int) -> None:
        """Cancel a request in the worker, if it is unanswered."""
        if request_id in self._requests:
            self.send(wire.CancelRequest(request_id))

    def _end(self, garbled: str | None) -> None:
        if garbled is not None:
            log.error("worker.garbled", pid=self.pid, what=garbled)
        self.is_open = False
        self._gone.set()
        self.on_end()

    def _receive(self, message: Any, files: Descriptors) -> None:
        match message:
            case wire.BatchDone() | wire.Finished() | wire.Failed() if message.id:
                self._answered(message, files)
            case wire.HandlerLoaded() if not self._loaded.done():
                # It beats from now on, however long loading took.
                self._beat_ms = self._clock.steady_ms()
                self._loaded.set_result(message)
            case wire.Failed() if not self._loaded.done():
                self._loaded.set_exception(wire.error_of(message))
            case wire.BeatMessage():
                self.beat = message
                self._beat_ms = self._clock.steady_ms()
            case wire.ForwardedLog() if message.event != "handler.loaded" or not self.again:
                with contextlib.suppress(Exception):  # fields may have any name: a line is not worth a worker
                    getattr(log, message.level)(message.event, **message.fields)

    def _answered(self, message: wire.BatchDone | wire.Finished | wire.Failed, files: Descriptors) -> None:
        """Set a request's answer. Raises WireError if the answer's rows are unreadable."""
        _, future, offset, otherwise = self._requests[message.id]
        if future.done():
            if isinstance(message, wire.BatchDone) and message.rows_bytes:
                os.close(files.pop(0))
        elif isinstance(message, wire.Failed):
            error = wire.error_of(message)
            if otherwise is not None and isinstance(error, StateMoved):
                future.set_result(otherwise(error))
            else:
                future.set_exception(error)
        elif isinstance(message, wire.BatchDone):
            try:
                outcome = wire.outcome_of(message, files)
            except (pa.ArrowInvalid, IndexError, OSError) as error:
                raise WireError(f"the rows of an answer cannot be read: {error}") from None
            future.set_result(outcome)
        else:
            future.set_result(message)
        # Last: while the request is listed, its caller is notified if the process ends.
        del self._requests[message.id]
        if offset is not None:
            self.arena.free(offset)


def message_of(
    process: WorkerProcess, delivery: Delivery, form: int, line: Line, length: int, offset: int | None
) -> wire.Process:
    """Return the message for a batch. A short line is inside; others are at ``offset`` in the arena, or in a file."""
    part = delivery.part
    return wire.Process(
        next(process.ids),
        delivery.shard_id,
        form,
        delivery.received_ms,
        pack_sequence(delivery.after),
        bytes(line) if length <= INLINE_BYTES else None,
        offset,
        length,
        None if part is None else (part.start, part.stop),
        delivery.condemned,
        delivery.redriven,
        delivery.behind,
        delivery.number,
    )
