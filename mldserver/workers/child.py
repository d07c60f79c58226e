"""The worker's process: ``python -m mldserver.workers.child FD``. An ``InlineRuntime`` behind a socket.

User code is imported and run here, never in the server. The process ends when its socket closes, whatever the
handler does.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import mmap
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import uvloop

from mldserver.base.clock import SystemClock, first_of
from mldserver.base.service import entitle, keep_memory
from mldserver.children.channel import Channel, Descriptors
from mldserver.children.parent_death import die_with_parent
from mldserver.errors import InternalError, MldserverError
from mldserver.handler.inspection import load_spec
from mldserver.handler.kept_modules import KeptModules
from mldserver.handler.queries import QueryResult
from mldserver.observe.logging import set_level
from mldserver.records import Hook, Sequence, Shard, pack_sequence, unpack_sequence
from mldserver.runtime.inline import InlineRuntime
from mldserver.runtime.interface import BatchOutcome, Begun, Delivery, outcome_of, unpacked
from mldserver.workers import wire
from mldserver.workers.shared_memory import Mark, rows_bytes, rows_file
from mldserver.workers.worker_queries import WorkerQueries
from mldserver.workers.worker_reports import Heartbeat, forwarding_logs

STACKS_SIGNAL: Final = signal.SIGUSR1
"""The interpreter then writes the stacks of all threads, even while one of them holds the interpreter lock."""
INLINE_ROWS: Final = 8 * 1024
"""Rows of up to so many bytes are sent inside the message."""
_Answer: TypeAlias = tuple[wire.FromWorker, tuple[int, ...]]
"""A message, and the files that are sent with it."""
_Work: TypeAlias = "Coroutine[Any, Any, _Answer | Sequence | None]"
"""Requests other than batches return None, or the position of a handler that keeps its own."""

_BEHIND: Final = "A batch before this one has failed."
"""The records of this batch may not reach the handler before those of the failed one."""

_LONG_SECONDS: Final = 0.002
"""Answers are collected for so long, unless the last batch took longer."""


class Child:
    """Serves one server."""

    def __init__(self, end: socket.socket) -> None:
        """Serve what comes through ``end``."""
        self._end = end
        self._over = asyncio.Event()
        self._start: asyncio.Future[wire.StartWorker] = asyncio.get_running_loop().create_future()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """The task of each request, by the request's id."""
        self._cancelled: set[int] = set()
        """The ids of requests that the server has cancelled."""
        self._working: dict[str, set[asyncio.Task[None]]] = {}
        """By shard, the tasks of its requests, including cancelled ones. The shard's next request waits for them."""
        self._failed: set[str] = set()
        """Shards with a failed batch: batches that were sent behind it are refused."""
        self._runtime: InlineRuntime
        """Set once StartWorker has come and the handler is loaded; requests come later."""
        self._pid = os.getpid()
        self._slow = False
        """Whether the last batch took long."""
        self._unsent = 0.0
        """When the first unsent answer was queued."""
        self._arena: memoryview = memoryview(b"")
        self._pipeline = ""
        self._queries: WorkerQueries | None = None
        self._channel = Channel[Any](end, wire.FromServer, receive=self._receive, ended=self._hung_up)

    @classmethod
    async def run(cls, end: socket.socket) -> None:
        """Serve the requests that come through ``end``, until it closes; then end the process."""
        self = cls(end)
        async with asyncio.TaskGroup() as group:
            self._group = group
            serving = group.create_task(self._serve())
            await first_of(asyncio.wait({serving}), self._over.wait())
            if serving.done() and not serving.cancelled() and (error := serving.exception()) is not None:
                traceback.print_exception(error, file=sys.__stderr__)  # this program itself is at fault
                os._exit(1)
            # A thread that is in the handler's hands cannot be ended; the process can.
            os._exit(0)

    def _hung_up(self, wrong: str | None) -> None:
        if wrong is not None:
            abandon(f"The server's messages cannot be taken: {wrong}.")
        self._over.set()

    async def _serve(self) -> None:
        """Load the handler, then run its background work until the socket closes."""
        start = await self._start
        sys.path[:0] = [path for path in start.python_path if path not in sys.path]
        with forwarding_logs(self._end, start.log_level) as forwarder:
            try:
                spec = await asyncio.to_thread(
                    load_spec, start.handler, directory=start.directory, code=start.code
                )
                if not start.code:
                    # What its hooks import later must be what the processes after it import.
                    KeptModules(spec.code).begin()
                runtime = self._runtime = InlineRuntime(
                    spec,
                    policy=start.policy,
                    clock=SystemClock(),
                    random=random.random,
                    deadline_seconds=start.deadline_seconds,
                    concurrency=start.concurrency,
                    at_once=True,
                    watched=True,
                    mark=self._mark.add,
                    state_bytes=start.state_bytes,
                    settings=start.settings,
                    queries=self._queries,
                    query_seconds=start.query_seconds,
                )
                await runtime.start()
            except MldserverError as error:
                self._channel.send(wire.failed(0, error))
            else:
                Heartbeat(
                    self._end,
                    asyncio.get_running_loop(),
                    runtime.deadlines,
                    forwarder.report_lost,
                    runtime.state_sizes,
                ).start()
                self._channel.send(wire.loaded_of(spec))
                # What was imported stays: the collector need not look at it with every batch.
                gc.freeze()
                await runtime.run()
            await self._over.wait()

    def _receive(self, message: Any, files: Descriptors) -> None:  # noqa: C901, PLR0912  # one case for each kind of message
        match message:
            case wire.Process():
                self._process(message, self._line(message, files))
            case wire.Open():
                shard, sent = Shard(message.shard, message.start, message.start_sub), message.store
                source = None if sent is None else wire.source_of(sent, files.pop(0))
                self._begin(message, self._runtime.open(shard, source))
            case wire.Notify():
                self._begin(message, self._runtime.notify(message.shard, Hook(message.hook)))
            case wire.Park():
                keys = {
                    key: sequence for key, data in message.keys.items() if (sequence := unpack_sequence(data))
                }
                self._begin(message, self._runtime.park(message.shard, keys))
            case wire.Unpark():
                self._begin(message, self._runtime.unpark(message.shard, message.key))
            case wire.Forget():
                # Run at once: dropping a shard does not wait for a call that hangs.
                self._begin(message, self._runtime.forget(message.shard), behind=False)
            case wire.FillLookup():
                result = QueryResult(files.pop(0), message.order)
                self._begin(message, self._runtime.fill_lookup(message.name, result), behind=False)
            case wire.CancelRequest():
                # What follows for its shard begins when it has ended all the same.
                if message.id in self._tasks and message.id not in self._cancelled:
                    self._cancelled.add(message.id)
                    # Behind its first step, however soon this comes: without that it would end without an answer.
                    asyncio.get_running_loop().call_soon(self._tasks[message.id].cancel)
            case wire.WorkerNumber():
                entitle(self._pipeline, f"worker {message.number}")
            case wire.LogLevel():
                set_level(message.level)
            case wire.StateRoom():
                self._runtime.state_bytes = message.bytes
            case wire.StartWorker():
                self._pipeline = message.pipeline
                entitle(self._pipeline, "standby worker")
                file = files.pop(0)
                self._arena = memoryview(mmap.mmap(file, message.arena_bytes, prot=mmap.PROT_READ))
                self._mark = Mark(file)
                os.close(file)
                if files:
                    self._queries = WorkerQueries(socket.socket(fileno=files.pop(0)))
                self._start.set_result(message)

    def _begin(self, message: wire.WorkerRequest, work: _Work, *, behind: bool = True) -> None:
        assert self._group is not None
        # Calls for one shard never overlap.
        before = frozenset(self._working.get(message.shard, ())) if behind else frozenset()
        task = self._tasks[message.id] = self._group.create_task(self._answer(message.id, work, before))
        if behind:
            self._working.setdefault(message.shard, set()).add(task)
            task.add_done_callback(partial(self._ended, message.shard))

    def _ended(self, shard: str, task: asyncio.Task[None]) -> None:
        self._working[shard].discard(task)
        if not self._working[shard]:
            del self._working[shard]

    async def _answer(self, request: int, work: _Work, before: frozenset[asyncio.Task[None]]) -> None:
        """Do ``work`` after the tasks in ``before`` have ended, and send the result or the error."""
        answer: _Answer
        try:
            if before:
                await asyncio.wait(before)
            done = await work
            if done is None or isinstance(done, Sequence):
                answer = wire.Finished(request, pack_sequence(done)), ()
            else:
                answer = done
        except asyncio.CancelledError as error:
            if request not in self._cancelled:
                self._mark.add(1)  # it is the handler's doing, though none of its calls may be running
                abandon("The handler ended the event loop, or cancelled tasks that are not its own.")
            answer = wire.failed(request, error), ()
        except Exception as error:  # noqa: BLE001  # told to the server, as the error that it is
            answer = wire.failed(request, error), ()
        finally:
            work.close()  # it may not have begun
        self._tasks.pop(request, None)
        self._cancelled.discard(request)
        self._channel.send(*answer)

    def _process(self, message: wire.Process, line: bytes | memoryview) -> None:
        """Process a batch at once as far as possible; a task does the rest."""
        delivery = Delivery(
            message.shard,
            unpacked(message.form, line, message.shard),
            received_ms=message.received_ms,
            after=unpack_sequence(message.after),
            part=None if message.part is None else range(*message.part),
            condemned=message.condemned,
            redriven=message.redriven,
            number=message.number,
        )
        if message.behind and message.shard in self._failed:
            self._channel.send(wire.failed(message.id, InternalError(_BEHIND, shard=message.shard)))
            return
        if not message.behind and not message.redriven:
            self._failed.discard(message.shard)  # the server knows of it
        began = time.monotonic()
        if self._channel.unsent and (self._slow or began - self._unsent > _LONG_SECONDS):
            self._channel.flush()  # what is done does not wait for a call that may take long
        outcome: Begun | None = None
        self._mark.add(1)
        try:
            if message.shard not in self._working:
                outcome = self._runtime.begin(delivery)
            if os.getpid() != self._pid:
                os._exit(1)  # the handler has forked: its child may neither answer nor go on
            if type(outcome) is BatchOutcome:
                if not self._channel.unsent:
                    self._unsent = time.monotonic()
                self._channel.send(*_answer_of(message.id, outcome))
                return
        except Exception as error:  # noqa: BLE001  # told to the server, as the error that it is
            if not message.redriven:  # a dead letter that runs again is before nothing
                self._failed.add(message.shard)
            self._channel.send(wire.failed(message.id, error))
            return
        finally:
            self._mark.add(-1)
            self._slow = time.monotonic() - began > _LONG_SECONDS
        self._begin(message, self._go_on(message, delivery, outcome))

    async def _go_on(self, message: wire.Process, delivery: Delivery, begun: Begun | None) -> _Answer:
        """Do the rest of a batch, or all of it if it waits for other requests of its shard."""
        if message.behind and message.shard in self._failed:
            raise InternalError(_BEHIND, shard=message.shard)
        threads = self._runtime.threads(message.shard)
        try:
            return _answer_of(message.id, await outcome_of(begun or self._runtime.process(delivery)))
        except Exception:
            if not message.redriven:
                self._failed.add(message.shard)
            raise
        except asyncio.CancelledError:
            # The answer gives the line's room back, which a thread may still read.
            for thread in threads:
                await thread.settled()
            raise

    def _line(self, message: wire.Process, files: Descriptors) -> bytes | memoryview:
        """Return a batch's bytes: from the message, the arena, or a file."""
        if message.inline is not None:
            return message.inline
        if message.offset is not None:
            return self._arena[message.offset : message.offset + message.length]
        file = files.pop(0)
        try:
            return memoryview(mmap.mmap(file, message.length, prot=mmap.PROT_READ))
        finally:
            os.close(file)


def _answer_of(request: int, outcome: BatchOutcome) -> _Answer:
    """Return a batch's outcome as a message, and the file that is sent with it."""
    rows = outcome.effects.rows
    if rows is None:
        return wire.done_of(request, outcome), ()
    if rows.nbytes <= INLINE_ROWS:
        return wire.done_of(request, outcome, rows=rows_bytes(rows)), ()
    try:
        file, size = rows_file(rows)
    except OSError as error:
        abandon(f"The rows of a batch cannot be handed over: {error}.")
    return wire.done_of(request, outcome, rows_bytes=size), (file,)


def abandon(why: str) -> NoReturn:
    """End the process because it cannot work any more.

    For instance, the handler has closed the event loop, or used up the descriptors. No request has failed. The server
    sends all of them to the next process, and finds the guilty record as after any death.
    """
    with contextlib.suppress(OSError):  # the handler may have closed it
        os.write(2, f"{why}\n".encode())
    os._exit(1)


def main(arguments: list[str]) -> None:
    """Serve through the descriptor that ``arguments`` name. Never returns."""
    faulthandler.enable(file=2)
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    # It ends with the server even in the hands of C code, and before it when the machine runs out of memory (Linux).
    with contextlib.suppress(OSError, AttributeError):
        die_with_parent()
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    keep_memory(31 << 20)  # all that it frees are records, too small to bring that about
    # Whoever stops the server stops it alone: what is in hand here is wanted to the end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = socket.socket(fileno=int(arguments[0]))
    end.set_inheritable(False)
    uvloop.run(Child.run(end))


if __name__ == "__main__":
    main(sys.argv[1:])
