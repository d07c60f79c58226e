"""One worker: a process, and after it the next one, for as long as the server runs; and a batch on its way to it.

Restarts never overlap: a new process takes over when the old one has ended, whatever ended it. Requests that the old
one had in hand raise WorkerGone in whoever asked, who asks again (``runtime.py``).
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog

from mldserver.workers.exclusive import Exclusive
from mldserver.workers.lifecycle import Cause, Deaths, Limits, judge
from mldserver.workers.shared_memory import line_file, made
from mldserver.workers.wire import Place

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType
    from typing import Self

    from mldserver.base.clock import Clock
    from mldserver.runtime.interface import Payload
    from mldserver.workers.process import WorkerProcess

__all__ = ["Held", "Worker"]

log = structlog.get_logger("mldserver")

_LOOK_SECONDS: Final = 0.25
_RETIRE_MS: Final = 30_000
"""How long a process that is to be replaced may wait for the next attempt at what it has in hand."""


class Worker:
    """Keeps a process running."""

    def __init__(
        self, number: int, *, fresh: Callable[[], Awaitable[WorkerProcess]], limits: Limits, clock: Clock
    ) -> None:
        """``fresh`` gives a process that has loaded the handler; it may take its time."""
        self.number = number
        self.gate = Exclusive(idle=self._waits)
        self.generation = 0
        """Which process it is, from 1."""
        self.opened: dict[str, int] = {}
        """Open shards, and the generation that they are open in."""
        self.suspects: set[str] = set()
        """Shards whose requests the last process that died had in hand."""
        self._fresh = fresh
        self._limits = limits
        self._clock = clock
        self._deaths = Deaths()
        self._process: WorkerProcess | None = None
        self._there = asyncio.Event()
        self._retiring = False
        self.searches = 0
        """How many look for records that end the process: then its deaths are progress."""

    @property
    def failed(self) -> bool:
        """Whether its processes keep dying before they do anything."""
        works = self._process is not None and self._process.done > 0
        return self._deaths.failed and not works

    @property
    def restless(self) -> bool:
        """Whether its processes die too often, though they do something."""
        return self._deaths.restless(self._clock.steady_ms())

    @property
    def present(self) -> WorkerProcess | None:
        """Its process while that lives, be it to be replaced soon."""
        return self._process if self._process is not None and self._process.is_open else None

    def _waits(self) -> bool:
        """Whether nothing that its process has in hand is with the handler: all of it waits for its time."""
        process = self._process
        return process is not None and process.is_open and not (self._retiring or process.is_busy)

    async def process(self) -> WorkerProcess:
        """Return the present process, once there is one that takes requests."""
        while self._process is None or not self._process.is_open or self._retiring:
            self._there.clear()
            await self._there.wait()
        return self._process

    async def run(self) -> None:
        """Keep a process running until cancelled."""
        while True:
            process = await self._fresh()
            self._process, self._retiring = process, False
            self.generation += 1
            log.info("worker.started", worker=self.number, pid=process.pid, generation=self.generation)
            self._there.set()
            try:
                cause, stacks = await self._live(process)
            finally:
                self._process = None
                await process.close()
            await self._mourn(process, cause, stacks)

    async def _live(self, process: WorkerProcess) -> tuple[Cause | None, str]:
        """Return once the process has ended, by itself or by us: why then, and where it was."""
        cause: Cause | None = None
        stacks = ""
        async with asyncio.TaskGroup() as group:
            life = group.create_task(process.run())
            while not life.done():
                cause = judge(process.beat, process.silent_ms, self._limits)
                if cause is Cause.GROWN and not await self._retire(process):
                    continue
                if cause is not None:
                    stacks = "" if cause is Cause.GROWN else await process.stacks()
                    process.kill()
                    await asyncio.wait({life})
                    break
                looked = group.create_task(self._clock.sleep(_LOOK_SECONDS))
                await asyncio.wait({life, looked}, return_when=asyncio.FIRST_COMPLETED)
                looked.cancel()
        return cause, stacks

    async def _retire(self, process: WorkerProcess) -> bool:
        """Let it finish what it has in hand, unless that only waits to be tried again, which may be far off.

        Returns False when something else became of it meanwhile.
        """
        self._retiring = True
        latest_ms = self._clock.steady_ms() + _RETIRE_MS
        while (
            process.in_hand and process.is_open and (process.is_busy or self._clock.steady_ms() < latest_ms)
        ):
            if judge(process.beat, process.silent_ms, self._limits) is not Cause.GROWN:
                self._retiring = False
                self._there.set()
                return False
            await self._clock.sleep(_LOOK_SECONDS / 5)
        return True

    async def _mourn(self, process: WorkerProcess, cause: Cause | None, stacks: str) -> None:
        was_failed = self.failed
        self.suspects = set(process.lost)
        replaced = cause is Cause.GROWN and not process.lost
        delay_ms = self._deaths.died(
            self._clock.steady_ms(),
            useful=bool(process.done or self.searches),
            meant=replaced or bool(self.searches),
        )
        told: dict[str, Any] = {
            "worker": self.number,
            "pid": process.pid,
            "reason": str(cause) if cause else await process.ending(),
            "delay_seconds": delay_ms / 1000,
        }
        if replaced:
            told["bytes"] = process.beat.resident_bytes if process.beat else None
            log.warning("worker.replaced", limit_bytes=self._limits.memory_bytes, **told)
        else:
            if words := stacks or process.last_words:
                told["stacks"] = words
            log.error("worker.lost", batches=len(process.lost), **told)
        if self.failed and not was_failed:
            log.critical(
                "worker.failed",
                worker=self.number,
                what=f"It has died {self._deaths.useless} times in a row before it did anything.",
                did="It is started again every 15 seconds; its shards wait.",
                advice="Look at its worker.lost events; mend the handler, and start the server again.",
            )
        await self._clock.sleep(delay_ms / 1000)


INLINE_BYTES: Final = 4096
"""Shorter lines go inside their message: one copy more is cheaper there than keeping account of room."""


class Held:
    """Keeps a payload's bytes until its batch is done: another process may have to be given them again."""

    def __init__(self, payload: Payload) -> None:
        """Keep ``payload``; a long line in a bytearray is emptied once it lies in a file."""
        self.form, self._line = payload.packed()
        self._length = len(self._line)
        self._file: int | None = None

    async def __aenter__(self) -> Self:
        """Begin."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let go of the file, if there is one: beside the loop, as freeing 200 MB takes the kernel 25 ms."""
        file, self._file = self._file, None
        if file is not None:
            # Not waited for: nobody needs to know when, and a cancellation must not keep it open.
            asyncio.get_running_loop().run_in_executor(None, os.close, file)

    async def lay(self, process: WorkerProcess) -> tuple[Place, tuple[int, ...], int | None]:
        """Put them where the process can read it; return where, the files to send, and its offset in the arena.

        Raises WorkerGone.
        """
        if self._length <= INLINE_BYTES:
            return Place(self._length, inline=bytes(self._line)), (), None
        if process.room_for(self._length):
            offset = await process.put(self._line)
            return Place(self._length, offset=offset), (), offset
        if self._file is None:
            self._file = await made(partial(line_file, self._line), os.close)
        return Place(self._length), (self._file,), None
