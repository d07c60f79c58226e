"""The runtime whose handlers run in worker processes (see ``Runtime``).

    server ── WorkerRuntime ──┬── WorkerSlot ── WorkerProcess ══ socket ══ child: InlineRuntime, the user's code
                              ├── WorkerSlot ── WorkerProcess ══ socket ══ child
                              └── a standby worker, which replaces the next process that dies

Batches are sent as they came; rows come back as Arrow. A shard stays with its worker. When a process dies, its unanswered
requests are made again in the next process, which opens their shards first. These requests are suspects: from then on each
has the process to itself. If a batch alone kills its process as often as a record may be tried, the runtime halves it to
find the records that do so; these fail for good. Timers that are due it fires one by one, once some have killed their process.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
from msgspec.structs import replace

from mldserver.base.clock import Clock, SystemClock
from mldserver.errors import HandlerLost, InternalError, OperatorError, StateMoved
from mldserver.handler.context import NO_SETTINGS
from mldserver.handler.failure import Failure
from mldserver.handler.queries import QueryResult
from mldserver.handler.spec import HandlerSpec
from mldserver.records import Hook, Sequence, Shard, unpack_sequence
from mldserver.runtime.failure_policy import FailurePolicy, OnFailure
from mldserver.runtime.interface import BatchOutcome, Begun, Delivery, DueTimers
from mldserver.runtime.keyed_state import STATE_BYTES
from mldserver.runtime.lookups import RequiredLookups
from mldserver.runtime.outcome import halted
from mldserver.status_document import WorkerRow
from mldserver.stores import SnapshotSource, StoreSize, largest, nearly_full
from mldserver.workers import wire
from mldserver.workers.open_stores import OpenStores
from mldserver.workers.reload import Reload
from mldserver.workers.search import search_parts
from mldserver.workers.shared_memory import Held
from mldserver.workers.standby import StandbyWorkers
from mldserver.workers.worker import Limits, WorkerSlot, place, spread
from mldserver.workers.worker_process import INLINE_BYTES, Unopened, WorkerGone, WorkerProcess, message_of
from mldserver.workers.worker_queries import QueryPort

log = structlog.get_logger("mldserver")

_SURELY: Final = 10
"""How many processes in a row may die of a request that does not call the handler."""
_SHARE_SECONDS: Final = 1.0
_MOVES: Final = 3
"""How often in a row a batch may find another state than the one that it follows: each opening reads the state again."""
ARENA_BYTES: Final = 64 << 20
"""Size of each worker's arena. Only touched pages use memory: as much as the lines that were in flight at a time."""
_T = TypeVar("_T")


class WorkerRuntime:
    """Runs one pipeline's handler in worker processes."""

    def __init__(
        self,
        handler: str,
        *,
        pipeline: str = "",
        workers: int,
        policy: FailurePolicy,
        limits: Limits,
        clock: Clock | None = None,
        deadline_seconds: float | None = None,
        concurrency: int | None = None,
        state_bytes: int = STATE_BYTES,
        settings: Mapping[str, str] = NO_SETTINGS,
        log_level: int = 20,
        code: dict[str, tuple[str, bytes]] | None = None,
        queries: QueryPort | None = None,
        query_seconds: float = 30.0,
    ) -> None:
        """Run the handler at a dotted path. The workers import it; the server never does.

        ``code``: the modules that the workers load (``HandlerSpec.code``); without, those on the Python path.
        ``clock`` measures back-off and silence. Processes live in real time, whatever clock the server has. For the
        other arguments see ``InlineRuntime``.
        """
        self._policy, self._parks = policy, policy.parks
        clock = clock or SystemClock()
        start = wire.StartWorker(
            pipeline=pipeline or handler,
            handler=handler,
            python_path=[path for path in sys.path if path],
            directory=str(Path.cwd()),
            policy=policy,
            concurrency=concurrency,
            deadline_seconds=deadline_seconds,
            arena_bytes=ARENA_BYTES,
            state_bytes=state_bytes,
            settings=dict(settings),
            log_level=log_level,
            query_seconds=query_seconds,
            code=code or {},
        )
        self._standby = StandbyWorkers(start, clock=clock, queries=queries)
        self.workers = self._workers = [
            WorkerSlot(number, fresh=self._standby.acquire, limits=limits, clock=clock)
            for number in range(workers)
        ]
        self._plan: dict[str, int] = {}
        self._shards: dict[str, Shard] = {}
        self._stores = OpenStores()
        self._parked: dict[str, dict[str, Sequence]] = {}
        self._owing: set[str] = set()
        """Shards whose record processor has not checkpointed all records that it was given. Only its own process
        knows which of them are done."""
        self._wary: dict[str, int] = {}
        """Shards of whose timers one ends its process, and after how many the runtime stops firing them one by one."""
        self._state_bytes, self._clock = state_bytes, clock
        self._reloading = asyncio.Lock()
        self.spec: HandlerSpec
        """The loaded handler's spec, without callable objects."""

    @property
    def trouble(self) -> str | None:
        """What an operator should look at; None while all workers work."""
        troubles = [each for worker in self._workers if (each := worker.trouble)]
        full = nearly_full(self.state_sizes(), self._state_bytes)
        return "; ".join(troubles) or self._standby.trouble or full

    def state_sizes(self) -> tuple[StoreSize, ...]:
        """Return how much keyed state the workers hold (see ``Runtime.state_sizes``), as their latest heartbeats report it."""
        return largest(size for worker in self._workers for size in worker.state_sizes())

    def rows(self) -> tuple[WorkerRow, ...]:
        """Return the workers' rows of the status document."""
        return tuple(worker.row() for worker in self._workers)

    def worker_of(self) -> dict[str, int]:
        """Return the number of the worker that has each open shard."""
        return {shard_id: worker.number for worker in self._workers for shard_id in worker.opened}

    async def load(self) -> HandlerSpec:
        """Start a first process and return what it found in the handler. Raises HandlerError."""
        self.spec = wire.spec_of(self._standby.handler, await self._standby.first())
        self._required = RequiredLookups(self.spec.lookups)
        return self.spec

    async def reload(
        self,
        pending_callbacks: AbstractSet[str] = frozenset(),
        code: dict[str, tuple[str, bytes]] | None = None,
    ) -> None:
        """Replace all processes by new ones that have loaded the handler's present code. ``spec`` is then theirs.

        ``pending_callbacks``: the callbacks for which timers are pending, which the new code must have too. ``code``: the new
        modules; without, those on the Python path. Raises HandlerError if the new code cannot be loaded or a shard cannot be
        opened with it, and OperatorError if the old processes cannot be replaced now. In both cases nothing changes.
        """
        if self._reloading.locked():
            raise OperatorError("Another reload is under way.")
        async with self._reloading:
            reload = Reload(
                self._standby,
                self._workers,
                self._shards,
                self._stores,
                self._parked,
                self._owing,
                pending_callbacks,
                code,
            )
            self.spec = await reload.run(self.spec)

    async def start(self) -> None:
        """Do nothing: ``load`` has started the handler."""

    async def run(self) -> None:
        """Keep the workers running until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._standby.run(), name="standby worker")
            for worker in self._workers:
                group.create_task(worker.run(), name=f"worker {worker.number}")
            if self.spec.keyed and len(self._workers) > 1:
                group.create_task(self._share_room(), name="room for state")

    async def _share_room(self) -> None:
        """Tell each worker every second how much memory the others leave for its state. A new process has the whole limit until then."""
        while True:
            await self._clock.sleep(_SHARE_SECONDS)
            used = [sum(size.bytes for size in worker.state_sizes()) for worker in self._workers]
            for worker, own in zip(self._workers, used, strict=True):
                if worker.present is not None:
                    worker.present.send(wire.StateRoom(max(0, self._state_bytes - (sum(used) - own))))

    def set_log_level(self, level: int) -> None:
        """Set the log level of all processes: ``level`` is a number of ``logging``."""
        self._standby.set_log_level(level)
        for worker in self._workers:
            if worker.present is not None:
                worker.present.send(wire.LogLevel(level))

    async def close(self) -> None:
        """End all processes that are left."""
        for worker in self._workers:
            await worker.close()
        await self._standby.close()

    async def open(self, shard: Shard, snapshot: SnapshotSource | None = None) -> None:
        """Open a shard (see ``Runtime.open``). If this ends the process, retry; ``halt`` limits the retries."""
        await self._required.wait()
        await self._stores.add(shard.id, snapshot)
        self._shards[shard.id] = shard
        self._parked.pop(shard.id, None)
        self._owing.discard(shard.id)
        if shard.id not in self._plan:
            healthy = [worker.number for worker in self._workers if not worker.failed]
            workers = healthy or range(len(self._workers))
            self._plan[shard.id] = place(self._plan, workers, shard.id, self._stores.of)
        self._worker(shard.id).opened.pop(shard.id, None)
        alone = shard.id in self._worker(shard.id).suspects
        await self._with_process(shard.id, lambda _: asyncio.sleep(0), alone=alone)

    async def notify(self, shard_id: str, hook: Hook) -> Sequence | None:
        """Run a life-cycle hook (see ``Runtime.notify``)."""
        if hook is Hook.LEASE_LOST:
            self._owing.discard(shard_id)  # the new owner of the lease reads from the last checkpoint
        try:
            answer = await self._tried(
                shard_id,
                lambda at: at.ask(wire.Notify(next(at.ids), shard_id, hook)),
                self._policy.attempts,
                patient=False,
            )
        except WorkerGone as gone:
            log.error(
                "handler.hook_failed",
                shard=shard_id,
                handler=self._standby.handler,
                hook=str(hook),
                what=gone.died,
                attempts=self._policy.attempts,
            )
            return None
        return unpack_sequence(answer.position)

    async def park(self, shard_id: str, keys: Mapping[str, Sequence]) -> None:
        """Hold back later records of these keys in an open shard (see ``Runtime.park``)."""
        if not self._parks:
            return
        self._worker(shard_id)  # it is open, or nothing is kept of the keys
        self._parked.setdefault(shard_id, {}).update(keys)
        await self._until_done(shard_id, lambda id_: wire.Park(id_, shard_id, wire.packed_keys(keys)))

    async def unpark(self, shard_id: str, key: str) -> None:
        """Process later records of a key again (see ``Runtime.unpark``)."""
        if self._parked.get(shard_id, {}).pop(key, None) is not None:
            await self._until_done(shard_id, lambda id_: wire.Unpark(id_, shard_id, key))

    async def fill_lookup(self, name: str, result: QueryResult) -> None:
        """Replace the table of a lookup (see ``Runtime``)."""
        await self._standby.replace_lookup(
            name, result, lambda: [each for worker in self._workers if (each := worker.present) is not None]
        )
        self._required.note(name)

    async def forget(self, shard_id: str) -> None:
        """Drop the shard's handler."""
        if self._shards.pop(shard_id, None) is None:
            return
        self._parked.pop(shard_id, None)
        self._owing.discard(shard_id)
        self._wary.pop(shard_id, None)
        self._stores.remove(shard_id)
        worker = self._workers[self._plan.pop(shard_id)]
        worker.opened.pop(shard_id, None)
        if (process := worker.present) is not None:
            # Whether it is open there or not: an opening that was given up, or has failed, leaves something too.
            process.send(wire.Forget(0, shard_id))

    def begin(self, delivery: Delivery) -> Begun:
        """Send a batch if it need not wait (see ``Runtime.begin``). No task wakes up before the batch is done."""
        shard_id = delivery.shard_id
        worker, (form, line) = self._worker(shard_id), delivery.payload.packed()
        process = worker.ready
        if (
            process is None
            or worker.opened.get(shard_id) != worker.generation
            or self._parks
            or shard_id in self._wary
            or (pass_ := worker.gate.enter_now()) is None
        ):
            return self.process(delivery)
        offset = None
        if len(line) > INLINE_BYTES and (offset := process.arena.put(line)) is None:
            worker.gate.leave(pass_)
            return self.process(delivery)
        message = message_of(process, delivery, form, line, len(line), offset)

        def ended(batch: asyncio.Future[Any]) -> None:
            worker.gate.leave(pass_)
            if batch.cancelled():
                process.cancel(message.id)
            elif batch.exception() is None and isinstance(batch.result(), BatchOutcome):
                process.done += 1
                self._record_outcome(shard_id, batch.result())

        begun = process.post(
            message,
            offset=offset,
            otherwise=lambda end: self.process(delivery, after=end),
            patient=delivery.behind,
        )
        begun.add_done_callback(ended)
        return begun

    async def process(
        self, delivery: Delivery, *, after: WorkerGone | StateMoved | None = None
    ) -> BatchOutcome:
        """Process a batch (see ``Runtime.process``), in as many processes as it takes.

        ``after``: how the first process ended that the batch was sent to, or that it refused the batch.
        """
        shard_id, payload = delivery.shard_id, delivery.payload
        if isinstance(after, StateMoved):
            self._moved(shard_id)
            after = None
        elif after is not None:
            self._evade(self._worker(shard_id))
        if isinstance(payload, DueTimers) and payload.limit > 1 and not (payload.letters or payload.cancel):
            return await self._fire(delivery, payload, after)
        return await self._process(delivery, after)

    async def _fire(self, delivery: Delivery, due: DueTimers, after: WorkerGone | None) -> BatchOutcome:
        """Fire timers. If they end their process, fire them one by one, also in later deliveries, until that timer was found."""
        shard_id = delivery.shard_id
        if after is None and shard_id not in self._wary:
            with contextlib.closing(Held(due)) as held:
                try:
                    return await self._with_process(
                        shard_id, partial(self._sent, delivery, held), alone=False
                    )
                except WorkerGone as gone:
                    after = gone
        self._wary[shard_id] = due.limit if after is not None else self._wary[shard_id]
        # The first timer need not be that one: its attempts begin now.
        outcome = await self._process(replace(delivery, payload=replace(due, limit=1)), None)
        left = self._wary.pop(shard_id, 0) - 1
        if left > 0:
            self._wary[shard_id] = left
        return outcome

    async def _process(self, delivery: Delivery, after: WorkerGone | None) -> BatchOutcome:
        shard_id, held = delivery.shard_id, Held(delivery.payload)
        try:
            work = partial(self._sent, delivery, held)
            outcome = await self._tried(
                shard_id, work, self._policy.attempts, after=after, alone=shard_id in self._wary
            )
        except WorkerGone as gone:
            worker = self._worker(shard_id)
            worker.searches += 1
            try:
                outcome = await self._search(delivery, held, gone.died)
            finally:
                worker.searches -= 1
        finally:
            held.close()
        return outcome

    async def _tried(
        self,
        shard_id: str,
        work: Callable[[WorkerProcess], Awaitable[_T]],
        times: int,
        *,
        after: WorkerGone | None = None,
        alone: bool = False,
        patient: bool = True,
    ) -> _T:
        """Do ``work`` with one process after another. Raises WorkerGone once ``times`` processes have died of it."""
        guilt = 0.0 if after is None else after.guilt
        while guilt < times:
            try:
                return await self._with_process(shard_id, work, alone=alone or guilt > 0, patient=patient)
            except WorkerGone as gone:
                after = gone
                guilt += gone.guilt
        assert after is not None, "who has no guilt is tried"
        raise after

    async def _search(self, delivery: Delivery, held: Held, died: str) -> BatchOutcome:
        """Process a batch that ends its process, except the records that do so (see ``search_parts``).

        Of due timers, the batch has one only.
        """
        shard_id = delivery.shard_id
        if isinstance(delivery.payload, DueTimers):
            if not delivery.payload.letters:
                self._wary.pop(shard_id, None)
                return await self._surely(replace(delivery, condemned=died), held)
            delivery = replace(delivery, part=range(len(delivery.payload.letters)))

        async def once(part: Delivery) -> BatchOutcome:
            return await self._tried(shard_id, partial(self._sent, part, held), 1, alone=True)

        async def surely(part: Delivery) -> BatchOutcome:
            return await self._surely(part, held)

        parts = [await surely(replace(delivery, part=range(0)))]
        with self._stores.searching(shard_id, parts):
            try:
                await search_parts(delivery, died, parts, once=once, surely=surely)
            finally:
                if delivery.number is not None:
                    # The process's state is ahead by parts of a batch: no delivery can follow it.
                    for worker in self._workers:
                        worker.opened.pop(shard_id, None)
        return wire.joined(parts)

    async def _surely(self, delivery: Delivery, held: Held) -> BatchOutcome:
        """Send a request that does not call the handler; send it again if other requests kill the process.

        Raises HandlerLost after ``_SURELY`` deaths: the request itself is then the cause.
        """
        for _ in range(_SURELY):
            try:
                work = partial(self._sent, delivery, held)
                return await self._with_process(delivery.shard_id, work, alone=True)
            except WorkerGone as gone:
                ending = gone.ending
        raise HandlerLost(
            f"A batch ends its worker before the handler is called: {ending}.",
            did="The connection is closed; the batch will be delivered again.",
            advice="It may need more memory: raise worker_memory, or have the daemon send fewer records at once.",
            shard=delivery.shard_id,
            handler=self._standby.handler,
        )

    async def _sent(self, delivery: Delivery, held: Held, process: WorkerProcess) -> BatchOutcome:
        """Send a batch to a process and return the outcome. Raises WorkerGone, and as ``Runtime.process`` does."""
        offset = None
        if held.length > INLINE_BYTES and process.is_open and held.own_file is None:
            offset = process.arena.put(held.line)
        message = message_of(process, delivery, held.form, held.line, held.length, offset)
        outcome: BatchOutcome
        if message.inline is None and offset is None:
            async with process.files:
                outcome = await process.ask(message, (held.file(),))
        else:
            outcome = await process.ask(message, offset=offset)
        process.done += delivery.part is None
        self._record_outcome(delivery.shard_id, outcome)
        return outcome

    async def _with_process(
        self,
        shard_id: str,
        work: Callable[[WorkerProcess], Awaitable[_T]],
        *,
        alone: bool,
        patient: bool = True,
    ) -> _T:
        """Wait for the shard's worker, open the shard there, and return the result of ``work`` with the process.

        ``alone``: no other request may be in the process meanwhile. If a process dies while it opens the shard,
        ``work`` has not begun: a ``patient`` caller tries the next process. If the process's state of the shard's store is
        not the one that ``work`` follows, open the shard again. Raises WorkerGone, HandlerHalted if ``initialize`` may kill no
        further process, and StateMoved if the state did not fit several times.
        """
        deaths = moves = 0
        while True:
            worker = self._worker(shard_id)
            pass_ = await worker.gate.enter(alone=alone)
            try:
                process = await worker.process()
                if self._worker(shard_id) is not worker:
                    continue  # it has moved on meanwhile
                if worker.opened.get(shard_id) != worker.generation:
                    if not alone and self._stores.is_shared(shard_id):
                        alone = True  # an opening replaces the store: no batch of another shard may change it meanwhile
                        continue
                    await self._ensure_open(worker, process, shard_id)
                return await work(process)
            except StateMoved:
                moves += 1
                if moves > _MOVES:
                    raise
                self._moved(shard_id)
            except WorkerGone as gone:
                self._evade(worker)
                if not patient or not isinstance(gone, Unopened):
                    raise
                deaths += alone
                if self._policy.on_failure is OnFailure.HALT and deaths >= self._policy.attempts:
                    handler = self._standby.handler
                    raise halted(
                        Failure(gone.died),
                        str(Hook.INITIALIZE),
                        shard=shard_id,
                        handler=handler,
                        attempts=deaths,
                        messages=True,  # it is the server's own sentence
                    ) from gone
            finally:
                worker.gate.leave(pass_)
            alone = alone or shard_id in self._worker(shard_id).suspects

    async def _ensure_open(self, worker: WorkerSlot, process: WorkerProcess, shard_id: str) -> None:
        """Open the shard in this process. Raises Unopened, HandlerHalted, and HandlerLost."""
        if shard_id in self._owing:
            raise HandlerLost(
                "The record processor is gone with its process, and with records that it had not checkpointed.",
                did="The connection is closed, so that they are delivered again.",
                advice="A processor that checkpoints at the end of each batch goes on without that.",
                shard=shard_id,
                handler=self._standby.handler,
            )
        generation, shard = worker.generation, self._shards.get(shard_id)
        if shard is None:
            raise InternalError("A shard is used that is not open.", shard=shard_id)
        if shard_id in worker.opened:
            log.info("shard.reopened", shard=shard_id, worker=worker.number)
        try:
            await self._stores.open_in(process, shard, self._parked.get(shard_id))
        except WorkerGone as gone:
            raise Unopened(gone.ending, alone=False) from gone
        worker.opened[shard_id] = generation

    async def _until_done(self, shard_id: str, message: Callable[[int], wire.WorkerRequest]) -> None:
        """Send a request to the shard's worker, in one process after another, until it is answered."""
        while True:
            with contextlib.suppress(WorkerGone):
                await self._with_process(
                    shard_id, lambda at: at.ask(message(next(at.ids))), alone=False, patient=False
                )
                return

    def _worker(self, shard_id: str) -> WorkerSlot:
        number = self._plan.get(shard_id)
        if number is None:
            raise InternalError("A shard is used that is not open.", shard=shard_id)
        return self._workers[number]

    def _evade(self, worker: WorkerSlot) -> None:
        """If the worker has failed, move its shards to healthy workers, except the suspects."""
        healthy = [each.number for each in self._workers if not each.failed]
        if not worker.failed or not healthy:
            return
        # What it had in hand at its last death stays: it may be what it dies of.
        stay = [shard for shard, number in self._plan.items() if shard in self._workers[number].suspects]
        for shard, number in spread(self._plan, healthy, self._stores.of, stay).items():
            if number != self._plan[shard]:
                # If the shard ever returns to that worker, it is opened again: by then its state is elsewhere.
                self._workers[self._plan[shard]].opened.pop(shard, None)
                self._plan[shard] = number

    def _moved(self, shard_id: str) -> None:
        """Open the shard again before its next use: its process's state of the store lacks a batch, or has one too many."""
        self._worker(shard_id).opened.pop(shard_id, None)

    def _record_outcome(self, shard_id: str, outcome: BatchOutcome) -> None:
        """Record what the next process must know of this batch: unfinished records, and parked keys."""
        (self._owing.add if outcome.owes else self._owing.discard)(shard_id)
        if self._parks:
            keys = self._parked.setdefault(shard_id, {})
            for letter in outcome.effects.dead_letters:
                if letter.partition_key is not None:
                    keys.setdefault(letter.partition_key, letter.parked_behind or letter.sequence)
