"""Some records of one batch through one handler, one call after the other. What comes next ``plan.BatchPlan`` decides.

A lane holds up nothing but itself: another lane of the batch goes on while this one waits for a back-off.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import structlog
from msgspec import structs

from mldserver.base.clock import Clock
from mldserver.base.folding import Folding
from mldserver.base.threads import WorkerThread
from mldserver.handler.failure import Failure, bad_row, describe, printed
from mldserver.handler.spec import HandlerSpec, RecordHook
from mldserver.records import Batch, BatchResult, Record
from mldserver.runtime.calls import BoundHook, Caller, CallWatch, Returned
from mldserver.runtime.failure_policy import Ending, FailurePolicy
from mldserver.runtime.outcome import FreshBatch
from mldserver.runtime.plan import Again, BatchPlan, Step
from mldserver.runtime.rows import Built, RowBuilder, failed_records, named_places
from mldserver.runtime.tables import TableMismatch, take_table
from mldserver.runtime.timer_table import DueTimer
from mldserver.runtime.values import shown
from mldserver.windows import counted, milliseconds

log = structlog.get_logger("mldserver")


@dataclass(frozen=True, slots=True)
class Tools:
    """What all batches of a pipeline share."""

    spec: HandlerSpec
    caller: Caller
    threads: Sequence[WorkerThread]
    """One for each lane of a synchronous record hook; the first also runs other blocking work."""
    clock: Clock
    policy: FailurePolicy
    random: Callable[[], float]
    rows: RowBuilder
    folding: Folding
    late_rows: RowBuilder | None = None
    """For keyed handlers: finds faults only after the last call of a batch. ``rows`` finds them with each call, which takes
    longer than the call."""
    lanes: int = 1
    """How many records of a batch, of different partition keys, are worked on at the same time."""

    def failure_logger(self, shard: str) -> Callable[..., None]:
        """Return a function that logs failures of a shard's handler.

        It gets level, event, failure and further fields. A failure that was logged within the last minute is logged
        at debug, and counted.
        """
        # Bind once: binding costs more than a suppressed line.
        bound = log.bind(shard=shard, handler=self.spec.path)
        messages = self.policy.log_error_messages

        def tell(level: str, event: str, failure: Failure, sequence: object = None, **fields: Any) -> None:
            times = 0 if level == "debug" else self.folding.count((event, level, shard, failure.fingerprint))
            if not times and not bound.is_enabled_for(logging.DEBUG):
                return
            where = {} if sequence is None else {"sequence": str(sequence)}
            if not times:
                bound.debug(event, **where, **fields, what=failure.logged(messages=messages)["what"])
            else:
                counted = {"times": times} if times > 1 else {}
                getattr(bound, level)(
                    event, **where, **fields, **failure.logged(messages=messages), **counted
                )

        return tell


@dataclass(slots=True)
class _Came:
    """The result of a step's calls, before the plan receives it."""

    built: Built | None = None
    faults: Mapping[int, Failure] = field(default_factory=dict)
    """The records that have no rows in ``built`` because of a fault, by index."""
    failure: Failure | None = None
    """Why the step failed: for all its records, or for those in ``named``."""
    named: Sequence[int] | None = None
    """The records that the handler says have failed, by index."""


@dataclass(slots=True)
class Lane:
    """The state of a lane while the handler works on it."""

    tools: Tools
    hook: BoundHook
    decoded: FreshBatch
    plan: BatchPlan
    shard_id: str
    thread: WorkerThread
    times: Sequence[int] = ()
    """The effective time (ms) of each record; empty if the hook takes no context."""
    parts: list[Built] = field(default_factory=list)
    again: list[Again] = field(default_factory=list)
    """Failures that are not logged yet: their line waits for the delay of the next call."""
    returned: list[tuple[Sequence[int], list[Any]]] = field(default_factory=list)
    """The values of calls for single records, by index. Rows are built of all of them at once, after the last call."""

    async def run_sync(self) -> None:
        """Work on the lane's thread until every record is decided, or the shard stops."""
        step = self.plan.step()
        while step is not None:
            await self.pause(step)
            work = partial(self.advance, step)
            step = await self.tools.caller.on_thread(work, self.hook, shard=self.shard_id, thread=self.thread)

    async def run_async(self, near: Callable[[Callable[[CallWatch], None]], Any]) -> None:
        """Work on the event loop until every record is decided, or the shard stops.

        ``near`` runs work whose time grows with the batch: large batches off the event loop.
        """
        while (step := self.plan.step()) is not None:
            await self.pause(step)
            hook, arguments = self._call(step)
            returned = await self.tools.caller.run(hook, arguments, shard=self.shard_id)
            await near(partial(self._apply_async_result, step, returned))

    def advance(self, step: Step | None, watch: CallWatch, returned: Returned | None = None) -> Step | None:
        """Make the plan's calls from ``step`` on; return the first one that must wait for a back-off.

        ``returned``: the result of the first call, if it was made already.
        """
        caller = self.tools.caller
        with caller.in_hand(watch):
            while step is not None:
                if returned is None:
                    hook, arguments = self._call(step)
                    returned = caller.call_sync(hook, arguments, watch)
                if watch.abandoned:
                    return None  # the caller has abandoned the result
                self._apply_result(step, returned)
                step, returned = self.plan.step(), None
                if step is not None and step.failures:
                    return step
        return None

    async def pause(self, step: Step) -> None:
        """Log the failures before this call, and wait for its back-off."""
        tools, delay = self.tools, 0.0
        if step.failures:
            after = step.after_seconds
            delay = tools.policy.delay(step.failures, tools.random()) if after is None else after
            self.log_failures(delay)
            await tools.clock.sleep(delay)

    def log_failures(self, delay: float = 0.0) -> None:
        """Log the failures that are not logged yet; ``delay``: seconds until the next call."""
        if not self.again:
            return
        tell = self.tools.failure_logger(self.shard_id)
        for again in self.again:
            tell(
                "warning",
                "handler.failed",
                again.failure,
                self.decoded.fresh[again.index].sequence,
                hook=self.hook.name,
                attempt=again.attempt,
                delay_seconds=delay,
            )
        self.again.clear()

    def _call(self, step: Step) -> tuple[BoundHook, Iterable[Any]]:
        """Return a step's hook and arguments: one argument a record, or one for all records."""
        hook, function = self.hook, self.hook.function
        if self.tools.spec.record_hook is RecordHook.RECORD:
            # No list: when each record fails, there are as many steps as records.
            records = map(self.decoded.fresh.__getitem__, step.indices)
            if self.times:
                return hook, zip(records, map(self.times.__getitem__, step.indices), strict=True)
            return hook, records
        if self.tools.spec.record_hook is RecordHook.TABLE:
            hook = BoundHook(hook.name, lambda batch: function(batch.to_arrow()), hook.is_async)
        lag = self.decoded.outline.millis_behind_latest
        return hook, [Batch(self._records(step), shard_id=self.shard_id, millis_behind_latest=lag)]

    def _apply_async_result(self, step: Step, returned: Returned, watch: CallWatch) -> None:
        """Do as ``_apply_result`` does, outside a call: mark that the handler's code may run."""
        with self.tools.caller.in_hand(watch):
            watch.started_ms = self.tools.clock.steady_ms()
            self._apply_result(step, returned)

    def _apply_result(self, step: Step, returned: Returned) -> None:
        """Apply the result of a step's calls: add rows to ``parts``, and report failures to the plan."""
        if self.tools.spec.record_hook is not RecordHook.RECORD:
            self._report_to_plan(step, partial(self._judge, step, returned))
        else:
            # Each record had a separate call, up to the first that failed.
            done, failure = len(returned.values), returned.failure
            if done:
                self.returned.append((step.indices[:done], returned.values))
            if failure is not None:
                again = self.plan.failed_at(step, done, failure, self.tools.clock.now_ms())
                self.again += [] if again is None else [again]
                self._set_again([step.indices[done]])
        if self.returned and (not self.plan.todo or step.halved):
            # Rows of single calls are built once: a table for what stands between two failures would cost far more.
            made, self.returned = self.returned, []
            indices = made[0][0] if len(made) == 1 else [index for each, _ in made for index in each]
            pairs = itertools.chain.from_iterable([zip(each, values, strict=True) for each, values in made])
            self._report_to_plan(
                Step(indices, halved=step.halved), lambda: _came(self.tools.rows.build(pairs))
            )

    def _report_to_plan(self, step: Step, judge: Callable[[], _Came]) -> None:
        """Keep the rows of a step's calls, and report its failed records to the plan, which decides what is called again.

        ``judge`` returns the result. It reads the handler's values, which may run user code and fail in any way; it ends before the
        plan changes. The whole step failed, or the records that the handler named, or single records whose rows are bad (``faults``).
        """
        try:
            came = judge()
        except BaseException as error:  # noqa: BLE001  # it is the failure of the step
            whole_call = isinstance(error, TableMismatch) and error.whole_call
            came = _Came(failure=structs.replace(describe(error), whole_call=whole_call))
        self._refuse_ahead(came)
        if came.built is not None:
            self.parts.append(came.built)
        now_ms = self.tools.clock.now_ms()
        if came.failure is not None and came.named is not None:
            self.again += self.plan.named(step, came.named, came.failure, now_ms)
        elif came.failure is not None:
            again = self.plan.failed(step, came.failure, now_ms)
            self.again += [] if again is None else [again]
        if came.faults:
            self.again += self.plan.faulty(step, came.faults, now_ms)
            self._set_again(came.faults)

    def _set_again(self, indices: Iterable[int]) -> None:
        """Set timers again whose calls have failed, before the next call: that may cancel or replace them."""
        tools, context = self.tools, self.hook.context
        table = context.store.timers if context is not None and self.plan.fires else None
        for index in indices if table is not None else ():
            due, end = self.decoded.fresh[index], self.plan.ends[index]
            if end.ending is Ending.AGAIN and isinstance(due, DueTimer) and table is not None:
                after = end.failure.after_seconds
                seconds = tools.policy.delay(end.attempts, tools.random()) if after is None else after
                table.set_again(due, math.ceil(1000 * seconds))

    def _refuse_ahead(self, came: _Came) -> None:
        """Refuse rows that lie too far ahead of their records' arrival, where the policy has a limit."""
        most_ms, column = self.tools.policy.max_ahead_ms, self.tools.spec.time_column
        built = came.built
        if most_ms is None or column is None or built is None or built.table is None:
            return
        ahead_ms = milliseconds(built.table.column(column)) - self.decoded.times_ms()[built.records]
        faults = {
            built.records[row]: bad_row(
                f"column {column}: it lies {timedelta(milliseconds=int(ahead_ms[row]))} after the record's arrival"
            )
            for row in np.flatnonzero(ahead_ms > most_ms).tolist()
        }
        if faults:
            kept = [row for row, record in enumerate(built.records) if record not in faults]
            table = built.table.take(pa.array(kept, pa.int64())) if kept else None
            came.built = Built(table, [built.records[row] for row in kept], built.faults)
            came.faults = {**came.faults, **faults}

    def _judge(self, step: Step, returned: Returned) -> _Came:
        """Return the result of a call for a whole batch, which may have failed, or may name failed records."""
        failure = returned.failure
        if failure is None:
            return self._judge_batch(step, returned.values[0])
        if not failure.records:
            return _Came(failure=failure)
        try:
            places = named_places(failure.records, self._records(step))
        except Exception as error:  # noqa: BLE001  # what was named may have code of its own
            return _Came(failure=structs.replace(failure, error=f"{failure.error} ({printed(error)})"))
        return _Came(failure=failure, named=[step.indices[place] for place in places])

    def _judge_batch(self, step: Step, value: Any) -> _Came:
        """Return the result of a successful call for a whole batch, which may name failed records."""
        failed: dict[int, Failure] = {}
        if isinstance(value, BatchResult):
            try:
                failed = failed_records(value, self._records(step))
            except Exception as error:  # noqa: BLE001  # the user's own collection may raise anything
                return _Came(failure=_bad_rows(printed(error)))
            value = value.rows
        spec, indices = self.tools.spec, step.indices
        if spec.record_hook is RecordHook.TABLE:
            without, column = frozenset(failed), spec.time_column
            built = take_table(
                value, schema=spec.schema, time_column=column, indices=indices, without=without
            )
            return _came(built, step, failed)
        if value is None:
            return _came(Built(), step, failed)
        if not isinstance(value, list | tuple):
            no_list = f"{shown(value)} is not a list with one item a record"
            return _Came(failure=_bad_rows(no_list, whole_call=True))
        if len(value) != len(indices):
            returned, given = counted(len(value), "item"), counted(len(indices), "record")
            uneven = f"{spec.record_hook} returned {returned} for {given}; {_ONE_EACH}"
            return _Came(failure=structs.replace(_bad_rows(uneven, whole_call=True), quotes_nothing=True))
        pairs = zip(indices, value, strict=True)
        kept = [pair for place, pair in enumerate(pairs) if place not in failed] if failed else list(pairs)
        return _came(self.tools.rows.build(kept), step, failed)

    def _records(self, step: Step) -> Sequence[Record]:
        fresh, indices = self.decoded.fresh, step.indices
        if len(indices) == len(fresh):
            return fresh
        if isinstance(indices, range):
            return fresh[indices.start : indices.stop]
        return [fresh[index] for index in indices]


def _came(built: Built, step: Step | None = None, failed: Mapping[int, Failure] | None = None) -> _Came:
    """Return a result with rows; ``failed``: the records that the handler named, by their place in the step."""
    faults = {index: bad_row(text) for index, text in built.faults.items()}
    if step is not None and failed:
        faults |= {step.indices[place]: failure for place, failure in failed.items()}
    return _Came(built, faults)


def _bad_rows(text: str, *, whole_call: bool = False) -> Failure:
    return Failure(f"BadRows: {text}", names=("BadRows",), whole_call=whole_call)


_ONE_EACH: Final = (
    "return one item for each record, None for no row: [row(r) if wanted(r) else None for r in batch]"
)
