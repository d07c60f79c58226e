"""One batch through one handler: calls, retries, rows. What to do next is decided by ``failure.BatchPlan``."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog

from mldserver.errors import HandlerHalted
from mldserver.records import Batch
from mldserver.runtime.base import BatchOutcome
from mldserver.runtime.calls import BoundHook
from mldserver.runtime.failure import BatchPlan, Failure, Retry, Step, describe
from mldserver.runtime.outcome import Taken, damaged, dead_letter, join_rows, take
from mldserver.runtime.spec import HandlerSpec, RecordHook
from mldserver.runtime.tables import take_table
from mldserver.runtime.values import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mldserver.clock import Clock
    from mldserver.protocol.batches import BatchDecoder
    from mldserver.records import Record
    from mldserver.runtime.base import DeadLetter, Delivery
    from mldserver.runtime.calls import Caller, Returned, Watch
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


_SMALL_BYTES: Final = 64 * 1024
"""A line that is decoded, and its rows built, in a fraction of a millisecond: not worth a hop to another thread."""


@dataclass(slots=True)
class BatchWork:
    """The state of one batch while the handler works on it.

    A batch of a synchronous hook stays on the worker thread from its line to its rows, unless a call fails; a batch of
    an asynchronous hook stays on the event loop, unless it is large.
    """

    tools: Tools
    hook: BoundHook
    delivery: Delivery
    decoder: BatchDecoder
    taken: Taken = field(init=False)
    plan: BatchPlan = field(init=False)
    rows: Any = None
    parts: list[Built] = field(default_factory=list)
    retries: list[Retry] = field(default_factory=list)
    """Failures that are not told yet: their line waits for the delay of the next call."""

    async def run(self) -> BatchOutcome:
        """Work until every record is decided.

        Raises PeerError for a line that is no batch, HandlerHalted under the policy ``halt``.
        """
        await (self._run_async() if self.hook.is_async else self._run_sync())
        if self.plan.halted is not None:
            raise self._halted(self.plan.halted)
        letters = tuple(self._bury(index) for index in sorted(self.plan.dead))
        return BatchOutcome(self.taken.outline, self.rows, letters, self.plan.attempts)

    async def _run_sync(self) -> None:
        step = await self._on_thread(self._begin)
        while step is not None:
            await self._pause(step)
            step = await self._on_thread(partial(self._advance, step))

    async def _on_thread(self, function: Callable[[Watch], Step | None]) -> Step | None:
        return await self.tools.caller.on_thread(function, self.hook, shard=self.delivery.shard_id)

    def _begin(self, watch: Watch) -> Step | None:
        self._take_line()
        return self._advance(self.plan.step(), watch)

    def _advance(self, step: Step | None, watch: Watch) -> Step | None:
        """Make calls, this one first; return the one that a pause or a line in the log must come before."""
        while step is not None:
            hook, arguments = self._call(step)
            self._settle(step, self.tools.caller.call_sync(hook, arguments, watch))
            step = self.plan.step()
            if step is not None and (step.delayed or self.retries):
                return step
        self._join()
        return None

    async def _run_async(self) -> None:
        await self._near(self._take_line)
        while (step := self.plan.step()) is not None:
            await self._pause(step)
            hook, arguments = self._call(step)
            returned = await self.tools.caller.run(hook, arguments, shard=self.delivery.shard_id)
            await self._near(partial(self._settle, step, returned))
        await self._near(self._join)

    async def _near(self, function: Callable[[], None]) -> None:
        """Run something whose time grows with the batch where it holds up nobody."""
        if len(self.delivery.line) <= _SMALL_BYTES:
            function()
        else:
            await self.tools.thread.run(function)

    def _take_line(self) -> None:
        """Decode the line, and plan one call for all records."""
        self.taken = take(self.delivery, self.decoder)
        self.plan = BatchPlan(len(self.taken.fresh), self.tools.policy)
        if self.tools.spec.record_hook is RecordHook.TABLE and (faults := damaged(self.taken.fresh)):
            self.plan.condemn(faults)

    def _join(self) -> None:
        if self.plan.halted is None:
            self.rows = join_rows(self.parts, self.taken, shard_id=self.delivery.shard_id)

    async def _pause(self, step: Step) -> None:
        """Tell of failures before this call, and wait for its back-off."""
        tools = self.tools
        delay = tools.policy.delay(step.failures, tools.random()) if step.delayed else 0.0
        for retry in self.retries:
            log.warning("handler.failed", **self._where(retry), attempt=retry.attempt, delay_seconds=delay)
        self.retries.clear()
        if step.delayed:
            await tools.clock.sleep(delay)

    def _call(self, step: Step) -> tuple[BoundHook, Sequence[Any]]:
        """Return what a step calls: one call a record, or one for all of them."""
        match self.tools.spec.record_hook:
            case RecordHook.RECORD:
                return self.hook, self._records(step)
            case RecordHook.RECORDS:
                return self.hook, [self._batch(step)]
            case RecordHook.TABLE:
                table_hook = self.hook.function
                hook = BoundHook(
                    self.hook.name, lambda batch: table_hook(batch.to_arrow()), self.hook.is_async
                )
                return hook, [self._batch(step)]

    def _settle(self, step: Step, returned: Returned) -> None:
        """Take what a step's calls came to: rows into ``parts``, failures into the plan."""
        _SETTLE[self.tools.spec.record_hook](self, step, returned)

    def _settle_each(self, step: Step, returned: Returned) -> None:
        done = len(returned.values)
        if returned.failure is not None:
            self._note(self.plan.failed_at(step, done, returned.failure))
            step = Step(step.indices[:done], step.failures)
        self._take(step, partial(self.tools.rows.build, zip(step.indices, returned.values, strict=True)))

    def _settle_batch(self, step: Step, returned: Returned) -> None:
        """``process_records`` returns one item a record, or nothing at all."""
        if returned.failure is not None:
            self._note(self.plan.failed(step, returned.failure))
            return
        items = returned.values[0]
        if items is None or (isinstance(items, list | tuple) and not items):
            return
        if not isinstance(items, list | tuple) or len(items) != len(step.indices):
            self._note(self.plan.failed(step, Failure(_uneven(items, len(step.indices)))))
            return
        self._take(step, partial(self.tools.rows.build, list(zip(step.indices, items, strict=True))))

    def _settle_table(self, step: Step, returned: Returned) -> None:
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
        self._take(step, build)

    def _records(self, step: Step) -> Sequence[Record]:
        fresh = self.taken.fresh
        return fresh if len(step.indices) == len(fresh) else [fresh[index] for index in step.indices]

    def _batch(self, step: Step) -> Batch:
        return Batch(
            self._records(step),
            shard_id=self.delivery.shard_id,
            millis_behind_latest=self.taken.outline.millis_behind_latest,
        )

    def _take(self, step: Step, build: Callable[[], Built]) -> None:
        """Build a step's rows: values may have code of their own, which may fail in any way."""
        try:
            built = build()
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything, here too
            self._note(self.plan.failed(step, describe(error)))
            return
        self.parts.append(built)
        if built.faults:
            faults = {index: Failure(f"BadRow: {text}") for index, text in built.faults.items()}
            self.retries += self.plan.faulty(step, faults)

    def _note(self, retry: Retry | None) -> None:
        if retry is not None:
            self.retries.append(retry)

    def _where(self, retry: Retry) -> dict[str, Any]:
        return {
            "shard": self.delivery.shard_id,
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
            shard=self.delivery.shard_id,
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


_SETTLE = {
    RecordHook.RECORD: BatchWork._settle_each,  # noqa: SLF001  # the table of its own methods
    RecordHook.RECORDS: BatchWork._settle_batch,  # noqa: SLF001  # see above
    RecordHook.TABLE: BatchWork._settle_table,  # noqa: SLF001  # see above
}


def _uneven(items: Any, records: int) -> str:
    if not isinstance(items, list | tuple):
        return f"BadRows: {shown(items)} is not a list with one item a record"
    return f"BadRows: returned {len(items)} items for {records} records; give each record one (None: no row)"
