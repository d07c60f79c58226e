"""One worker: a process, and after it the next one, for as long as the server runs.

Restarts never overlap: a new process takes over only after the old process has ended. The old one's unanswered requests
raise WorkerGone in the callers, which retry (``runtime.py``).

A shard stays with its worker while the worker can work, because the handler's state is there. Closing shards moves no
other shards. New shards go to the worker with the fewest, and only shards of a failed worker move.
"""

from __future__ import annotations

import asyncio
import enum
from bisect import insort
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final

import structlog

from mldserver.base.backoff import Backoff
from mldserver.base.clock import Clock, first_of
from mldserver.workers.wire import BeatMessage, Number
from mldserver.workers.worker_process import WorkerProcess

log = structlog.get_logger("mldserver")

_LOOK_SECONDS: Final = 0.25
_RETIRE_MS: Final = 30_000
"""How long a process may wait for the next retry of its requests before it is replaced."""
_FAILED_AFTER: Final = 8
"""The worker counts as failed after so many processes in a row that died before they did anything."""
_PAUSE_SECONDS: Final = 15.0
RESTLESS_ABOVE: Final = 5
"""Deaths lately (``Deaths.lately``), from which on a person should look."""
_HALF_LIFE_MS: Final = 30_000
PATIENCE_SECONDS: Final = 2.5
"""How often the gate checks, while requests wait, whether the handler works on those inside. Two idle checks in a row
are needed: the handler may not have begun a new request yet."""


@dataclass(slots=True)
class Deaths:
    """The deaths of one worker: those in a row before it had done anything, and apart from them how many came lately.

    Times are milliseconds of any clock that does not run back.
    """

    useless: Backoff = field(default_factory=lambda: Backoff(base=0.2, cap=_PAUSE_SECONDS, free=2))
    _lately: float = 0.0
    _lately_at_ms: int = 0

    def died(self, now_ms: int, *, useful: bool, meant: bool = False) -> float:
        """Count a death; return how many seconds the next life must wait.

        ``useful``: a batch was done, or a record is looked for that ends it. ``meant``: that is why it died, or it was
        replaced between batches.
        """
        if not useful:
            delay = self.useless.failed()
            return self.useless.cap if self.failed else delay
        # Another life will do some work too: to wait would only cost time.
        if not meant:
            self._lately, self._lately_at_ms = self.lately(now_ms) + 1, now_ms
        self.useless.worked()
        return 0.0

    def lately(self, now_ms: int) -> float:
        """Return how many deaths after useful lives count now: the count halves every 30 s."""
        return float(self._lately * 0.5 ** (max(0, now_ms - self._lately_at_ms) / _HALF_LIFE_MS))

    @property
    def failed(self) -> bool:
        """Whether a person should look: it keeps dying before it does anything."""
        return self.useless.failures >= _FAILED_AFTER


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


def place(plan: Mapping[str, int], workers: Collection[int]) -> int:
    """Return the worker for one more shard: one with the fewest. Raises ValueError without workers."""
    if not workers:
        raise ValueError("there is no worker")
    loads = Counter(plan.values())
    return min(workers, key=lambda worker: (loads[worker], worker))


def spread(plan: Mapping[str, int], workers: Collection[int]) -> dict[str, int]:
    """Return the plan for another set of workers: each shard without a worker goes to the worker with the fewest.

    Other shards stay. So a plan that is balanced within one stays so. Raises ValueError without workers.
    """
    if not workers:
        raise ValueError("there is no worker")
    made = {shard: worker for shard, worker in plan.items() if worker in workers}
    for shard in sorted(plan.keys() - made.keys()):
        made[shard] = place(made, workers)
    return made


class Exclusive:
    """Lets requests through that go together, and suspects that must go alone: these first, so that they are soon done.

    Requests inside may wait a long time: for an ``initialize`` that is retried until it succeeds, or for a record's retry
    in an hour. Other requests do not wait for these: once the handler works on no request inside, the next ones enter.
    """

    def __init__(
        self, *, idle: Callable[[], bool] = lambda: False, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Begin open; ``idle``: whether nothing of what is inside is worked on now."""
        self._idle = idle
        self._patience_seconds = patience_seconds
        self._inside = 0
        self._alone = False
        self._round = 0
        """Requests of earlier rounds no longer hold up others."""
        self._waiting: list[tuple[bool, asyncio.Future[int]]] = []
        """Whether it goes with others, and its turn: suspects first, and else in the order in which they came."""
        self._look: asyncio.TimerHandle | None = None
        self._idled = False

    def enter_now(self, *, alone: bool = False) -> int | None:
        """Enter if no wait is needed; return as ``enter`` does, or None if the caller must call ``enter``."""
        if self._waiting or self._alone or (alone and self._inside):
            return None
        self._inside += 1
        self._alone = alone
        return self._round

    async def enter(self, *, alone: bool) -> int:
        """Come in, once it is this request's turn; return what to ``leave`` with."""
        pass_ = self.enter_now(alone=alone)
        if pass_ is not None:
            return pass_
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        insort(self._waiting, (not alone, turn), key=itemgetter(0))
        if self._look is None:
            self._look_later()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._let_in()  # it may have been the one that others wait for
            else:
                self.leave(turn.result())  # its turn came in the same moment
            raise

    def leave(self, pass_: int) -> None:
        """Go out again, with what ``enter`` returned."""
        if pass_ == self._round:
            self._inside -= 1
            self._alone = self._idled = False
            if self._waiting:
                self._let_in()

    def _let_in(self) -> None:
        """Let in whose turn it is now."""
        self._waiting = [waits for waits in self._waiting if not waits[1].cancelled()]
        while self._waiting and not self._alone and (self._waiting[0][0] or not self._inside):
            together, turn = self._waiting.pop(0)
            self._inside += 1
            self._alone = not together
            turn.set_result(self._round)
        if self._look is not None:  # those that come in now get their time
            self._look.cancel()
            self._look = None
        self._idled = False
        if self._waiting:
            self._look_later()

    def _look_later(self) -> None:
        self._look = asyncio.get_running_loop().call_later(self._patience_seconds, self._look_inside)

    def _look_inside(self) -> None:
        """Wait no longer for those inside if they wait themselves."""
        self._look = None
        idled, self._idled = self._idled, self._idle()
        if idled and self._idled:
            self._round += 1
            self._inside, self._alone = 0, False
            self._let_in()
        else:
            self._look_later()


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
        self._next: WorkerProcess | None = None
        """What takes over as soon as the present process has ended."""
        self._there = asyncio.Event()
        self._retiring = False
        self.searches = 0
        """How many look for records that end the process: meanwhile its deaths are progress."""

    @property
    def failed(self) -> bool:
        """Whether its processes keep dying before they do anything."""
        works = self._process is not None and self._process.done > 0
        return self._deaths.failed and not works

    @property
    def restless(self) -> bool:
        """Whether its processes die too often, though they do something."""
        return self._deaths.lately(self._clock.steady_ms()) > RESTLESS_ABOVE

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

    def _waits(self) -> bool:
        """Whether nothing that its process has in hand is with the handler: all of it waits for its time."""
        process = self.present
        return process is not None and not (self._retiring or process.is_busy)

    def has_open(self, shard_id: str) -> bool:
        """Whether a shard is open in the present process."""
        return self.present is not None and self.opened.get(shard_id) == self.generation

    def take_over(self, process: WorkerProcess, shard_ids: Collection[str]) -> bool:
        """Let another process, in which shards are open, take the place of the present one. False: there is none.

        The gate must be held: what is in hand all the same, since it waits itself, is made again.
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
        while True:
            process = self._next or await self._fresh()
            self._process, self._next, self._retiring = process, None, False
            self.generation += 1
            process.tell(Number(self.number))
            log.info("worker.started", worker=self.number, pid=process.pid, generation=self.generation)
            self._there.set()
            try:
                cause, stacks = await self._live(process)
            finally:
                self._process = None
                await process.close()
            if process.blamed:
                await self._clock.sleep(await self._tell_death(process, cause, stacks))
            else:  # another takes over
                self.suspects, self._deaths = set(), Deaths()

    async def _live(self, process: WorkerProcess) -> tuple[Cause | None, str]:
        """Return once the process has ended, by itself or by us: why then, and where it was."""
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
                await first_of(asyncio.wait({life}), self._clock.sleep(_LOOK_SECONDS))
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
            await self._clock.sleep(_LOOK_SECONDS / 5)
        return True

    async def _tell_death(self, process: WorkerProcess, cause: Cause | None, stacks: str) -> float:
        """Count and log the end of a process; return how many seconds the next one must wait."""
        was_failed = self.failed
        self.suspects = set(process.lost)
        replaced = cause is Cause.GROWN and not process.lost
        delay_seconds = self._deaths.died(
            self._clock.steady_ms(),
            useful=bool(process.done or self.searches),
            meant=replaced or bool(self.searches),
        )
        fields: dict[str, Any] = {
            "worker": self.number,
            "pid": process.pid,
            "reason": str(cause) if cause else await process.ending(),
            "delay_seconds": delay_seconds,
        }
        if replaced:
            fields["bytes"] = process.beat.resident_bytes if process.beat else None
            log.warning("worker.replaced", limit_bytes=self._limits.worker_memory, **fields)
        else:
            if words := stacks or process.last_words:
                fields["stacks"] = words
            log.error("worker.lost", batches=process.lost.total(), **fields)
        if self.failed and not was_failed:
            log.critical(
                "worker.failed",
                worker=self.number,
                what=f"It has died {self._deaths.useless.failures} times in a row before it did anything.",
                did="It is started again every 15 seconds; its shards wait.",
                advice="Look at its worker.lost events; mend the handler, and start the server again.",
            )
        return delay_seconds
