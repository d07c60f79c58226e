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
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import structlog

from mldserver.base.clock import SystemClock
from mldserver.errors import HandlerLost, InternalError
from mldserver.records import Hook
from mldserver.runtime.failure_policy import OnFailure
from mldserver.workers import wire
from mldserver.workers.answers import joined, outcome_of, spec_of
from mldserver.workers.assignment import place, spread
from mldserver.workers.process import Answer, Unopened, WorkerGone, WorkerProcess
from mldserver.workers.spares import Spares
from mldserver.workers.worker import Held, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mldserver.base.clock import Clock
    from mldserver.handler.spec import HandlerSpec
    from mldserver.records import Sequence, Shard
    from mldserver.runtime.failure_policy import FailurePolicy
    from mldserver.runtime.interface import BatchOutcome, Delivery
    from mldserver.workers.lifecycle import Limits

__all__ = ["WorkerRuntime"]

log = structlog.get_logger("mldserver")

_SURELY: Final = 10
"""Processes that may end in a row while a batch is in hand of which no record reaches the handler."""
ARENA_BYTES: Final = 64 << 20
"""Of address space; what is touched of it is as much as lines were in hand at a time."""
_T = TypeVar("_T", bound="wire.Done | wire.Finished")


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
            policy=msgspec.to_builtins(policy),
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
        return spec_of(self._spares.handler, await self._spares.first())

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

    # Shards.

    async def open(self, shard: Shard) -> None:
        """Open a shard (see ``Runtime.open``); while that ends its process, it is tried again, but for ``halt``."""
        self._shards[shard.id] = shard
        self._parked.pop(shard.id, None)
        self._owing.discard(shard.id)
        if shard.id not in self._plan:
            healthy = [worker.number for worker in self._workers if not worker.failed]
            self._plan[shard.id] = place(self._plan, healthy or range(len(self._workers)))
        self._worker(shard.id).opened.pop(shard.id, None)
        deaths = 0
        while True:
            alone = shard.id in self._worker(shard.id).suspects
            worker, process, pass_ = await self._enter(shard.id, alone=alone)
            try:
                await self._ensure_open(worker, process, shard.id)
            except Unopened as gone:
                deaths += alone
                self._after_opening(worker, shard.id, gone, deaths)
            else:
                return
            finally:
                worker.gate.leave(pass_)

    def _after_opening(self, worker: Worker, shard_id: str, gone: Unopened, deaths: int) -> None:
        """Let a shard be opened again whose opening has ended its process so often. Raises HandlerHalted instead."""
        if self._policy.on_failure is OnFailure.HALT and deaths >= self._policy.attempts:
            halted = gone.halted(shard_id, self._spares.handler, deaths)
            log.critical("handler.halted", **halted.where, what=gone.died)
            raise halted from gone
        self._evade(worker)

    async def notify(self, shard_id: str, hook: Hook) -> Sequence | None:
        """Run a life-cycle hook (see ``Runtime.notify``)."""
        if hook is Hook.LEASE_LOST:
            self._owing.discard(shard_id)  # whoever has the lease now reads from the last checkpoint
        guilt, suspect, what = 0.0, False, ""
        while guilt < self._policy.attempts:
            try:
                answer = await self._ask(
                    shard_id, lambda id_: wire.HookMessage(id_, shard_id, hook), alone=suspect
                )
            except WorkerGone as gone:
                suspect, what = True, gone.died
                guilt += gone.guilt
            else:
                return wire.sequence_of(self._expect(answer, wire.Finished).position)
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
        await self._until_done(shard_id, lambda id_: wire.Park(id_, shard_id, _keys(keys)))

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
        try:
            answer = await process.ask(lambda id_: wire.Forget(id_, shard_id), shard=shard_id)
        except WorkerGone:
            return
        self._expect(answer, wire.Finished)

    # Batches.

    async def process(self, delivery: Delivery) -> BatchOutcome:
        """Take a batch through the handler (see ``Runtime.process``), however many processes that takes."""
        async with Held(delivery.payload) as line:
            guilt = 0.0
            suspect = False
            while True:
                try:
                    outcome = await self._once(delivery, line, alone=suspect)
                except WorkerGone as gone:
                    suspect = True
                    guilt += gone.guilt
                    if guilt >= self._policy.attempts:
                        worker = self._worker(delivery.shard_id)
                        worker.searches += 1
                        try:
                            outcome = await self._search(delivery, line)
                        finally:
                            worker.searches -= 1
                        break
                else:
                    break
        if self._policy.parks:
            self._note_parked(delivery.shard_id, outcome)
        return outcome

    async def _search(self, delivery: Delivery, line: Held) -> BatchOutcome:
        """Find the records that end their process, by halves; they have failed for good, the others are processed."""
        outline = (await self._surely(delivery, line, range(0))).outline
        fresh = range(outline.records - outline.duplicates)
        todo, guilt = [fresh if delivery.part is None else delivery.part], 0.0
        done: list[BatchOutcome] = []
        while todo:
            part = todo.pop()
            try:
                self._keep(done, await self._once(delivery, line, part=part, alone=True), delivery)
                guilt = 0.0
            except WorkerGone as gone:
                guilt += gone.guilt
                if guilt < 1:
                    todo.append(part)
                    continue
                guilt = 0.0
                if len(part) > 1:
                    middle = part.start + len(part) // 2
                    todo += [range(middle, part.stop), range(part.start, middle)]
                else:
                    lost = await self._surely(delivery, line, part, condemned=gone.died)
                    self._keep(done, lost, delivery)
        return joined(done)

    def _keep(self, done: list[BatchOutcome], outcome: BatchOutcome, delivery: Delivery) -> None:
        """Keep what became of a part; the next one may be another process's, which must know the keys that wait."""
        done.append(outcome)
        if self._policy.parks:
            self._note_parked(delivery.shard_id, outcome)

    async def _surely(
        self, delivery: Delivery, line: Held, part: range, *, condemned: str | None = None
    ) -> BatchOutcome:
        """Do what needs no handler, again while others kill the process. Raises HandlerLost when it is too much itself."""
        for _ in range(_SURELY):
            try:
                return await self._once(delivery, line, part=part, condemned=condemned, alone=True)
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
        line: Held,
        *,
        part: range | None = None,
        condemned: str | None = None,
        alone: bool,
    ) -> BatchOutcome:
        shard = delivery.shard_id
        part = delivery.part if part is None else part
        condemned = delivery.condemned if condemned is None else condemned
        answer, deaths, again = None, 0, False
        while answer is None:
            alone = alone or (again and shard in self._worker(shard).suspects)
            worker, process, pass_ = await self._enter(shard, alone=alone)
            try:
                await self._ensure_open(worker, process, shard)
                place_, files, offset = await line.lay(process)

                def message(request: int, place_: wire.Place = place_) -> wire.Process:
                    return wire.Process(
                        request,
                        shard,
                        place_,
                        line.form,
                        delivery.received_ms,
                        wire.sequence_text(delivery.after),
                        None if part is None else (part.start, part.stop),
                        condemned,
                        delivery.redriven,
                    )

                answer = await process.ask(message, shard=shard, files=files, offset=offset)
            except Unopened as gone:  # that tells nothing of the batch
                again = True
                deaths += alone
                self._after_opening(worker, shard, gone, deaths)
            except WorkerGone:
                self._evade(worker)
                raise
            finally:
                worker.gate.leave(pass_)
        outcome = outcome_of(self._expect(answer, wire.Done), answer.files)
        (self._owing.add if outcome.owes else self._owing.discard)(shard)
        return outcome

    async def _ensure_open(self, worker: Worker, process: WorkerProcess, shard_id: str) -> None:
        """Open the shard in this process, unless it is. Raises Unopened, HandlerHalted, and HandlerLost."""
        if worker.opened.get(shard_id) == worker.generation:
            return
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
            answer = await process.ask(
                lambda id_: wire.Open(id_, shard_id, shard.start, shard.start_sub), shard=shard_id
            )
            self._expect(answer, wire.Finished)
            if keys := self._parked.get(shard_id):
                answer = await process.ask(lambda id_: wire.Park(id_, shard_id, _keys(keys)), shard=shard_id)
                self._expect(answer, wire.Finished)
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
        self, shard_id: str, message: Callable[[int], wire.FromServer], *, alone: bool = False
    ) -> Answer:
        """Ask the shard's worker something, once it is open there. Raises WorkerGone."""
        worker, process, pass_ = await self._enter(shard_id, alone=alone)
        try:
            await self._ensure_open(worker, process, shard_id)
            return await process.ask(message, shard=shard_id)
        except WorkerGone:
            self._evade(worker)
            raise
        finally:
            worker.gate.leave(pass_)

    async def _until_done(self, shard_id: str, message: Callable[[int], wire.FromServer]) -> None:
        while True:
            try:
                self._expect(await self._ask(shard_id, message), wire.Finished)
            except WorkerGone:
                continue
            return

    def _expect(self, answer: Answer, kind: type[_T]) -> _T:
        """Return the answer as what it should be. Raises the error that it tells of."""
        if isinstance(answer.message, kind):
            return answer.message
        for file in answer.files:
            os.close(file)
        if isinstance(answer.message, wire.Failed):
            raise wire.error_of(answer.message)
        raise InternalError(f"A worker answered with {type(answer.message).__name__}.")

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


def _keys(keys: Mapping[str, Sequence]) -> dict[str, str]:
    return {key: str(sequence) for key, sequence in keys.items()}
