"""The worker's process: ``python -m mldserver.workers.child FD``. An ``InlineRuntime`` behind a socket.

Here, and not in the server, user code is imported and run. The process ends with its socket, whatever the handler does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import os
import random
import signal
import socket
import sys
import traceback
from asyncio import FIRST_COMPLETED
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import msgspec
import uvloop

from mldserver.base.clock import SystemClock
from mldserver.errors import MldserverError
from mldserver.handler.inspection import load_spec
from mldserver.records import Hook, Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.inline import InlineRuntime
from mldserver.runtime.interface import Delivery, unpacked
from mldserver.windows import Batches, Tumbling
from mldserver.workers import wire
from mldserver.workers.answers import done_of
from mldserver.workers.channel import Channel
from mldserver.workers.heartbeat import Heartbeat
from mldserver.workers.log_forwarder import telling_through
from mldserver.workers.shared_memory import Mark, made, mapped, rows_bytes, rows_file

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from mmap import mmap

    from mldserver.handler.spec import HandlerSpec
    from mldserver.runtime.interface import BatchOutcome
    from mldserver.workers.log_forwarder import LogForwarder
    from mldserver.workers.shared_memory import Descriptors

__all__ = ["Child", "loaded", "main"]

STACKS_SIGNAL: Final = signal.SIGUSR1
"""Makes the interpreter write where every thread is, even while one of them holds it."""
_PR_SET_PDEATHSIG: Final = 1
INLINE_ROWS: Final = 8 * 1024
"""Bytes of rows that go into the message."""
NEAR_BYTES: Final = 1 << 20
"""Bytes of rows that are copied on the loop."""


_Request: TypeAlias = wire.Process | wire.Open | wire.HookMessage | wire.Park | wire.Unpark | wire.Forget


@dataclass(frozen=True, slots=True)
class _Answer:
    message: wire.FromWorker
    file: int | None = None


class Child:
    """Serves one server."""

    def __init__(self, end: socket.socket) -> None:
        """Serve what comes through ``end``."""
        self._end = end
        self._over = asyncio.Event()
        self._started = asyncio.Event()
        self._queue: asyncio.Queue[tuple[wire.FromServer, Descriptors]] = asyncio.Queue()
        self._tasks: dict[int, tuple[str, asyncio.Task[None]]] = {}
        """What works on each request, and for which shard."""
        self._cancelled: set[int] = set()
        """The requests of which the server says that nobody waits for them any more."""
        self._ending: dict[str, set[asyncio.Task[None]]] = {}
        """What still works on such requests, by shard: its hooks may take their time to end."""
        self._runtime: InlineRuntime | None = None
        self._arena: memoryview = memoryview(b"")
        self._channel = Channel(end, receive=self._receive, ended=self._over.set)

    async def run(self) -> None:
        """Serve until the socket ends."""
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(self._serve(group))
            await asyncio.wait({serving, group.create_task(self._over.wait())}, return_when=FIRST_COMPLETED)
            # A thread that is in the handler's hands cannot be ended; the process can.
            leave(serving)

    def _receive(self, data: bytes, files: Descriptors) -> None:
        self._queue.put_nowait((wire.decode_from_server(data), files))

    def _send(self, message: wire.FromWorker, file: int | None = None) -> None:
        """Send; the file is closed here."""
        self._channel.send(wire.encode(message), () if file is None else (file,))
        if file is not None:
            os.close(file)

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        start, files = await self._queue.get()
        assert isinstance(start, wire.Start), "the first message is Start"
        self._arena = memoryview(mapped(files[0], start.arena_bytes))
        self._mark = Mark(files[0])
        os.close(files[0])
        with telling_through(self._end, start.log_level) as teller:
            if not await self._load(start, teller):
                await self._over.wait()
                return
            # What was imported stays: the collector need not look at it with every batch.
            gc.freeze()
            group.create_task(self._ready().run())
            while True:
                message, files = await self._queue.get()
                self._take(group, message, files)

    async def _load(self, start: wire.Start, teller: LogForwarder) -> bool:
        sys.path[:0] = [path for path in start.python_path if path not in sys.path]
        try:
            spec = await asyncio.to_thread(load_spec, start.handler, directory=start.directory)
            runtime = self._runtime = InlineRuntime(
                spec,
                policy=msgspec.convert(start.policy, FailurePolicy),
                clock=SystemClock(),
                random=random.random,
                deadline_seconds=start.deadline_seconds,
                concurrency=start.concurrency,
                interrupts=False,  # Ctrl-C is for the server: here it can only be the handler's own
                mark=self._mark.add,
            )
            await runtime.start()
        except MldserverError as error:
            self._send(wire.failed(0, error))
            return False
        Heartbeat(self._end, asyncio.get_running_loop(), runtime.running_ms, teller.tell_lost).start()
        self._send(loaded(spec))
        return True

    def _take(self, group: asyncio.TaskGroup, message: wire.FromServer, files: Descriptors) -> None:
        match message:
            case wire.Process():
                own = mapped(files[0], message.line.length) if files else None
                for file in files:
                    os.close(file)
                self._begin(group, message, self._process(message, own))
            case wire.Open():
                shard = Shard(message.shard, message.start, message.start_sub)
                self._begin(group, message, self._ready().open(shard))
            case wire.HookMessage():
                self._begin(group, message, self._notify(message))
            case wire.Park():
                keys = {key: wire.position(text) for key, text in message.keys.items()}
                self._begin(group, message, self._ready().park(message.shard, keys))
            case wire.Unpark():
                self._begin(group, message, self._ready().unpark(message.shard, message.key))
            case wire.Forget():
                # At once: whoever lets a shard go does not wait for a call that hangs.
                self._begin(group, message, self._ready().forget(message.shard), behind=False)
            case wire.Cancel():
                self._cancel(message.id)
            case wire.Start():
                raise wire.WireError("a second Start")

    def _ready(self) -> InlineRuntime:
        assert self._runtime is not None, "Start comes first"
        return self._runtime

    def _begin(
        self,
        group: asyncio.TaskGroup,
        message: _Request,
        work: Coroutine[Any, Any, _Answer | None],
        *,
        behind: bool = True,
    ) -> None:
        before = self._ending.get(message.shard)
        if before and behind:
            work = _behind(frozenset(before), work)
        self._tasks[message.id] = message.shard, group.create_task(self._answer(message.id, work))

    def _cancel(self, request: int) -> None:
        """Nobody waits for a request any more; what follows for its shard begins when it has ended all the same."""
        if request not in self._tasks or request in self._cancelled:
            return
        shard, task = self._tasks[request]
        self._cancelled.add(request)
        ending = self._ending.setdefault(shard, set())
        ending.add(task)

        def ended(_: object) -> None:
            ending.discard(task)
            if not ending and self._ending.get(shard) is ending:
                del self._ending[shard]

        task.add_done_callback(ended)
        # Behind its first step, however soon this comes: without that it would end without an answer.
        asyncio.get_running_loop().call_soon(task.cancel)

    async def _answer(self, request: int, work: Coroutine[Any, Any, _Answer | None]) -> None:
        try:
            answer = await work or _Answer(wire.Finished(request))
        except asyncio.CancelledError as error:
            if request not in self._cancelled:
                self._mark.add(1)  # it is the handler's doing, though none of its calls may be running
                abandon()
            answer = _Answer(wire.failed(request, error, cancelled=True))
        except Exception as error:  # noqa: BLE001  # told to the server, as the error that it is
            answer = _Answer(wire.failed(request, error))
        del self._tasks[request]
        self._cancelled.discard(request)
        self._send(answer.message, answer.file)

    async def _process(self, message: wire.Process, own: mmap | None) -> _Answer:
        delivery = Delivery(
            message.shard,
            unpacked(message.form, self._line(message.line, own), message.shard),
            received_ms=message.received_ms,
            after=wire.sequence_of(message.after),
            part=None if message.part is None else range(*message.part),
            condemned=message.condemned,
            redriven=message.redriven,
        )
        threads = self._ready().threads(message.shard)
        try:
            return await _answer_of(message.id, await self._ready().process(delivery))
        except asyncio.CancelledError:
            # The answer gives the line's room back, which a thread may still read.
            for thread in threads:
                await thread.settled()
            raise

    async def _notify(self, message: wire.HookMessage) -> _Answer:
        position = await self._ready().notify(message.shard, Hook(message.hook))
        return _Answer(wire.Finished(message.id, wire.sequence_text(position)))

    def _line(self, place: wire.Place, own: mmap | None) -> Any:
        if place.inline is not None:
            return place.inline
        if place.offset is not None:
            return self._arena[place.offset : place.offset + place.length]
        assert own is not None, "a line that is neither in the message nor in the arena comes as a file"
        return memoryview(own)


async def _behind(
    before: frozenset[asyncio.Task[None]], work: Coroutine[Any, Any, _Answer | None]
) -> _Answer | None:
    """Do ``work`` when what is before it has ended. Calls for one shard never overlap."""
    try:
        await asyncio.wait(before)
    except BaseException:
        work.close()
        raise
    return await work


async def _answer_of(request: int, outcome: BatchOutcome) -> _Answer:
    """Return what became of a batch as a message."""
    rows = outcome.rows
    if rows is None:
        return _Answer(done_of(request, outcome, rows=None, rows_bytes=0))
    if rows.nbytes <= INLINE_ROWS:
        inline = rows_bytes(rows)
        return _Answer(done_of(request, outcome, rows=inline, rows_bytes=len(inline)))
    if rows.nbytes <= NEAR_BYTES:
        file, size = rows_file(rows)
    else:
        file, size = await made(partial(rows_file, rows), _close_rows)
    return _Answer(done_of(request, outcome, rows=None, rows_bytes=size), file)


def _close_rows(file_and_size: tuple[int, int]) -> None:
    os.close(file_and_size[0])


def loaded(spec: HandlerSpec) -> wire.Loaded:
    """Return what the server must know of a handler."""
    windows = spec.windows
    return wire.Loaded(
        kind=spec.kind,
        record_hook=spec.record_hook,
        hooks={hook.name: hook.is_async for hook in spec.hooks.values()},
        concurrency=spec.concurrency,
        schema=None if spec.schema is None else spec.schema.ddl,
        tumbling=(windows.size_ms, windows.on, windows.lateness_ms, windows.disorder_ms)
        if isinstance(windows, Tumbling)
        else None,
        batches=(windows.max_rows, windows.max_age_ms) if isinstance(windows, Batches) else None,
        warnings=[(finding.text, finding.file, finding.line) for finding in spec.warnings],
    )


def leave(serving: asyncio.Task[None]) -> None:
    """End the process: in order with the socket, with a traceback when this program itself is at fault."""
    if serving.done() and not serving.cancelled() and (error := serving.exception()) is not None:
        traceback.print_exception(error, file=sys.__stderr__)
        os._exit(1)
    os._exit(0)


def abandon() -> NoReturn:
    """End the process: the handler has ended its loop, or cancelled what was not its own.

    No request has failed by that. They are all made again, and whose record it was is found as for any other death.
    """
    os.write(2, b"The handler ended the event loop, or cancelled tasks that are not its own.\n")
    os._exit(1)


def main(arguments: list[str]) -> None:
    """Serve through the descriptor that ``arguments`` name. Never returns."""
    faulthandler.enable(file=2)
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    _give_way()
    # Whoever stops the server stops it alone: what is in hand here is wanted to the end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = socket.socket(fileno=int(arguments[0]))
    end.set_inheritable(False)
    uvloop.run(_serve(end))


def _give_way() -> None:
    """End with the server even in the hands of C code, and before it when the machine runs out of memory (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")


async def _serve(end: socket.socket) -> None:
    await Child(end).run()


if __name__ == "__main__":
    main(sys.argv[1:])
