"""Bugs to be planted: classes of the server, and what stands in for them. Each must be found by some world."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from mldserver.coordinator.backpressure import Backpressure
from mldserver.coordinator.coordinator import Coordinator
from mldserver.coordinator.core.flush import FlushPlan
from mldserver.coordinator.core.lineage import Lineage
from mldserver.coordinator.core.open_windows import CoordinatorRules, CutWindows, OpenWindows, WindowKey
from mldserver.coordinator.core.sessions import Session, SessionPosition
from mldserver.coordinator.core.watermark import View, Watermark
from mldserver.coordinator.flusher import Flusher
from mldserver.coordinator.progress import Reports
from mldserver.coordinator.shards import CoordinatorIntake, IntakeSession
from mldserver.jobs.previous import PreviousResults
from mldserver.ledger.book import Book
from mldserver.ledger.contract import Commit, SegmentKind, WindowEntry, batch_id, batch_number
from mldserver.ledger.operations import Transaction
from mldserver.ledger.sqlite import SqliteLedger, SqliteStore
from mldserver.output.publish import Publisher
from mldserver.records import RecordMethods, Sequence
from mldserver.runtime.keyed_state import CallContext, KeyedState
from mldserver.runtime.timer_table import DueTimer, TimerTable
from mldserver.windows import time_window_id


class AwaitsBeforeItForgets(Coordinator):
    """Sees that all that is buffered is durable, awaits, and only then empties the buffer."""

    async def _flush(self, *args: Any) -> bool:
        complete = await super()._flush(*args)
        await self.clock.sleep(0.01)
        if complete:
            self.buffer.remove(self.buffer.snapshot())
        return complete


class Stumbles(Coordinator):
    """Fails by an error that no server may end by, once rows are registered."""

    async def _flush(self, *args: Any) -> bool:
        if self.ledger_view.state.windows:
            raise KeyError("stumbles")
        return await super()._flush(*args)


class ChecksPointsTooEarly(SessionPosition):
    """Checkpoints what was accepted, before it is durable."""

    def due(self) -> Sequence | None:
        return self.accepted if super().due() is not None else None


class Unfenced(SqliteStore):
    """Moves positions whoever owns the shard, and wherever it stands."""

    def transact(self, transaction: Transaction[Any], read: Callable[[Book], Any]) -> Any:
        if transaction.rule.__name__ == "register":
            flush, *others = transaction.args
            known = self.read(lambda book: book.shards.copy())
            positions = tuple(
                replace(each, epoch=known[each.shard_id].epoch, previous=known[each.shard_id].position)
                for each in flush.positions
            )
            transaction = replace(transaction, args=(replace(flush, positions=positions), *others))
        return super().transact(transaction, read)


class ListsOnce(SqliteStore):
    """Lists a segment in the last of its sliding windows only."""

    def transact(self, transaction: Transaction[Any], read: Callable[[Book], Any]) -> Any:
        if transaction.rule.__name__ == "register":
            flush, *others = transaction.args
            transaction = replace(transaction, args=(replace(flush, every_ms=None), *others))
        return super().transact(transaction, read)


class KeepsEarly(Publisher):
    """Shows an early result for good."""

    def _hide_early(self, output: Commit) -> None:
        pass


class NeverWaits(PreviousResults):
    """Computes each window at once, whatever the one before comes to."""

    async def is_missing(self, _entry: WindowEntry) -> bool:
        return False


class DeliversTwice(IntakeSession):
    """Accepts records as new that were delivered before."""

    @property
    def after(self) -> Sequence | None:
        return None


class NeverHolds(Backpressure):
    """Answers every daemon, however short memory is."""

    def is_held(self, _session: Session) -> bool:
        return False


class Orphans(Lineage):
    """Lets a shard's times begin anew, wherever its parents' ended."""

    def floor_ms(self, shard_id: str) -> int | None:
        return self.nodes[shard_id].effective_ms


class GoesBack(Watermark):
    """Takes the least of the shards for the watermark, whatever it was before."""

    def commit(self, view: View) -> None:
        if view.watermark_ms is not None:
            self._watermark_ms = view.watermark_ms

    def _reached(self, value: int) -> int:
        return value


class NextWindow(Flusher):
    """Puts every row into the window behind its own."""

    def _plan(self, *args: Any) -> FlushPlan:
        planned = super()._plan(*args)
        keys = [_next(each.key) for each in planned.files]
        files = zip(planned.files, keys, strict=True)
        return replace(
            planned, files=tuple(replace(each, key=key, kind=self._kind(key)) for each, key in files)
        )


def _next(key: WindowKey) -> WindowKey:
    if key.start_ms is None or key.end_ms is None:
        return WindowKey(batch_id((batch_number(key.id) or 0) + 1))
    return WindowKey(time_window_id(key.end_ms), key.end_ms, 2 * key.end_ms - key.start_ms)


class SwapsValues(Flusher):
    """Gives two rows of one file each other's value."""

    def _plan(self, *args: Any) -> FlushPlan:
        planned = super()._plan(*args)
        return replace(
            planned,
            files=tuple(replace(each, merged=_swapped(each.rows), order=None) for each in planned.files),
        )


def _swapped(rows: pa.Table) -> pa.Table:
    values = rows.column("n").to_pylist()
    turned = pa.array([*values[1::-1], *values[2:]], pa.int64())
    return rows.drop_columns("_clock").set_column(rows.schema.get_field_index("n"), "n", turned)


class DropsLateRows(Flusher):
    """Forgets rows that came too late for their window's first revision."""

    def _plan(self, *args: Any) -> FlushPlan:
        planned = super()._plan(*args)
        return replace(
            planned, files=tuple(each for each in planned.files if each.kind is SegmentKind.WINDOW)
        )


class AllLateBeside(CutWindows):
    """Sends rows to the late dataset although their window could be computed again."""

    def kind(self, key: WindowKey) -> SegmentKind:
        kind = super().kind(key)
        return SegmentKind.LATE if kind is SegmentKind.RECOMPUTE else kind


class RevisesWithout(SqliteStore):
    """Computes a revision without the segment that came last."""

    def transact(self, transaction: Transaction[Any], read: Callable[[Book], Any]) -> Any:
        told, found = super().transact(transaction, read)
        if transaction.rule.__name__ == "cut":
            told = tuple(
                each
                if each.revision == 1
                else replace(each, segments=each.segments[:-1], rows_in=each.rows_in - each.segments[-1].rows)
                for each in told
            )
        return told, found


class BelievesAnyTime(Coordinator):
    """Lets rows that are dated in the future say how far their shards are."""

    def __init__(self, *, rules: CoordinatorRules, **parts: Any) -> None:
        super().__init__(rules=replace(rules, max_ahead_ms=None), **parts)


class CountsTwice(SqliteStore):
    """Keeps dead letters that ran again and gave rows: they run once more."""

    def transact(self, transaction: Transaction[Any], read: Callable[[Book], Any]) -> Any:
        if transaction.rule.__name__ == "register":
            flush, *others = transaction.args
            ended = () if flush.segments else flush.redriven
            transaction = replace(transaction, args=(replace(flush, redriven=ended), *others))
        return super().transact(transaction, read)


class Impatient(IntakeSession):
    """Takes a daemon for silent that stores a checkpoint."""

    def request_began(self) -> None:
        pass


class KeepsAllAhead(OpenWindows):
    """Keeps rows of however many windows that are far ahead."""

    def leave_out_ahead(self, *_: object) -> frozenset[str]:
        return frozenset()


class HostsTime(SqliteLedger):
    """Lets windows expire by its host's clock."""

    def time_ms(self) -> int:
        return self._clock.now_ms()


class AlwaysGreen(Reports):
    """Finds nothing wrong where no shard is read."""

    def count_unread(self, *_: object, **__: object) -> None:
        pass


class KeepsFailedCalls(CallContext):
    """Counts what a call has changed although it failed: the next call finds it."""

    def begin(self, record: RecordMethods, at_ms: int) -> RecordMethods:
        if self.live is not None:
            self.join()
        return super().begin(record, at_ms)


class ExpiresByArrival(KeyedState):
    """Compares expiry with the record's own arrival time, whatever its shard has seen."""

    def _expired(self, entry: tuple[bytes, int | None], at_ms: int) -> bool:
        return entry[1] is not None and entry[1] <= at_ms


class LosesParts(Flusher):
    """Registers rows without the changes of state that belong to them, now and then."""

    async def _write_state(self, planned: FlushPlan, *args: Any) -> Any:
        if planned.state is not None and planned.clock % 3 == 0:
            planned = replace(planned, state=planned.state.slice(1))
        return await super()._write_state(planned, *args)


class FiresAtOnce(Watermark):
    """Lets timers fire when their time has come, however far their shard is read."""

    def frontier_ms(self, shard_id: str, now_ms: int, civil_ms: int) -> int | None:
        return None if super().frontier_ms(shard_id, now_ms, civil_ms) is None else civil_ms


class FiresStaleTimers(TimerTable):
    """Calls timers of a portion that an earlier call of it has cancelled or replaced."""

    def take(self, due: DueTimer) -> bool:
        return super().take(due) or not self.holds(due.partition_key, due.timer_id)


class ForgetsFailedTimers(TimerTable):
    """Sets no timer again whose call has failed."""

    def set_again(self, due: DueTimer, after_ms: int) -> None:
        pass


class AdoptsUnasked(CoordinatorIntake):
    """Adopts stores without looking whether the stream has children of their shards."""

    async def adopt(self, store_id: str) -> IntakeSession | None:
        asks, self.ask_stream = self.ask_stream, None
        try:
            return await super().adopt(store_id)
        finally:
            self.ask_stream = asks


def _on(store: type[SqliteStore]) -> type[SqliteLedger]:
    """Return a ledger whose store is another."""

    class Planted(SqliteLedger):
        def __init__(self, *args: Any, **fields: Any) -> None:
            super().__init__(*args, **fields)
            self._store.__class__ = store

    return Planted


BUGS: Mapping[str, Mapping[object, object]] = {
    "every row in the next window": {Flusher: NextWindow},
    "values of one row swapped": {Flusher: SwapsValues},
    "a late row in neither place": {Flusher: DropsLateRows},
    "late rows beside a window that is retained": {CutWindows: AllLateBeside},
    "a revision without a row": {SqliteLedger: _on(RevisesWithout)},
    "a redriven letter that counts twice": {SqliteLedger: _on(CountsTwice)},
    "a row of the future that closes windows": {Coordinator: BelievesAnyTime},
    "an await between check and act": {Coordinator: AwaitsBeforeItForgets},
    "a server that ends by an error of its own": {Coordinator: Stumbles},
    "a checkpoint that runs ahead": {SessionPosition: ChecksPointsTooEarly},
    "records that count at each delivery": {IntakeSession: DeliversTwice},
    "a ledger without fences": {SqliteLedger: _on(Unfenced)},
    "nobody is held": {Backpressure: NeverHolds},
    "children without their parents' times": {Lineage: Orphans},
    "a watermark that goes back": {Watermark: GoesBack},
    "silence while a checkpoint is stored": {IntakeSession: Impatient},
    "windows far ahead without a bound": {OpenWindows: KeepsAllAhead},
    "retention by a host's clock": {SqliteLedger: HostsTime},
    "readiness without a daemon": {Reports: AlwaysGreen},
}
"""Those that worlds without keyed state find: each some world within ``test_worlds.SOON``."""

SLIDING_BUGS: Mapping[str, Mapping[object, object]] = {
    "rows in one of their windows only": {SqliteLedger: _on(ListsOnce)},
}
"""Those that worlds with sliding windows find."""

EARLY_BUGS: Mapping[str, Mapping[object, object]] = {
    "early results beside the final ones": {Publisher: KeepsEarly},
}
"""Those that worlds with early results find."""

ORDERED_BUGS: Mapping[str, Mapping[object, object]] = {
    "windows that do not wait for the one before": {PreviousResults: NeverWaits},
}
"""Those that worlds find in which windows are computed one after the other."""

KEYED_BUGS: Mapping[str, Mapping[object, object]] = {
    "changes of a call that failed": {CallContext: KeepsFailedCalls},
    "expiry by arrival": {KeyedState: ExpiresByArrival},
    "rows without their changes of state": {Flusher: LosesParts},
}
"""Those that worlds with keyed state find."""

TIMED_BUGS: Mapping[str, Mapping[object, object]] = {
    "timers ahead of records": {Watermark: FiresAtOnce},
    "timers that an earlier one has cancelled": {TimerTable: FiresStaleTimers},
    "failed timers that are not set again": {TimerTable: ForgetsFailedTimers},
    "adoption before the children are known": {CoordinatorIntake: AdoptsUnasked},
}
"""Those that worlds with timers find."""
