"""One batch through one handler, in one lane or several: from its payload to its outcome."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import is_not
from typing import Any, Final

import msgspec
import structlog
from msgspec import structs

from mldserver import records
from mldserver.effects import NOTHING, Effects
from mldserver.errors import InternalError, MldserverError
from mldserver.handler.failure import Failure, describe
from mldserver.handler.spec import RecordHook
from mldserver.protocol.batch_decoder import BatchDecoder
from mldserver.records import Batch
from mldserver.runtime.calls import BoundHook, CallWatch, Returned
from mldserver.runtime.failure_policy import Ending
from mldserver.runtime.interface import BatchOutcome, BatchOutline, Delivery, DueTimers
from mldserver.runtime.lane import Lane, Tools
from mldserver.runtime.outcome import (
    FreshBatch,
    dead_letter,
    decode_batch,
    decode_failures,
    due_batch,
    halted,
    join_rows,
)
from mldserver.runtime.plan import BatchPlan, End, Step
from mldserver.runtime.rows import Built
from mldserver.runtime.timer_table import DueTimer

log = structlog.get_logger("mldserver")

_QUICKLY_DECODED: Final = 1024 * 1024
"""Batches of up to so many bytes are decoded on the event loop, in a millisecond: decoding holds the interpreter on
a thread too."""

_FEW_ROWS: Final = 64 * 1024
"""The rows of batches of up to so many bytes are built on the event loop, in a fraction of a millisecond."""


class _Halted(Exception):
    """A lane stopped the shard: the other lanes of the batch are cancelled."""


class BatchWork(msgspec.Struct, eq=False):
    """The state of one batch while the handler works on it.

    A batch of a synchronous hook stays where it is called from its payload to its rows, at once on the event loop or on its
    thread, unless a call fails or it has lanes; a batch of an asynchronous hook stays on the event loop, unless it is large.
    """

    tools: Tools
    hook: BoundHook
    delivery: Delivery
    decoder: BatchDecoder
    parked: Mapping[str, records.Sequence] | None = None
    """The shard's parked keys, each with the sequence of a dead letter: their records are dead letters at once."""
    decoded: FreshBatch = FreshBatch((), BatchOutline(0, 0, None, None, None, None), ())
    """The decoded batch."""
    lanes: Sequence[Lane] = ()
    effects: Effects = NOTHING
    """What the handler has produced so far."""
    done: bool = False
    """Whether the first run of calls finished the batch."""
    turn: asyncio.Lock | None = None
    """Held while a batch uses the store of a keyed handler; None for other handlers."""
    times: Sequence[int] = ()
    """For a keyed handler, the effective time (ms) of each record of ``decoded``."""

    def begin(self) -> BatchOutcome | Coroutine[None, None, BatchOutcome]:
        """Start the work on the event loop; return the outcome, or a coroutine that does the rest after a pause."""
        if self.turn is not None and self.turn.locked():
            return self.run()
        caller, shard_id = self.tools.caller, self.delivery.shard_id
        deadlines, began_ms = caller.deadlines, self.tools.clock.steady_ms()
        watch = deadlines.here = CallWatch(self.hook.name, shard_id, started_ms=began_ms)
        step = None
        try:
            # Each call's own time counts, where another thread looks.
            returned = self._attempt(watch if caller.watched else None)
            if self.done:
                outcome = BatchOutcome(self.decoded.outline, self.effects)
                return outcome if self.turn is None else self._with_state(outcome)
            step = caller.here(partial(self._go_on, returned=returned), self.hook, shard=shard_id)
            if step is None:
                return self._outcome()
        except (Exception, SystemExit) as error:
            if isinstance(error, MldserverError) or self.delivery.condemned is not None:
                raise
            return self.run(error)
        finally:
            deadlines.log_slow_call()
            deadlines.here = None
        return self.run(step=step)

    async def run(self, error: BaseException | None = None, *, step: Step | None = None) -> BatchOutcome:
        """Work until every record has rows or another end. Return the outcome.

        ``step``: the call at which ``begin`` stopped; ``error``: the exception that ended ``begin``.

        An unexpected error, as from the code of a returned value, fails the whole batch. It is processed again until the
        policy's attempts are used up; then all its records end without a call.

        Raises PeerError for a payload that is not a batch, HandlerHalted
        when a failure stops the shard, InternalError instead of leaving a record out.
        """
        if self.turn is None:
            return await self._run(error, step)
        async with self.turn:
            context = self.hook.context
            if context is not None and context.store.batch is not self:
                # It was not begun, or a batch of another shard of the store came after ``begin``.
                error = step = None
            return await self._run(error, step)

    async def _run(self, error: BaseException | None, step: Step | None) -> BatchOutcome:
        failures = 0
        while True:
            try:
                if error is None:
                    await self._work(step)
                    return self._outcome()
            except (Exception, SystemExit) as failed:
                if isinstance(failed, MldserverError) or self.delivery.condemned is not None:
                    raise
                error = failed
            assert error is not None, "what has no error has an outcome"
            failures += 1
            await self._again(describe(error), failures)
            error = step = None

    def _attempt(self, watch: CallWatch | None) -> Returned | None:
        """Decode the batch, call the hook for all records, and build the rows. Set ``done`` if that finishes the batch.

        Returns the result of the call. Returns None if the hook was not called: there are no fresh records, or the
        batch needs a plan first.
        """
        self.done = False
        self._decode_records()
        fresh, tools, delivery = self.decoded.fresh, self.tools, self.delivery
        needs_plan = (
            not self.hook.plainly
            or self.parked
            or delivery.part is not None
            or delivery.condemned is not None
        )
        if needs_plan:
            return None
        if not fresh:
            self.effects, self.done = NOTHING, True
            return None
        if self.hook.unchecked is not None:
            return self._attempt_keyed(self.hook.unchecked, watch)
        if tools.spec.record_hook is RecordHook.RECORD:
            returned = tools.caller.call_sync(self.hook, fresh, watch)
            values: Any = returned.values
        else:
            lag = self.decoded.outline.millis_behind_latest
            batch = Batch(fresh, shard_id=delivery.shard_id, millis_behind_latest=lag)
            returned = tools.caller.call_sync(self.hook, [batch], watch)
            values = returned.values[0] if returned.values else None
        if returned.failure is None and (watch is None or not watch.abandoned):
            self.done = self._take_rows(values)
        return returned

    def _attempt_keyed(self, hook: BoundHook, watch: CallWatch | None) -> Returned | None:
        """Do the calls of ``_attempt`` for a keyed handler; their rows are checked together, after the last call.

        A call whose row is refused must leave the state as it was, and later calls of its key may have seen its changes. So if a
        row is refused, take all changes back and return None: then each call is made once more, and its row is checked at once.
        """
        returned = self.tools.caller.call_sync(hook, zip(self.decoded.fresh, self.times, strict=True), watch)
        if watch is not None and watch.abandoned:
            return returned
        if returned.failure is None:
            self.done = self._take_rows(returned.values)
            is_good = self.done
        else:
            is_good = self._build(returned.values) is not None
        if not is_good:
            assert hook.context is not None, "a keyed hook has a context"
            hook.context.store.begin(hook.context.shard_id, self)
        return returned if is_good else None

    def _build(self, values: Sequence[Any]) -> Built | None:
        """Return the rows of values, one for each of the first records; None if a value is refused, or needs a closer look."""
        try:
            built = self.tools.rows.build(enumerate(values))
        except BaseException:  # noqa: BLE001  # a value's own code: it runs again in the step that logs its failure
            return None
        return None if built.faults else built

    def _take_rows(self, values: Any) -> bool:
        """Make rows of one value for each record. Return False if a value is wrong, or needs a closer look."""
        if values is not None:
            if type(values) is not list or len(values) != len(self.decoded.fresh):
                return False
            # By identity: a value's own idea of equality is the handler's code.
            if any(map(is_not, values, repeat(None))):
                built = self._build(values)
                if built is None:
                    return False
                self.effects = join_rows([built], self.decoded, shard_id=self.delivery.shard_id)
                return True
        self.effects = NOTHING
        return True

    def _decode_records(self) -> None:
        """Decode the batch. Take back what an earlier attempt, or an unfinished batch, has changed of the state."""
        context = self.hook.context
        if context is None:
            self.decoded = decode_batch(self.delivery, self.decoder)
        else:
            context.received_ms = self.delivery.received_ms
            context.store.begin(context.shard_id, self)
            payload = self.delivery.payload
            if isinstance(payload, DueTimers):
                context.began_ms = self.tools.clock.steady_ms()
                self.decoded = due_batch(self.delivery, payload, context.store)
            else:
                self.decoded = decode_batch(self.delivery, self.decoder)
            fresh = self.decoded.fresh
            # Without expiry, no time matters.
            self.times = (
                self.decoded.times_ms().tolist() if fresh and context.store.timed else bytes(len(fresh))
            )

    def _outcome(self) -> BatchOutcome:
        outcome = self._outcome_of_calls()
        return outcome if self.hook.context is None else self._with_state(outcome)

    def _with_state(self, outcome: BatchOutcome) -> BatchOutcome:
        """Return the outcome with the changes of state, which count from now on."""
        context, part, latest_ms = self.hook.context, self.delivery.part, outcome.outline.latest_arrival_ms
        assert context is not None, "only keyed handlers have state"
        if part is not None:
            latest_ms = self.times[part[-1]] if part else None
        if isinstance(self.delivery.payload, DueTimers) and context.store.timers is not None:
            latest_ms = context.store.timers.latest_ms
            outcome = structs.replace(
                outcome, outline=structs.replace(outcome.outline, latest_arrival_ms=latest_ms)
            )
        blobs = context.store.effects(
            latest_ms=latest_ms,
            counts=part is None,
            moves=not self.delivery.redriven,
        )
        if context.store.timers is not None:
            report = context.store.timers.report()
            outcome = structs.replace(outcome, timers=report)
            if report.skipped:
                where = {"shard": self.delivery.shard_id, "handler": self.tools.spec.path}
                log.warning("timer.skipped", **where, timers=report.skipped)
        return (
            structs.replace(outcome, effects=structs.replace(outcome.effects, state=blobs))
            if blobs
            else outcome
        )

    def _outcome_of_calls(self) -> BatchOutcome:
        if self.done:
            return BatchOutcome(self.decoded.outline, self.effects)
        for lane in self.lanes:
            lane.log_failures()
        for lane in self.lanes:
            if lane.plan.halted is not None:
                again = lane.plan.halted
                raise halted(
                    again.failure,
                    self.hook.name,
                    shard=self.delivery.shard_id,
                    handler=self.tools.spec.path,
                    attempts=again.attempt,
                    messages=self.tools.policy.log_error_messages,
                    sequence=str(self.decoded.fresh[again.index].sequence),
                )
        if not all(lane.plan.exhausted for lane in self.lanes):
            # A TaskGroup raises nothing for a cancelled lane, so an unfinished lane is detected here.
            raise InternalError(
                "Records of a batch were not worked on to the end.",
                did="The batch does not count: the position stays before it.",
                shard=self.delivery.shard_id,
            )
        attempts = max([lane.plan.attempts for lane in self.lanes])
        outcome = BatchOutcome(self.decoded.outline, self.effects, attempts=attempts)
        # In shard order: the records that have no rows because of what happened to them.
        ends = [item for lane in self.lanes for item in lane.plan.ends.items()]
        return self._with_ends(outcome, sorted(ends, key=lambda item: item[0])) if ends else outcome

    async def _again(self, failure: Failure, failures: int) -> None:
        """Log a failure of the whole batch and wait for the back-off.

        After the last attempt, condemn the batch instead: it is processed again without calling the handler.
        """
        policy, delay = self.tools.policy, 0.0
        if failures < policy.attempts:
            delay = policy.delay(failures, self.tools.random())
        else:
            self.delivery = structs.replace(self.delivery, condemned=failure.error)
        self.tools.failure_logger(self.delivery.shard_id)(
            "warning",
            "handler.failed",
            failure,
            hook=self.hook.name,
            attempt=failures,
            delay_seconds=delay,
        )
        if delay:
            await self.tools.clock.sleep(delay)

    def _with_ends(self, outcome: BatchOutcome, ends: Sequence[tuple[int, End]]) -> BatchOutcome:
        """Log each record that ended without rows, and return the outcome with the dead letters and counts."""
        log_failure, fresh = self.tools.failure_logger(self.delivery.shard_id), self.decoded.fresh
        for index, end in ends:
            (level, event), record = _EVENTS[end.ending], fresh[index]
            log_failure(
                level,
                event,
                end.failure,
                record.sequence,
                partition_key=record.partition_key,
                attempts=end.attempts,
                **({"timer": record.timer_id} if isinstance(record, DueTimer) else {}),
            )
        endings = [end.ending for _, end in ends]
        spec, now_ms = self.tools.spec, self.tools.clock.now_ms()
        letters = [
            dead_letter(fresh[index], end, handler=spec.path, version=spec.version, at_ms=now_ms)
            for index, end in ends
            if end.ending is Ending.DEAD_LETTER
        ]
        return structs.replace(
            outcome,
            effects=structs.replace(outcome.effects, dead_letters=tuple(letters)),
            skipped=endings.count(Ending.SKIP),
            discarded=endings.count(Ending.DISCARD),
        )

    async def _work(self, step: Step | None) -> None:
        """Make the batch's remaining calls and join their rows.

        ``step``: the next call, if ``begin`` stopped at a back-off; None: start with decoding. A synchronous hook runs on
        threads. An asynchronous hook runs on the event loop.
        """
        if self.hook.is_async:
            await self._near(self._decode, _QUICKLY_DECODED)
            if len(self.lanes) == 1:
                await self.lanes[0].run_async(self._near)
            else:
                await self._run_lanes(partial(Lane.run_async, near=self._near))
            await self._near(self._join)
            return
        on_thread = self.tools.caller.on_thread
        if step is None:
            step = await on_thread(self._begin, self.hook, shard=self.delivery.shard_id)
        if len(self.lanes) > 1:
            await self._run_lanes(Lane.run_sync)
            await self._near(self._join)
        while step is not None:
            await self.lanes[0].pause(step)
            work = partial(self._go_on, step=step)
            step = await on_thread(work, self.hook, shard=self.delivery.shard_id)

    def _begin(self, watch: CallWatch) -> Step | None:
        """Do on a thread what ``begin`` does on the event loop. Return the call that must wait, None if there is none."""
        with self.tools.caller.in_hand(watch):
            returned = self._attempt(watch)
        return None if self.done or watch.abandoned else self._go_on(watch, returned=returned)

    def _go_on(
        self, watch: CallWatch, *, step: Step | None = None, returned: Returned | None = None
    ) -> Step | None:
        """Make the batch's calls from ``step`` on. Return the first call that must wait for a back-off, None at the end.

        Without ``step``, plan the batch first. If the plan has several lanes, make no call and return None: the caller
        runs the lanes. ``returned``: the result of the first call, if ``_attempt`` made it.
        """
        if step is None:
            self._plan()
            if len(self.lanes) > 1:
                return None
            step = self.lanes[0].plan.step()
        step = self.lanes[0].advance(step, watch, returned)
        if step is None:
            self._join(watch)
        return step

    async def _run_lanes(self, run: Callable[[Lane], Awaitable[None]]) -> None:
        """Run all lanes of the batch at the same time. A lane has the records of some partition keys, in shard order.

        If a lane stops the shard, cancel the others and return: ``plan.halted`` of that lane says why. Other errors leave
        as an ExceptionGroup.
        """

        async def run_or_halt(lane: Lane) -> None:
            await run(lane)
            if lane.plan.halted is not None:
                raise _Halted

        try:
            async with asyncio.TaskGroup() as group:
                for lane in self.lanes:
                    group.create_task(run_or_halt(lane))
        except* _Halted:
            pass

    async def _near(self, function: Callable[[CallWatch], None], up_to: int = _FEW_ROWS) -> None:
        """Run a function on the event loop if the payload has at most ``up_to`` bytes, else on a thread."""
        if self.delivery.payload.size <= up_to:
            function(CallWatch())
        else:
            await self.tools.caller.on_thread(function, self.hook, shard=self.delivery.shard_id)

    def _decode(self, _watch: CallWatch) -> None:
        self._decode_records()
        self._plan()

    def _plan(self) -> None:
        """Plan one call for all records, or one call for each lane."""
        tools, delivery, fresh = self.tools, self.delivery, self.decoded.fresh
        of_lane: dict[int, Sequence[int]] = {0: range(len(fresh)) if delivery.part is None else delivery.part}
        if delivery.part is None and tools.lanes > 1 and len(fresh) > 1:
            keyed: dict[int, list[int]] = {}
            for index, record in enumerate(fresh):
                keyed.setdefault(lane_of(record.partition_key, tools.lanes), []).append(index)
            of_lane = dict(sorted(keyed.items()))
        arrivals_ms = self.decoded.arrivals_ms[len(self.decoded.arrivals_ms) - len(fresh) :]
        self.effects = NOTHING
        is_due = isinstance(delivery.payload, DueTimers)
        due = [each for each in fresh if isinstance(each, DueTimer)] if is_due else []
        fires = bool(due) and not due[0].is_letter
        calls = {index: each.timer.attempt for index, each in enumerate(due) if each.timer.attempt}
        self.lanes = [
            Lane(
                tools,
                self.hook,
                self.decoded,
                BatchPlan(indices, tools.policy, fresh, arrivals_ms, fires=fires, calls=calls),
                delivery.shard_id,
                tools.threads[place % len(tools.threads)],
                self.times,
            )
            for place, indices in of_lane.items()
        ]
        now_ms = tools.clock.now_ms()
        if tools.spec.record_hook is RecordHook.TABLE and (faults := decode_failures(fresh)):
            self.lanes[0].plan.condemn(faults, now_ms)
        for lane in self.lanes:
            if self.parked:
                lane.plan.park(self.parked)
            if delivery.condemned is not None:
                lane.plan.condemn(dict.fromkeys(lane.plan.indices, Failure(delivery.condemned)), now_ms)
        if delivery.condemned is not None and self.hook.context is not None:
            for each in due:
                self.hook.context.take(each, self.hook.context.began_ms)

    def _join(self, _watch: CallWatch) -> None:
        """Join the rows of all lanes into ``effects``, unless a lane stopped the shard."""
        if all(lane.plan.halted is None for lane in self.lanes):
            parts = [part for lane in self.lanes for part in lane.parts]
            self.effects = join_rows(parts, self.decoded, shard_id=self.delivery.shard_id)


_EVENTS: Final = {
    Ending.DEAD_LETTER: ("error", "handler.dead_letter"),
    Ending.SKIP: ("warning", "handler.skipped"),
    Ending.DISCARD: ("debug", "handler.discarded"),
    Ending.AGAIN: ("warning", "timer.set_again"),
}


def lane_of(key: str | None, lanes: int) -> int:
    """Return a partition key's lane: the same in every process. Records without a key share the first."""
    return 0 if key is None else zlib.crc32(key.encode("utf-8", "surrogatepass")) % lanes
