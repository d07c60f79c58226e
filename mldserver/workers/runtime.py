"""The runtime whose handlers run in worker processes (see ``Runtime``).

    server ── WorkerRuntime ──┬── Worker 0 ── WorkerProcess ══ socket ══ child: InlineRuntime, the user's code
                              ├── Worker 1 ── WorkerProcess ══ socket ══ child
                              └── a spare process, warm, for whichever dies next

Batches go over as they came; rows come back as Arrow. A shard stays with its worker. When a process dies its unanswered
requests are made again, in the next one, in which its shards are opened again before. What was in hand then is suspect,
and goes alone from there on: a batch that ends its process alone, as often as a record may be tried, is searched by
halves for the records that do it, and these end as records do that fail for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import structlog

from mldserver.base.clock import SystemClock
from mldserver.errors import HandlerLost, InternalError
from mldserver.handler.failure import Failure
from mldserver.records import Hook
from mldserver.runtime.failure_policy import FailurePolicy, OnFailure
from mldserver.runtime.plan import BatchPlan, Facts, Step
from mldserver.workers import wire
from mldserver.workers.assignment import place, spread
from mldserver.workers.process import Unopened, WorkerGone, WorkerProcess
from mldserver.workers.shared_memory import NEAR_BYTES, Held
from mldserver.workers.spares import Spares
from mldserver.workers.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from mldserver.base.clock import Clock
    from mldserver.handler.spec import HandlerSpec
    from mldserver.records import Sequence, Shard
    from mldserver.runtime.interface import BatchOutcome, Begun, Delivery
    from mldserver.workers.worker import Limits

__all__ = ["WorkerRuntime"]

log = structlog.get_logger("mldserver")

_SURELY: Final = 10
"""Processes that may end in a row while a batch is in hand of which no record reaches the handler."""
_ONCE: Final = FailurePolicy(attempts=1, on_failure=OnFailure.SKIP)
"""How parts of a batch are searched for records that end their process: as often as a record may be tried, the whole has."""
ARENA_BYTES: Final = 64 << 20
"""Of address space; what is touched of it is as much as lines were in hand at a time."""
_T = TypeVar("_T")
INLINE_BYTES: Final = 4096
"""Shorter lines go inside their message: one copy more is cheaper there than keeping account of room."""


class WorkerRuntime:
    """Runs one pipeline's handler in worker processes."""

    def __init__(
        self,
        handler: str,
        *,
        workers: int,
        policy: FailurePolicy,
        limits: Limits,
        clock: Clock | None = None,
        deadline_seconds: float | None = None,
        concurrency: int | None = None,
        log_level: int = 20,
    ) -> None:
        """Take a dotted path, which is imported in the workers, never here. The rest as in ``InlineRuntime``.

        ``clock`` is what deaths and silence are measured by; processes live in the machine's time, whatever the
        server's clock is.
        """
        self._policy = policy
        clock = clock or SystemClock()
        start = wire.Start(
            handler=handler,
            python_path=[path for path in sys.path if path],
            directory=str(Path.cwd()),
            policy=policy,
            concurrency=concurrency,
            deadline_seconds=deadline_seconds,
            arena_bytes=ARENA_BYTES,
            log_level=log_level,
        )
        self._spares = Spares(start, clock=clock)
        self._workers = [
            Worker(number, fresh=self._spares.take, limits=limits, clock=clock) for number in range(workers)
        ]
        self._plan: dict[str, int] = {}
        self._shards: dict[str, Shard] = {}
        self._parked: dict[str, dict[str, Sequence]] = {}
        self._owing: set[str] = set()
        """Shards whose processor was given records that only its own process knows whether they are done."""

    @property
    def trouble(self) -> str | None:
        """What a person should look at."""
        failed = [str(worker.number) for worker in self._workers if worker.failed]
        if failed:
            return f"worker {', '.join(failed)} dies again and again: see worker.lost"
        restless = [str(worker.number) for worker in self._workers if worker.restless]
        if restless:
            return f"worker {', '.join(restless)} has died more than five times lately: see worker.lost"
        return self._spares.trouble

    async def load(self) -> HandlerSpec:
        """Start a first process and return what it found in the handler, without code. Raises HandlerError."""
        return wire.spec_of(self._spares.handler, await self._spares.first())

    async def start(self) -> None:
        """Do nothing more: ``load`` has."""

    async def run(self) -> None:
        """Keep the workers running until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._spares.run(), name="spare worker")
            for worker in self._workers:
                group.create_task(worker.run(), name=f"worker {worker.number}")

    async def close(self) -> None:
        """End what is left of the processes."""
        await self._spares.close()

    async def open(self, shard: Shard) -> None:
        """Open a shard (see ``Runtime.open``); while that ends its process, it is tried again, but for ``halt``."""
        self._shards[shard.id] = shard
        self._parked.pop(shard.id, None)
        self._owing.discard(shard.id)
        if shard.id not in self._plan:
            healthy = [worker.number for worker in self._workers if not worker.failed]
            self._plan[shard.id] = place(self._plan, healthy or range(len(self._workers)))
        self._worker(shard.id).opened.pop(shard.id, None)

        async def opened(_: WorkerProcess) -> None:
            pass

        await self._with_process(shard.id, opened, alone=shard.id in self._worker(shard.id).suspects)

    async def notify(self, shard_id: str, hook: Hook) -> Sequence | None:
        """Run a life-cycle hook (see ``Runtime.notify``)."""
        if hook is Hook.LEASE_LOST:
            self._owing.discard(shard_id)  # whoever has the lease now reads from the last checkpoint
        guilt, suspect, what = 0.0, False, ""
        while guilt < self._policy.attempts:
            try:
                answer = await self._ask(
                    shard_id, lambda id_: wire.Notify(id_, shard_id, hook), alone=suspect
                )
            except WorkerGone as gone:
                suspect, what = True, gone.died
                guilt += gone.guilt
            else:
                return wire.unpacked(answer.position)
        log.error(
            "handler.hook_failed",
            shard=shard_id,
            handler=self._spares.handler,
            hook=str(hook),
            what=what,
            attempts=self._policy.attempts,
        )
        return None

    async def park(self, shard_id: str, keys: Mapping[str, Sequence]) -> None:
        """Let the later records of these keys of an open shard wait (see ``Runtime.park``)."""
        if not self._policy.parks:
            return
        self._worker(shard_id)  # it is open, or nothing is kept of the keys
        self._parked.setdefault(shard_id, {}).update(keys)
        await self._until_done(shard_id, lambda id_: wire.Park(id_, shard_id, wire.packed_keys(keys)))

    async def unpark(self, shard_id: str, key: str) -> None:
        """Let the later records of a key be processed again (see ``Runtime.unpark``)."""
        if self._parked.get(shard_id, {}).pop(key, None) is not None:
            await self._until_done(shard_id, lambda id_: wire.Unpark(id_, shard_id, key))

    async def forget(self, shard_id: str) -> None:
        """Drop the shard's handler; with its process it is gone anyway."""
        if self._shards.pop(shard_id, None) is None:
            return
        self._parked.pop(shard_id, None)
        self._owing.discard(shard_id)
        worker = self._workers[self._plan.pop(shard_id)]
        worker.opened.pop(shard_id, None)
        process = worker.present
        if process is None:
            return
        # Whether it is open there or not: an opening that was given up, or has failed, leaves something too.
        with contextlib.suppress(WorkerGone):
            await process.ask(wire.Forget(next(process.ids), shard_id))

    def begin(self, delivery: Delivery) -> Begun:
        """Send a batch where nothing is to be waited for (see ``Runtime.begin``): nobody is woken before it is done."""
        shard_id = delivery.shard_id
        worker, held = self._worker(shard_id), Held(delivery.payload)
        process = worker.ready
        if (
            process is None
            or worker.opened.get(shard_id) != worker.generation
            or held.length > NEAR_BYTES
            or self._policy.parks
        ):
            return self.process(delivery)
        inline = bytes(held.line) if held.length <= INLINE_BYTES else None
        offset = None if inline is not None else process.arena.put_short(held.line)
        pass_ = worker.gate.enter_now() if inline is not None or offset is not None else None
        if pass_ is None:
            if offset is not None:
                process.arena.give_back(offset)
            return self.process(delivery)
        message = _message(
            process, delivery, held, inline, offset, part=delivery.part, condemned=delivery.condemned
        )
        try:
            answer = process.post(message, offset=offset)
        except WorkerGone:
            worker.gate.leave(pass_)
            return self.process(delivery)
        outcome: asyncio.Future[BatchOutcome | Coroutine[None, None, BatchOutcome]]
        outcome = asyncio.get_running_loop().create_future()

        def given_up(done: asyncio.Future[Any]) -> None:
            if done.cancelled():
                process.cancel(message.id)
                worker.gate.leave(pass_)

        outcome.add_done_callback(given_up)
        answer.add_done_callback(partial(self._answered, delivery, worker, pass_, outcome))
        return outcome

    def _answered(
        self,
        delivery: Delivery,
        worker: Worker,
        pass_: int,
        outcome: asyncio.Future[Any],
        answer: asyncio.Future[BatchOutcome],
    ) -> None:
        """Pass on what a batch came to that was sent by ``begin``; where its process has ended, how it goes on."""
        error = answer.exception()
        if outcome.cancelled():
            return  # nobody wants it any more
        worker.gate.leave(pass_)
        if error is None:
            result = answer.result()
            (self._owing.add if result.owes else self._owing.discard)(delivery.shard_id)
            outcome.set_result(result)
        elif isinstance(error, WorkerGone):
            self._evade(worker)
            outcome.set_result(self.process(delivery, after=error))
        else:
            outcome.set_exception(error)

    async def process(self, delivery: Delivery, *, after: WorkerGone | None = None) -> BatchOutcome:
        """Take a batch through the handler (see ``Runtime.process``), however many processes that takes.

        ``after``: how the first one has ended that it was sent to.
        """
        held = Held(delivery.payload)
        try:
            outcome = await self._tried(delivery, held, self._policy.attempts, after=after)
        except WorkerGone as gone:
            with self._worker(delivery.shard_id).searching():
                outcome = await self._search(delivery, held, gone.died)
        finally:
            held.let_go()
        if self._policy.parks:
            self._note_parked(delivery.shard_id, outcome)
        return outcome

    async def _tried(
        self,
        delivery: Delivery,
        held: Held,
        times: int,
        *,
        part: range | None = None,
        after: WorkerGone | None = None,
    ) -> BatchOutcome:
        """Hand a batch, or a part of it, to one process after another. Raises WorkerGone once it has ended so many."""
        guilt = 0.0 if after is None else after.guilt
        if after is not None and guilt >= times:
            raise after
        while True:
            try:
                return await self._once(delivery, held, part=part, alone=part is not None or guilt > 0)
            except WorkerGone as gone:
                guilt += gone.guilt
                if guilt >= times:
                    raise

    async def _search(self, delivery: Delivery, held: Held, died: str) -> BatchOutcome:
        """Find the records that end their process: the death of a process is a call that failed, to the batch's plan.

        Those records have failed for good, the others are processed.
        """
        parts = [await self._surely(delivery, held, range(0))]
        outline = parts[0].outline
        fresh = range(outline.records - outline.duplicates) if delivery.part is None else delivery.part
        # It asks nothing of the records: no age and no key makes a difference here.
        plan = BatchPlan(fresh, _ONCE, cast("Facts", None))
        while (step := plan.step()) is not None:
            part = _part(step)
            if not died:  # the whole has failed already
                try:
                    parts.append(await self._tried(delivery, held, 1, part=part))
                except WorkerGone as gone:
                    died = gone.died
            if died:
                plan.failed(step, Failure(died), 0)
                if len(part) == 1:
                    parts.append(await self._surely(delivery, held, part, condemned=died))
            died = ""
            if (
                self._policy.parks
            ):  # the next part may be another process's, which must know the keys that wait
                self._note_parked(delivery.shard_id, parts[-1])
        return wire.joined(parts)

    async def _surely(
        self, delivery: Delivery, held: Held, part: range, *, condemned: str | None = None
    ) -> BatchOutcome:
        """Do what needs no handler, again while others kill the process. Raises HandlerLost when it is too much itself."""
        for _ in range(_SURELY):
            try:
                return await self._once(delivery, held, part=part, condemned=condemned, alone=True)
            except WorkerGone as gone:
                ending = gone.ending
        raise HandlerLost(
            f"A batch ends its worker before the handler is called: {ending}.",
            did="The connection is closed; the batch will be delivered again.",
            advice="It may need more memory: raise worker_memory, or let the daemon send fewer records at once.",
            shard=delivery.shard_id,
            handler=self._spares.handler,
        )

    async def _once(
        self,
        delivery: Delivery,
        held: Held,
        *,
        part: range | None = None,
        condemned: str | None = None,
        alone: bool,
    ) -> BatchOutcome:
        """Hand a batch, or a part of it, to one process. Raises WorkerGone when that ends."""
        part = delivery.part if part is None else part
        condemned = delivery.condemned if condemned is None else condemned
        send = partial(self._send, delivery, held, part, condemned)
        outcome = await self._with_process(delivery.shard_id, send, alone=alone)
        (self._owing.add if outcome.owes else self._owing.discard)(delivery.shard_id)
        return outcome

    async def _send(
        self,
        delivery: Delivery,
        held: Held,
        part: range | None,
        condemned: str | None,
        process: WorkerProcess,
    ) -> BatchOutcome:
        """Send a batch with its line: inside the message, in the arena, or in a file. Raises WorkerGone."""
        inline, offset = None, None
        if held.length <= INLINE_BYTES:
            inline = bytes(held.line)
        elif process.is_open:
            offset = await held.put(process.arena)
        message = _message(process, delivery, held, inline, offset, part=part, condemned=condemned)
        if inline is None and offset is None:
            async with process.files:
                outcome: BatchOutcome = await process.ask(message, (await held.file(),))
        else:
            outcome = await process.ask(message, offset=offset)
        return outcome

    async def _with_process(
        self,
        shard_id: str,
        work: Callable[[WorkerProcess], Awaitable[_T]],
        *,
        alone: bool,
        patient: bool = True,
    ) -> _T:
        """Return what ``work`` does with the process of a shard's worker, where the shard is open; ``alone``: nothing else.

        A process that ends while the shard is opened there tells nothing of ``work``: the ``patient`` go to the next one.
        Raises WorkerGone, and HandlerHalted where ``initialize`` may end no more processes.
        """
        deaths = 0
        while True:
            worker, process, pass_ = await self._enter(shard_id, alone=alone)
            try:
                if worker.opened.get(shard_id) != worker.generation:
                    await self._ensure_open(worker, process, shard_id)
                return await work(process)
            except WorkerGone as gone:
                if not patient or not isinstance(gone, Unopened):
                    self._evade(worker)
                    raise
                deaths += alone
                if self._policy.on_failure is OnFailure.HALT and deaths >= self._policy.attempts:
                    halted = gone.halted(shard_id, self._spares.handler, deaths)
                    log.critical("handler.halted", **halted.where, what=gone.died)
                    raise halted from gone
                self._evade(worker)
            finally:
                worker.gate.leave(pass_)
            alone = alone or shard_id in self._worker(shard_id).suspects

    async def _ensure_open(self, worker: Worker, process: WorkerProcess, shard_id: str) -> None:
        """Open the shard in this process. Raises Unopened, HandlerHalted, and HandlerLost."""
        if shard_id in self._owing:
            raise HandlerLost(
                "The record processor is gone with its process, and with records that it had not checkpointed.",
                did="The connection is closed, so that they are delivered again.",
                advice="A processor that checkpoints at the end of each batch goes on without that.",
                shard=shard_id,
                handler=self._spares.handler,
            )
        generation, shard = worker.generation, self._shards.get(shard_id)
        if shard is None:
            raise InternalError("A shard is used that is not open.", shard=shard_id)
        if shard_id in worker.opened:
            log.info("shard.reopened", shard=shard_id, worker=worker.number)
        try:
            await process.ask(wire.Open(next(process.ids), shard_id, shard.start, shard.start_sub))
            if keys := self._parked.get(shard_id):
                await process.ask(wire.Park(next(process.ids), shard_id, wire.packed_keys(keys)))
        except WorkerGone as gone:
            raise Unopened(gone.ending, alone=False) from gone
        worker.opened[shard_id] = generation

    async def _enter(self, shard_id: str, *, alone: bool) -> tuple[Worker, WorkerProcess, int]:
        """Wait for the turn of a request at its shard's worker, which may become another one meanwhile.

        Whoever called leaves the worker's gate again, with the last that is returned.
        """
        while True:
            worker = self._worker(shard_id)
            pass_ = await worker.gate.enter(alone=alone)
            try:
                process = await worker.process()
                if self._worker(shard_id) is worker:
                    return worker, process, pass_
            except BaseException:
                worker.gate.leave(pass_)
                raise
            worker.gate.leave(pass_)

    async def _ask(
        self, shard_id: str, message: Callable[[int], wire.Request], *, alone: bool = False
    ) -> Any:
        """Ask the shard's worker something, once it is open there; it answers Finished. Raises WorkerGone."""

        async def ask(process: WorkerProcess) -> Any:
            return await process.ask(message(next(process.ids)))

        return await self._with_process(shard_id, ask, alone=alone, patient=False)

    async def _until_done(self, shard_id: str, message: Callable[[int], wire.Request]) -> None:
        while True:
            with contextlib.suppress(WorkerGone):
                await self._ask(shard_id, message)
                return

    def _worker(self, shard_id: str) -> Worker:
        number = self._plan.get(shard_id)
        if number is None:
            raise InternalError("A shard is used that is not open.", shard=shard_id)
        return self._workers[number]

    def _evade(self, worker: Worker) -> None:
        """Shards that have nothing to do with a worker's deaths go on elsewhere when it fails for good."""
        healthy = [each.number for each in self._workers if not each.failed]
        if not worker.failed or not healthy:
            return
        staying = {
            shard
            for shard, number in self._plan.items()
            if self._workers[number].failed and shard in self._workers[number].suspects
        }
        able = {shard: number for shard, number in self._plan.items() if shard not in staying}
        for shard, number in spread(able, healthy).items():
            if number != self._plan[shard]:
                # Should it ever come back there, it is opened anew: its state is elsewhere by then.
                self._workers[self._plan[shard]].opened.pop(shard, None)
                self._plan[shard] = number

    def _note_parked(self, shard_id: str, outcome: BatchOutcome) -> None:
        keys = self._parked.setdefault(shard_id, {})
        for letter in outcome.dead_letters:
            if letter.partition_key is not None:
                keys.setdefault(letter.partition_key, letter.parked_behind or letter.sequence)


def _message(
    process: WorkerProcess,
    delivery: Delivery,
    held: Held,
    inline: bytes | None,
    offset: int | None,
    *,
    part: range | None,
    condemned: str | None,
) -> wire.Process:
    """Return what is sent of a batch, or of a part of it; its line is ``inline``, at ``offset``, or in a file."""
    return wire.Process(
        next(process.ids),
        delivery.shard_id,
        held.form,
        delivery.received_ms,
        wire.packed(delivery.after),
        inline,
        offset,
        held.length,
        None if part is None else (part.start, part.stop),
        condemned,
        delivery.redriven,
    )


def _part(step: Step) -> range:
    """Return the records of a step of halving, which never leave one out."""
    return range(step.indices[0], step.indices[-1] + 1)
