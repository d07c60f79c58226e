"""One worker process, from its start to its end: requests out, answers back, signs of life, what it prints.

Each has a channel of its own, which is closed with it: what an old one says too late reaches nobody, so that answers
need no generation to be told apart by.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

import mldserver
from mldserver.errors import HandlerHalted
from mldserver.records import Hook
from mldserver.workers import wire
from mldserver.workers.channel import Channel, pair
from mldserver.workers.child import STACKS_SIGNAL
from mldserver.workers.lifecycle import Beat
from mldserver.workers.shared_memory import Room, SharedArena
from mldserver.workers.stdout import Output

if TYPE_CHECKING:
    from collections.abc import Callable

    from mldserver.base.clock import Clock
    from mldserver.workers.shared_memory import Descriptors

__all__ = ["Answer", "Unopened", "WorkerGone", "WorkerProcess"]

log = structlog.get_logger("mldserver")

_STACKS_SECONDS: Final = 1.0
"""How long a worker that is to be killed may take to write where it hangs."""
_NEAR_BYTES: Final = 1 << 20
"""Of a line that is copied on the loop."""
_ROOT: Final = str(Path(mldserver.__file__).parents[1])


class WorkerGone(Exception):
    """The process ended before it answered. ``alone``: in the handler, with nothing but this request in its hands."""

    def __init__(self, ending: str, *, alone: bool) -> None:
        """``ending``: how it ended, for people."""
        super().__init__(ending)
        self.ending = ending
        self.alone = alone

    @property
    def guilt(self) -> float:
        """How far it tells against the request: somebody else may have killed the process before that was begun."""
        return 1.0 if self.alone else 0.1

    @property
    def died(self) -> str:
        """The error that the request's records have failed with, if it was theirs."""
        return f"WorkerDied: the handler ended its process: {self.ending}"


class Unopened(WorkerGone):
    """It ended while a shard was opened: whatever wanted the shard to be open has not been begun."""

    def halted(self, shard_id: str, handler: str, deaths: int) -> HandlerHalted:
        """Return what stops the shard when ``initialize`` has ended so many processes."""
        return HandlerHalted(
            f"{Hook.INITIALIZE} failed for good: {self.died}.",
            did="The shard is not opened.",
            advice="Mend the handler and start again.",
            shard=shard_id,
            handler=handler,
            hook=str(Hook.INITIALIZE),
            attempts=deaths,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """A message that answers a request, and the files that came with it: the caller's to close."""

    message: wire.Done | wire.Finished | wire.Failed
    files: Descriptors


class WorkerProcess:
    """A process that has begun; ``run`` is the rest of its life."""

    def __init__(
        self, process: asyncio.subprocess.Process, output: Output, arena: SharedArena, clock: Clock
    ) -> None:
        """Own a process; ``channel`` is set by ``start``."""
        self._process = process
        self._output = output
        self._arena = arena
        self._clock = clock
        self._channel: Channel | None = None
        self._ids = itertools.count(1)
        self._requests: dict[int, asyncio.Future[Answer]] = {}
        self._shards: dict[int, str] = {}
        self._held: dict[int, int] = {}
        """Offsets in the arena by request: taken until it is answered, whether anyone waits or not."""
        self._room = Room(arena)
        self._loaded: asyncio.Future[wire.Loaded] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()
        self.on_end: Callable[[], None] = lambda: None
        """Called when it takes no requests any more."""
        self._again = True
        self.done = 0
        """How many batches it has done."""
        self.lost: frozenset[str] = frozenset()
        """Shards whose requests were unanswered when it ended."""
        self.beat: Beat | None = None
        self._beat_ms = clock.steady_ms()

    @classmethod
    async def start(cls, start: wire.Start, clock: Clock, *, again: bool = True) -> WorkerProcess:
        """Start a process, and let it load the handler; ``again``: which nobody need be told of. Raises OSError."""
        ours, theirs = pair()
        arena = SharedArena(start.arena_bytes)
        printed, prints = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "mldserver.workers.child",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=prints,
                stderr=prints,
                # A signal from the terminal is for the server.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": _python_path(os.environ.get("PYTHONPATH"))},
            )
        except BaseException:
            ours.close()
            os.close(printed)
            arena.close()
            raise
        finally:
            theirs.close()
            os.close(prints)
        self = cls(process, Output(printed), arena, clock)
        self._again = again
        self._channel = Channel(ours, receive=self._receive, ended=self._end)
        self._channel.send(wire.encode(start), (arena.fd,))
        return self

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def silent_ms(self) -> int:
        """How long it has not beaten."""
        return self._clock.steady_ms() - self._beat_ms

    @property
    def in_hand(self) -> int:
        """How many requests it has not answered."""
        return len(self._shards)

    @property
    def is_busy(self) -> bool:
        """Whether a call of the handler is under way, or was when it ended."""
        return self._channel is not None and self._arena.marked

    @property
    def is_open(self) -> bool:
        """Whether it takes requests."""
        return not self._gone.is_set()

    async def loaded(self) -> wire.Loaded:
        """Return what it found in the handler. Raises HandlerError, and WorkerGone when it ended meanwhile."""
        async with asyncio.TaskGroup() as group:
            loaded = group.create_task(_result(self._loaded))
            ended = group.create_task(self._gone.wait())
            await asyncio.wait({loaded, ended}, return_when=asyncio.FIRST_COMPLETED)
            for task in (loaded, ended):
                task.cancel()
        if self._loaded.done() and not self._loaded.cancelled():
            return self._loaded.result()
        await self.close()
        raise WorkerGone(await self.ending(), alone=True)

    async def run(self) -> None:
        """Wait until it has ended; then every request that is unanswered raises WorkerGone."""
        try:
            async with asyncio.TaskGroup() as group:
                exited = group.create_task(self._process.wait())
                gone = group.create_task(self._gone.wait())
                await asyncio.wait({exited, gone}, return_when=asyncio.FIRST_COMPLETED)
                # Without its socket it is of no use, whatever it still does.
                self.kill()
                await exited
                gone.cancel()
        finally:
            await self.close()

    async def close(self) -> None:
        """Kill it, wait for its end, and let go of what is shared. Closing again does nothing."""
        self.kill()
        ending = await self.ending()
        alone = len(self._shards) == 1 and self.is_busy
        if self._channel is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # what it started, and left behind
            self._channel.close()
            self._channel = None
            self._arena.close()
            self._output.close()
        self._gone.set()
        self._room.close()
        self.lost |= frozenset(self._shards.values())
        for each in self._requests.values():
            if not each.done():
                each.set_exception(WorkerGone(ending, alone=alone))
        self._requests.clear()
        self._shards.clear()

    def kill(self) -> None:
        """Kill it and whatever it has started, if it lives."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._signal(signal.SIGKILL)

    async def stacks(self) -> str:
        """Return where its threads are, as far as it says so in time."""
        self._output.only_keep()
        self._signal(STACKS_SIGNAL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STACKS_SECONDS):
                await self._gone.wait()
        return self.last_words

    def _signal(self, number: signal.Signals) -> None:
        # Not through the process object: its look at whether the process lives would take its exit code from the loop.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it: it is nothing that a handler's code does by mistake."""
        return self._process.returncode == -signal.SIGKILL

    async def ending(self) -> str:
        """Return how it ended, once it has."""
        code = await self._process.wait()
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"killed by signal {-code} ({signal.Signals(-code).name})"
        return f"killed by signal {-code}"

    @property
    def last_words(self) -> str:
        """What it printed last, past Python's own streams."""
        return self._output.last_words

    # Requests.

    def room_for(self, length: int) -> bool:
        """Whether a line of this length goes into the arena, now or when others are done."""
        return length <= self._arena.size // 4

    async def put(self, line: bytes | bytearray) -> int:
        """Copy a line into shared memory when there is room; return its offset. Raises WorkerGone."""
        offset = None
        if self.is_open:
            offset = self._room.at_once(len(line))
            if offset is None:
                offset = await self._room.wait(len(line))
        if offset is None or not self.is_open:
            raise WorkerGone("it has ended", alone=False)
        if len(line) <= _NEAR_BYTES:
            self._arena.put(line, offset)
        else:
            await self._put_far(line, offset)
        return offset

    async def _put_far(self, line: bytes | bytearray, offset: int) -> None:
        """Copy a line beside the loop; its room is taken until that has ended, whoever waits."""
        write = self._arena.writer(line, offset)
        writing = asyncio.get_running_loop().run_in_executor(None, write)
        try:
            await asyncio.shield(writing)
        except BaseException:
            writing.add_done_callback(lambda _: self._room.give_back(offset))
            raise

    async def ask(
        self,
        message: Callable[[int], wire.FromServer],
        *,
        shard: str,
        files: tuple[int, ...] = (),
        offset: int | None = None,
    ) -> Answer:
        """Send a request and return its answer. Raises WorkerGone.

        When the caller is cancelled the worker is told so; it answers all the same, and only then the line's room at
        ``offset`` is free.
        """
        if self._channel is None or not self.is_open:
            raise WorkerGone("it has ended", alone=False)
        request = next(self._ids)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._requests[request] = future
        self._shards[request] = shard
        if offset is not None:
            self._held[request] = offset
        self._channel.send(wire.encode(message(request)), files)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                _close(future.result().files)  # the answer came in the same moment
            elif self._channel is not None:
                self._channel.send(wire.encode(wire.Cancel(request)))
            raise

    # What it says.

    def _end(self) -> None:
        self._gone.set()
        self.on_end()

    def _receive(self, data: bytes, files: Descriptors) -> None:
        try:
            message = wire.decode_from_worker(data)
        except wire.WireError as error:
            _close(files)
            log.error("worker.garbled", pid=self.pid, what=str(error))
            self._end()
            return
        match message:
            case wire.Loaded():
                if not self._loaded.done():
                    self._loaded.set_result(message)
            case wire.Failed(id=0):
                if not self._loaded.done():
                    self._loaded.set_exception(wire.error_of(message))
            case wire.Done() | wire.Finished() | wire.Failed():
                self._answered(message, files)
            case wire.BeatMessage():
                self.beat = Beat(message.running_ms, message.blocked_ms, message.resident_bytes)
                self._beat_ms = self._clock.steady_ms()
            case wire.LogLine(event="handler.loaded") if self._again:
                pass
            case wire.LogLine():
                getattr(log, message.level)(message.event, **message.fields)

    def _answered(self, message: wire.Done | wire.Finished | wire.Failed, files: Descriptors) -> None:
        offset = self._held.pop(message.id, None)
        if offset is not None:
            self._room.give_back(offset)
        self._shards.pop(message.id, None)
        self.done += isinstance(message, wire.Done)
        future = self._requests.pop(message.id, None)
        if future is None or future.done():
            _close(files)
        else:
            future.set_result(Answer(message, files))


async def _result(future: asyncio.Future[wire.Loaded]) -> None:
    """Wait for a future, and leave it to whoever asks what came of it."""
    await asyncio.wait({future})


def _python_path(former: str | None) -> str:
    """Return where the worker finds this package, wherever the server was started."""
    return os.pathsep.join(filter(None, (_ROOT, former)))


def _close(files: Descriptors) -> None:
    for each in files:
        os.close(each)
