"""One batch through one handler: calls, retries, rows. What to do next is decided by ``failure.BatchPlan``."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from mldserver.errors import HandlerHalted
from mldserver.records import Batch
from mldserver.runtime.base import BatchOutcome
from mldserver.runtime.calls import BoundHook
from mldserver.runtime.failure import BatchPlan, Failure, Retry, Step
from mldserver.runtime.outcome import Taken, damaged, dead_letter, join_rows
from mldserver.runtime.spec import HandlerSpec, RecordHook
from mldserver.runtime.tables import take_table
from mldserver.runtime.values import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from mldserver.clock import Clock
    from mldserver.runtime.base import DeadLetter
    from mldserver.runtime.calls import Caller, Returned
    from mldserver.runtime.failure import FailurePolicy
    from mldserver.runtime.rows import Built, RowBuilder
    from mldserver.runtime.thread import WorkerThread

__all__ = ["BatchWork", "Tools"]

log = structlog.get_logger("mldserver")


@dataclass(frozen=True, slots=True)
class Tools:
    """What all batches of a pipeline share."""

    spec: HandlerSpec
    caller: Caller
    thread: WorkerThread
    clock: Clock
    policy: FailurePolicy
    random: Callable[[], float]
    rows: RowBuilder


@dataclass(slots=True)
class BatchWork:
    """The state of one batch while the handler works on it."""

    tools: Tools
    hook: BoundHook
    taken: Taken
    shard_id: str
    plan: BatchPlan = field(init=False)
    parts: list[Built] = field(default_factory=list)
    retries: list[Retry] = field(default_factory=list)
    """Failures that are not told yet: their line waits for the delay of the next call."""

    def __post_init__(self) -> None:
        """Plan one call for all records."""
        self.plan = BatchPlan(len(self.taken.fresh), self.tools.policy)

    async def run(self) -> BatchOutcome:
        """Work until every record is decided. Raises HandlerHalted under the policy ``halt``."""
        tools, taken = self.tools, self.taken
        if tools.spec.record_hook is RecordHook.TABLE:
            faults = await tools.thread.run(partial(damaged, taken.fresh))
            if faults:
                self.plan.condemn(faults)
        while (step := self.plan.step()) is not None:
            await self._pause(step)
            await _CALLS[tools.spec.record_hook](self, step)
        if self.plan.halted is not None:
            raise self._halted(self.plan.halted)
        letters = tuple(self._bury(index) for index in sorted(self.plan.dead))
        rows = await tools.thread.run(partial(join_rows, self.parts, taken, shard_id=self.shard_id))
        return BatchOutcome(taken.outline, rows, letters, self.plan.attempts)

    async def _pause(self, step: Step) -> None:
        """Tell of failures before this call, and wait for its back-off."""
        tools = self.tools
        delay = tools.policy.delay(step.failures, tools.random()) if step.delayed else 0.0
        for retry in self.retries:
            log.warning("handler.failed", **self._where(retry), attempt=retry.attempt, delay_seconds=delay)
        self.retries.clear()
        if step.delayed:
            await tools.clock.sleep(delay)

    async def _call_each(self, step: Step) -> None:
        """``process_record``: one call a record, up to the first that fails."""
        records = [self.taken.fresh[index] for index in step.indices]
        returned = await self.tools.caller.run(self.hook, records, shard=self.shard_id)
        done = len(returned.values)
        built = await self._build(
            partial(self.tools.rows.build, zip(step.indices, returned.values, strict=False))
        )
        if returned.failure is not None:
            self._note(self.plan.failed_at(step, done, returned.failure))
        self._take(Step(step.indices[:done], step.failures), built)

    async def _call_batch(self, step: Step) -> None:
        """``process_records``: one call for all; it returns one item a record, or nothing at all."""
        returned = await self.tools.caller.run(self.hook, [self._batch(step)], shard=self.shard_id)
        if returned.failure is not None:
            self._note(self.plan.failed(step, returned.failure))
            return
        items = returned.values[0]
        if items is None or (isinstance(items, list | tuple) and not items):
            return
        if not isinstance(items, list | tuple) or len(items) != len(step.indices):
            self._note(self.plan.failed(step, Failure(_uneven(items, len(step.indices)))))
            return
        pairs = list(zip(step.indices, items, strict=True))
        self._take(step, await self._build(partial(self.tools.rows.build, pairs)))

    async def _call_table(self, step: Step) -> None:
        """``process_table``: one call for all, Arrow in and Arrow out."""
        hook = BoundHook(
            self.hook.name, lambda batch: self.hook.function(batch.to_arrow()), self.hook.is_async
        )
        returned = await self.tools.caller.run(hook, [self._batch(step)], shard=self.shard_id)
        if returned.failure is not None:
            self._note(self.plan.failed(step, returned.failure))
            return
        spec = self.tools.spec
        build = partial(
            take_table,
            returned.values[0],
            schema=spec.schema,
            time_column=spec.time_column,
            indices=step.indices,
        )
        self._take(step, await self._build(build))

    def _batch(self, step: Step) -> Batch:
        return Batch(
            [self.taken.fresh[index] for index in step.indices],
            shard_id=self.shard_id,
            millis_behind_latest=self.taken.outline.millis_behind_latest,
        )

    async def _build(self, build: Callable[[], Built]) -> Returned:
        """Build rows where user code runs: values may have code of their own, which may fail in any way."""
        hook = BoundHook(self.hook.name, lambda _: build(), is_async=False)
        return await self.tools.caller.run(hook, [None], shard=self.shard_id)

    def _take(self, step: Step, returned: Returned) -> None:
        if returned.failure is not None:
            self._note(self.plan.failed(step, returned.failure))
            return
        built: Built = returned.values[0]
        self.parts.append(built)
        if built.faults:
            faults = {index: Failure(f"BadRow: {text}") for index, text in built.faults.items()}
            self.retries += self.plan.faulty(step, faults)

    def _note(self, retry: Retry | None) -> None:
        if retry is not None:
            self.retries.append(retry)

    def _where(self, retry: Retry) -> dict[str, Any]:
        return {
            "shard": self.shard_id,
            "handler": self.tools.spec.path,
            "hook": self.hook.name,
            "sequence": str(self.taken.fresh[retry.index].sequence),
            "what": retry.failure.error,
            "traceback": retry.failure.traceback,
        }

    def _bury(self, index: int) -> DeadLetter:
        record, dead, path = self.taken.fresh[index], self.plan.dead[index], self.tools.spec.path
        letter = dead_letter(record, dead, handler=path, at_ms=self.tools.clock.now_ms())
        log.error(
            "handler.dead_letter",
            shard=self.shard_id,
            handler=path,
            sequence=str(letter.sequence),
            partition_key=letter.partition_key,
            attempts=letter.attempts,
            what=letter.error,
            traceback=letter.traceback,
        )
        return letter

    def _halted(self, retry: Retry) -> HandlerHalted:
        where = self._where(retry)
        log.critical("handler.halted", **where, attempts=retry.attempt)
        what = where.pop("what")
        return HandlerHalted(
            f"{self.hook.name} failed for good: {what}.",
            did="The shard is stopped; nothing after this record was accepted.",
            advice="Mend the handler and start again, or let such records become dead letters.",
            **where,
            attempts=retry.attempt,
        )


_CALLS = {
    RecordHook.RECORD: BatchWork._call_each,  # noqa: SLF001  # the table of its own methods
    RecordHook.RECORDS: BatchWork._call_batch,  # noqa: SLF001  # see above
    RecordHook.TABLE: BatchWork._call_table,  # noqa: SLF001  # see above
}


def _uneven(items: Any, records: int) -> str:
    if not isinstance(items, list | tuple):
        return f"BadRows: {shown(items)} is not a list with one item a record"
    return f"BadRows: returned {len(items)} items for {records} records; give each record one (None: no row)"
