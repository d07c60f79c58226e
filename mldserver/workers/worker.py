"""One worker: a process, and after it the next one, for as long as the server runs.

Restarts never overlap: a new process takes over only after the old process has ended. The old one's unanswered requests
raise WorkerGone in the callers, which retry (``runtime.py``).

A shard stays with its worker while the worker can work, because the handler's state is there. Closing shards moves no
other shards. New shards go to the worker with the fewest, and only shards of a failed worker move. Shards that share a store of
keyed state are always at one worker, which holds the store.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import structlog

from mldserver.base.backoff import Backoff
from mldserver.base.clock import Clock, first_of
from mldserver.children.supervise import ChildExit, supervise
from mldserver.status_document import WorkerRow
from mldserver.stores import StoreSize
from mldserver.workers.gate import Gate
from mldserver.workers.wire import BeatMessage, WorkerNumber
from mldserver.workers.worker_process import WorkerProcess

log = structlog.get_logger("mldserver")

_CHECK_SECONDS: Final = 0.25
_RETIRE_MS: Final = 30_000
"""How long a process may wait for the next retry of its requests before it is replaced."""
_FAILED_AFTER: Final = 8
"""The worker has failed after so many processes in a row that died before they completed a batch."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker may do; fields are named like their settings."""

    worker_kill_after_ms: int | None
    """How long a call may run, or the loop be blocked, or beats be missing; None: any time."""
    worker_memory: int | None
    """Beyond so many bytes the worker is replaced between batches, and killed beyond one and a half times that; None: any."""


class Cause(enum.StrEnum):
    """Why a worker must go."""

    CALL = "a call of the handler takes too long"
    BLOCKED = "the handler blocks the worker's event loop"
    SILENT = "it does not beat"
    MEMORY = "it takes too much memory"
    GROWN = "it has grown beyond its memory limit"
    """It may finish what it has begun."""


def judge(beat: BeatMessage | None, silent_ms: int, limits: Limits) -> Cause | None:
    """Return why a worker must go, None when it may stay. ``silent_ms``: since the last beat, or since it has loaded."""
    longest = limits.worker_kill_after_ms
    if longest is not None and silent_ms > longest:
        return Cause.SILENT
    if beat is None:
        return None
    if longest is not None and beat.running_ms > longest:
        return Cause.CALL
    if longest is not None and beat.blocked_ms > longest:
        return Cause.BLOCKED
    if limits.worker_memory is not None and beat.resident_bytes > limits.worker_memory:
        return Cause.MEMORY if beat.resident_bytes > limits.worker_memory * 3 // 2 else Cause.GROWN
    return None


def place(
    plan: Mapping[str, int], workers: Collection[int], shard_id: str, store: Callable[[str], str] = str
) -> int:
    """Return the worker for one more shard: the one that has its store, else one with the fewest stores.

    ``plan``: the worker of each shard. ``store`` returns the store of a shard; the default gives each shard a separate store.
    Raises ValueError without workers.
    """
    if not workers:
        raise ValueError("there is no worker")
    stores = {store(shard): worker for shard, worker in plan.items()}
    loads = Counter(stores.values())
    at = stores.get(store(shard_id))
    return min(workers, key=lambda worker: (loads[worker], worker)) if at is None else at


def spread(
    plan: Mapping[str, int],
    workers: Collection[int],
    store: Callable[[str], str] = str,
    stay: Collection[str] = (),
) -> dict[str, int]:
    """Return the plan for another set of workers: each store without a worker goes to the worker with the fewest.

    All other stores stay, and those of the shards in ``stay``. So a plan that is balanced within one stays so. For the arguments see
    ``place``. Raises ValueError without workers.
    """
    if not workers:
        raise ValueError("there is no worker")
    stores, staying = {store(shard): worker for shard, worker in plan.items()}, set(map(store, stay))
    made = {each: worker for each, worker in stores.items() if worker in workers or each in staying}
    for each in sorted(stores.keys() - made.keys()):
        made[each] = place(made, workers, each)
    return {shard: made[store(shard)] for shard in plan}


class WorkerSlot:
    """Keeps a process running."""

    def __init__(
        self, number: int, *, fresh: Callable[[], Awaitable[WorkerProcess]], limits: Limits, clock: Clock
    ) -> None:
        """``fresh`` waits for a process that has loaded the handler, and returns it."""
        self.number = number
        self.gate = Gate()
        self.generation = 0
        """The number of the present process, from 1."""
        self.opened: dict[str, int] = {}
        """Open shards, and the generation that they are open in."""
        self.suspects: set[str] = set()
        """Shards whose requests were in flight when the last process died."""
        self._fresh = fresh
        self._limits = limits
        self._clock = clock
        self._deaths = Backoff(base=0.2, cap=15.0, free=2)
        self._process: WorkerProcess | None = None
        self._next: WorkerProcess | None = None
        """Takes over as soon as the present process has ended."""
        self._there = asyncio.Event()
        self._retiring = False
        self.searches = 0
        """How many searches for records that end the process are under way: its deaths are progress meanwhile."""

    def row(self) -> WorkerRow:
        """Return its row of the status document."""
        process = self.present
        beat = None if process is None else process.beat
        return WorkerRow(
            number=self.number,
            pid=None if process is None else process.pid,
            generation=self.generation,
            shards=len(self.opened),
            resident_bytes=0 if beat is None else beat.resident_bytes,
            restarts=max(0, self.generation - 1),
            running_seconds=0.0 if beat is None else max(beat.running_ms, beat.blocked_ms) / 1000,
        )

    def state_sizes(self) -> tuple[StoreSize, ...]:
        """Return how much keyed state its process holds, as its latest heartbeat reports it."""
        process = self.present
        return () if process is None or process.beat is None else process.beat.state

    @property
    def trouble(self) -> str | None:
        """What an operator should look at; None while the worker has not failed."""
        if not self.failed:
            return None
        return f"worker {self.number} died {self._deaths.failures} times in a row: see worker.lost"

    @property
    def failed(self) -> bool:
        """Whether its processes keep dying before they complete a batch."""
        works = self._process is not None and self._process.done > 0
        return self._deaths.failures >= _FAILED_AFTER and not works

    @property
    def present(self) -> WorkerProcess | None:
        """The live process, even if it will be replaced soon; once its replacement is chosen, the replacement."""
        process = self._next or self._process
        return process if process is not None and process.is_open else None

    @property
    def ready(self) -> WorkerProcess | None:
        """Its process, if it takes requests and will not be replaced."""
        process = self._process
        return process if process is not None and process.is_open and not self._retiring else None

    def has_open(self, shard_id: str) -> bool:
        """Return whether a shard is open in the present process."""
        return self.present is not None and self.opened.get(shard_id) == self.generation

    def take_over(self, process: WorkerProcess, shard_ids: Collection[str]) -> bool:
        """Replace the present process by one in which shards are open. Return False if there is no present process.

        The caller must hold the gate. Requests that are still in flight, because they wait for a retry, are made again.
        """
        present = self.present
        if present is None:
            return False
        self._next, self._retiring = process, True
        self.opened = dict.fromkeys(shard_ids, self.generation + 1)
        present.is_open, present.blamed = False, False
        present.kill()
        return True

    async def taken_over(self) -> None:
        """Return once no process waits to take over."""
        while self._next is not None:
            self._there.clear()
            await self._there.wait()

    async def close(self) -> None:
        """End the process that was chosen to take over but has not yet done so."""
        if self._next is not None:
            await self._next.close()

    async def process(self) -> WorkerProcess:
        """Return the present process, once there is one that takes requests."""
        while (process := self.ready) is None:
            self._there.clear()
            await self._there.wait()
        return process

    async def run(self) -> None:
        """Keep a process running until cancelled."""
        await supervise(self._run_process, backoff=self._deaths, clock=self._clock)

    async def _run_process(self) -> ChildExit | None:
        """Run one process to its end. Return None if the exit is not a failure."""
        process = self._next or await self._fresh()
        self._process, self._next, self._retiring = process, None, False
        self.generation += 1
        process.send(WorkerNumber(self.number))
        log.info("worker.started", worker=self.number, pid=process.pid, generation=self.generation)
        self._there.set()
        try:
            cause, stacks = await self._until_ended(process)
        finally:
            self._process = None
            await process.close()
        self.suspects = set(process.lost) if process.blamed else set()
        if not process.blamed:  # another process takes over
            self._deaths.worked()
            return None
        reason = str(cause) if cause else await process.ending()
        report = partial(
            self._report, process, reason, stacks, replaced=cause is Cause.GROWN and not process.lost
        )
        if self.searches:
            report(0.0)
            return None
        return ChildExit(report, useful=process.done > 0)

    async def _until_ended(self, process: WorkerProcess) -> tuple[Cause | None, str]:
        """Return once the process has ended: why the worker killed it, if it did, and the stacks of its threads then."""
        async with asyncio.TaskGroup() as group:
            life = group.create_task(process.ended())
            while not life.done():
                cause = self._judged(process)
                if cause is Cause.GROWN and not await self._retire(process):
                    continue
                if cause is not None:
                    stacks = "" if cause is Cause.GROWN else await process.stacks()
                    process.kill()
                    return cause, stacks
                self.gate.check(idle=self.present is not None and not (self._retiring or process.is_busy))
                await first_of(asyncio.wait({life}), self._clock.sleep(_CHECK_SECONDS))
        return None, ""

    def _judged(self, process: WorkerProcess) -> Cause | None:
        process.drain()
        return judge(process.beat, process.silent_ms, self._limits)

    async def _retire(self, process: WorkerProcess) -> bool:
        """Wait until the process finishes its requests. If they only wait for a retry, stop after 30 s.

        Returns False if the reason to replace the process changed meanwhile.
        """
        self._retiring = True
        latest_ms = self._clock.steady_ms() + _RETIRE_MS
        while (
            process.in_hand and process.is_open and (process.is_busy or self._clock.steady_ms() < latest_ms)
        ):
            if self._judged(process) is not Cause.GROWN:
                self._retiring = False
                self._there.set()
                return False
            await self._clock.sleep(_CHECK_SECONDS / 5)
        return True

    def _report(
        self, process: WorkerProcess, reason: str, stacks: str, delay_seconds: float, *, replaced: bool
    ) -> None:
        """Log the end of a process, and that the worker has failed if this was one death too many."""
        fields: dict[str, Any] = {
            "worker": self.number,
            "pid": process.pid,
            "reason": reason,
            "delay_seconds": delay_seconds,
        }
        if replaced:
            fields["bytes"] = process.beat.resident_bytes if process.beat else None
            log.warning("worker.replaced", limit_bytes=self._limits.worker_memory, **fields)
        else:
            if words := stacks or process.last_words:
                fields["stacks"] = words
            log.error("worker.lost", batches=process.lost.total(), **fields)
        if self._deaths.failures == _FAILED_AFTER and delay_seconds:
            log.critical(
                "worker.failed",
                worker=self.number,
                what=f"It has died {_FAILED_AFTER} times in a row before it completed a batch.",
                did="It starts again at most 15 s after each death. Its shards wait, or move to another worker.",
                advice="Read its worker.lost events. Correct the handler, then start the server again.",
            )
