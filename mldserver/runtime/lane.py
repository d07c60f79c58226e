"""Some records of one batch through one handler, one call after the other. What comes next ``plan.BatchPlan`` decides.

A lane holds up nothing but itself: another lane of the batch goes on while this one waits for a back-off.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog

from mldserver.records import Batch
from mldserver.runtime.calls import BoundHook
from mldserver.runtime.control import BatchResult
from mldserver.runtime.failure import Failure, describe
from mldserver.runtime.plan import Again, BatchPlan, Step
from mldserver.runtime.results import failed_records, named_places
from mldserver.runtime.spec import HandlerSpec, RecordHook
from mldserver.runtime.tables import take_table
from mldserver.runtime.values import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mldserver.clock import Clock
    from mldserver.records import Record
    from mldserver.runtime.calls import Caller, Returned
    from mldserver.runtime.deadlines import Watch
    from mldserver.runtime.failure import FailurePolicy
    from mldserver.runtime.outcome import Taken
    from mldserver.runtime.rows import Built, RowBuilder
    from mldserver.runtime.thread import WorkerThread

__all__ = ["Lane", "Tools"]

log = structlog.get_logger("mldserver")

_BAD_ROW: Final = ("BadRow",)
_BAD_ROWS: Final = ("BadRows",)


@dataclass(frozen=True, slots=True)
class Tools:
    """What all batches of a pipeline share."""

    spec: HandlerSpec
    caller: Caller
    threads: Sequence[WorkerThread]
    """One for each lane of a synchronous record hook; the first is also for whatever else may block."""
    clock: Clock
    policy: FailurePolicy
    random: Callable[[], float]
    rows: RowBuilder
    lanes: int = 1
    """How many records of a batch, of different partition keys, are worked on at the same time."""


@dataclass(slots=True)
class Lane:
    """The state of a lane while the handler works on it."""

    tools: Tools
    hook: BoundHook
    taken: Taken
    plan: BatchPlan
    shard_id: str
    thread: WorkerThread
    parts: list[Built] = field(default_factory=list)
    again: list[Again] = field(default_factory=list)
    """Failures that are not told yet: their line waits for the delay of the next call."""

    async def run_sync(self) -> None:
        """Work on the lane's thread until every record is decided, or the shard stops."""
        step = self.plan.step()
        while step is not None:
            await self.pause(step)
            step = await self.on_thread(partial(self.advance, step))

    async def run_async(self, near: Callable[[Callable[[], None]], Any]) -> None:
        """Work on the event loop until every record is decided, or the shard stops.

        ``near`` runs something whose time grows with the batch where it holds up nobody.
        """
        while (step := self.plan.step()) is not None:
            await self.pause(step)
            hook, arguments = self._call(step)
            returned = await self.tools.caller.run(hook, arguments, shard=self.shard_id)
            await near(partial(self._settle, step, returned))

    async def on_thread(self, function: Callable[[Watch], Step | None]) -> Step | None:
        """Return what ``function`` returns, run on the lane's thread."""
        return await self.tools.caller.on_thread(function, self.hook, shard=self.shard_id, thread=self.thread)

    def advance(self, step: Step | None, watch: Watch) -> Step | None:
        """Make calls, this one first; return the one that a pause or a line in the log must come before."""
        while step is not None:
            hook, arguments = self._call(step)
            self._settle(step, self.tools.caller.call_sync(hook, arguments, watch))
            step = self.plan.step()
            if step is not None and (step.failures or self.again):
                return step
        return None

    async def pause(self, step: Step) -> None:
        """Tell of failures before this call, and wait for its back-off."""
        tools, delay = self.tools, 0.0
        if step.failures:
            after = step.after_seconds
            delay = tools.policy.delay(step.failures, tools.random()) if after is None else after
        for again in self.again:
            log.warning("handler.failed", **self.where(again), attempt=again.attempt, delay_seconds=delay)
        self.again.clear()
        if step.failures:
            await tools.clock.sleep(delay)

    def where(self, again: Again) -> dict[str, Any]:
        """Return a failure as fields of the log."""
        return {
            "shard": self.shard_id,
            "handler": self.tools.spec.path,
            "hook": self.hook.name,
            "sequence": str(self.taken.sequence(again.index)),
            "what": again.failure.error,
            "traceback": again.failure.traceback,
        }

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
        if self.tools.spec.record_hook is RecordHook.RECORD:
            self._settle_each(step, returned)
        elif returned.failure is not None:
            self._failed(step, returned.failure)
        else:
            self._settle_batch(step, returned.values[0])

    def _settle_each(self, step: Step, returned: Returned) -> None:
        done = len(returned.values)
        if returned.failure is not None:
            self._note(self.plan.failed_at(step, done, returned.failure, self._now()))
            step = Step(step.indices[:done])
        self._take(step, partial(self.tools.rows.build, zip(step.indices, returned.values, strict=True)))

    def _settle_batch(self, step: Step, value: Any) -> None:
        """Take what a hook returned for a whole call, with or without names of records that failed."""
        failed: dict[int, Failure] = {}
        if isinstance(value, BatchResult):
            try:
                failed = failed_records(value, self._records(step))
            except Exception as error:  # noqa: BLE001  # the user's own collection may raise anything
                self._failed(step, Failure(f"BadRows: {error}", names=_BAD_ROWS))
                return
            value = value.rows
        if self.tools.spec.record_hook is RecordHook.TABLE:
            self._take_table(step, value, failed)
        else:
            self._take_items(step, value, failed)

    def _take_items(self, step: Step, items: Any, failed: dict[int, Failure]) -> None:
        """``process_records`` returns one item a record, or nothing at all."""
        is_items = isinstance(items, list | tuple)
        if items is None or (is_items and not items):
            items = ()  # no rows at all
        elif not is_items or len(items) != len(step.indices):
            self._failed(step, Failure(_uneven(items, len(step.indices)), names=_BAD_ROWS))
            return
        pairs = zip(step.indices, items, strict=bool(items))
        kept = [pair for place, pair in enumerate(pairs) if place not in failed] if failed else list(pairs)
        self._take(step, partial(self.tools.rows.build, kept), failed)

    def _take_table(self, step: Step, table: Any, failed: dict[int, Failure]) -> None:
        spec = self.tools.spec
        build = partial(
            take_table,
            table,
            schema=spec.schema,
            time_column=spec.time_column,
            indices=step.indices,
            without=frozenset(failed),
        )
        self._take(step, build, failed)

    def _take(self, step: Step, build: Callable[[], Built], failed: dict[int, Failure] | None = None) -> None:
        """Build a step's rows: values may have code of their own, which may fail in any way.

        ``failed``: the records that the handler named, by their place in the call; they have no rows.
        """
        try:
            built = build()
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything, here too
            self._note(self.plan.failed(step, describe(error), self._now()))
            return
        self.parts.append(built)
        if built.faults or failed:
            faults = {
                index: Failure(f"BadRow: {text}", names=_BAD_ROW) for index, text in built.faults.items()
            }
            faults |= {step.indices[place]: failure for place, failure in (failed or {}).items()}
            self.again += self.plan.faulty(step, faults, self._now())

    def _failed(self, step: Step, failure: Failure) -> None:
        """A call of a whole batch failed, perhaps because of records that the handler named."""
        if not failure.records:
            self._note(self.plan.failed(step, failure, self._now()))
            return
        try:
            places = named_places(failure.records, self._records(step))
        except ValueError as error:
            failure = replace(failure, error=f"{failure.error} ({error})")
            self._note(self.plan.failed(step, failure, self._now()))
            return
        named = [step.indices[place] for place in places]
        self.again += self.plan.named(step, named, failure, self._now())

    def _records(self, step: Step) -> Sequence[Record]:
        fresh = self.taken.fresh
        return fresh if len(step.indices) == len(fresh) else [fresh[index] for index in step.indices]

    def _batch(self, step: Step) -> Batch:
        return Batch(
            self._records(step),
            shard_id=self.shard_id,
            millis_behind_latest=self.taken.outline.millis_behind_latest,
        )

    def _note(self, again: Again | None) -> None:
        if again is not None:
            self.again.append(again)

    def _now(self) -> int:
        return self.tools.clock.now_ms()


def _uneven(items: Any, records: int) -> str:
    if not isinstance(items, list | tuple):
        return f"BadRows: {shown(items)} is not a list with one item a record"
    return f"BadRows: returned {len(items)} items for {records} records; give each record one (None: no row)"
