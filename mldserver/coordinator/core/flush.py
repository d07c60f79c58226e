"""From accepted batches to what one flush writes and registers. A synchronous core on Arrow tables.

``buffered`` gives a batch its final effective times and event times; ``Buffer`` holds it; ``plan`` merges the batches, numbers the rows with
the pipeline's clock and splits them by window. A plan is pure: when the ledger refuses it (a shard was lost, a window
was cut or expired meanwhile), the caller plans again with what it has learned.

Why effective times: arrival times are approximate, so a shard's later record may carry an earlier time, yet the order
inside a shard always wins. A record's effective time is the running maximum of arrival times in its shard, floored by
the last effective time of its parents. Ordering by (effective time, clock) is then a total order that keeps shards in
order and parents before children, and equals what a heap over single records gives (Bloop's rules) at a fraction of
its cost: a running maximum and one stable sort for each flush.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa

from mldserver.coordinator.core import state_files
from mldserver.coordinator.core.open_windows import WindowKey, assign
from mldserver.effects import NOTHING, Effects
from mldserver.ledger.contract import BatchProgress, PositionUpdate, SegmentKind, StoreUpdate
from mldserver.records import Sequence
from mldserver.runtime.interface import BatchOutcome, BatchOutline, TimerReport
from mldserver.windows import TimeWindows, WindowSpec, milliseconds

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NO_TIMES = np.empty(0, np.int64)


class Ahead(msgspec.Struct, frozen=True):
    """Rows of a batch that run too far ahead of their records' arrival."""

    rows: int
    sequence: str
    """Of the record that is furthest ahead, with its sub-sequence number."""
    ahead_ms: int
    """By how much it is."""


class BufferedBatch(msgspec.Struct):
    """An accepted batch that is not durable yet. In the buffer only ``move`` changes one, and only what no cycle has seen.

    One without rows moves its shard's position, or (``ends_shard``) marks that all before it was the shard's last.
    """

    shard_id: str
    epoch: int
    effects: Effects = NOTHING
    """Its rows have their final ``_time``, and no ``_clock``."""
    event_ms: NDArray[np.int64] = _NO_TIMES
    """Event time of each row."""
    last: Sequence | None = None
    """How far its shard's position moves with it: its last sequence; None when it stays where it is."""
    effective_ms: int | None = None
    """Effective time of its last record."""
    latest_event_ms: int | None = None
    """Latest event time the batch has shown, rows that run ahead aside: where its shard's watermark goes on."""
    bytes: int = 0
    """Of its effects."""
    ends_shard: bool = False
    redriven: tuple[str, ...] = ()
    """Ids of the dead letters that it is made of. Then it moves no position, and is of no epoch (0) unless its shard has a store."""
    ahead: Ahead | None = None
    store: str = ""
    """The store of its shard; empty: the handler keeps no state."""
    timers: TimerReport | None = None
    """What it says of the store's timers; None: nothing."""


@dataclass(frozen=True, slots=True)
class WindowRows:
    """The rows of one file: gathered in the thread that writes it."""

    key: WindowKey
    merged: pa.Table
    """The flush's rows, in the order in which they were accepted; or this file's, where they need no gathering."""
    order: NDArray[np.intp] | None
    """The indexes of this file's rows in the flush; None: the file has all rows of ``table``, in order."""
    clocks: NDArray[np.int64]
    kind: SegmentKind

    def __len__(self) -> int:
        return len(self.clocks)

    @property
    def rows(self) -> pa.Table:
        """Gather them."""
        rows = self.merged if self.order is None else self.merged.take(pa.array(self.order))
        return rows.append_column("_clock", pa.array(self.clocks, pa.int64()))


@dataclass(frozen=True, slots=True)
class FlushPlan:
    """What one flush writes, and what it registers."""

    files: tuple[WindowRows, ...]
    positions: tuple[PositionUpdate, ...]
    effects: Effects
    """Of records that come from their shards, except rows and state."""
    rows: int
    """In all files, late ones included."""
    clock: int
    progress: BatchProgress
    redriven: tuple[str, ...] = ()
    """Ids of dead letters that end with this flush."""
    redriven_effects: Effects = NOTHING
    """Of those dead letters, except rows and state: what failed again stays in the ledger, even if new dead letters go elsewhere."""
    stores: tuple[StoreUpdate, ...] = ()
    """The stores whose state changes."""
    state: pa.Table | None = None
    """Their changes, as one file (``state_files.COLUMNS``); None: no state changes."""


def effective_times(times_ms: NDArray[np.int64], floor_ms: int | None) -> NDArray[np.int64]:
    """Return the running maximum of ``times_ms`` (one shard, in shard order), never below ``floor_ms``."""
    running = np.maximum.accumulate(times_ms) if len(times_ms) else times_ms
    return running if floor_ms is None else np.maximum(running, np.int64(floor_ms))


def merge_order(runs: SequenceABC[NDArray[np.int64]]) -> NDArray[np.intp] | None:
    """Return the permutation that merges ``runs`` by effective time; ties keep the order of the runs.

    Each run holds the effective times of one batch, and runs stand in the order in which they were accepted, so that
    the runs of one shard are in its order and never go down. None: the concatenated runs are in order already.
    """
    times = np.concatenate(runs) if runs else np.empty(0, np.int64)
    if len(times) < 2 or bool((times[1:] >= times[:-1]).all()):  # noqa: PLR2004  # fewer than two are in order
        return None
    return np.argsort(times, kind="stable")


def last_effective_ms(outline: BatchOutline, floor_ms: int | None) -> int | None:
    """Return the effective time of a batch's last record, or of the last timer that it fired; None: it has none."""
    arrival_ms = outline.latest_arrival_ms
    if not outline.records and arrival_ms is None:
        return None
    return floor_ms if arrival_ms is None or (floor_ms is not None and floor_ms > arrival_ms) else arrival_ms


def buffered(
    shard_id: str,
    epoch: int,
    outcome: BatchOutcome,
    *,
    floor_ms: int | None,
    spec: WindowSpec | None,
    max_ahead_ms: int | None = None,
) -> BufferedBatch:
    """Give a batch's rows their effective times (not below ``floor_ms``) and find their event times.

    Rows whose event time runs more than ``max_ahead_ms`` (None: any) ahead of their records' arrival say nothing of how
    far the shard is: a clock is wrong, and would make every row after them late.
    """
    effective = last_effective_ms(outcome.outline, floor_ms)
    column = spec.on if isinstance(spec, TimeWindows) else None
    effects = outcome.effects
    rows, event, ahead = effects.rows or None, _NO_TIMES, None
    latest = effective if column is None else None
    if rows is not None:
        event = times = effective_times(rows.column("_time").to_numpy(), floor_ms)
        rows = rows.set_column(rows.schema.get_field_index("_time"), "_time", pa.array(times, pa.int64()))
        if column is not None:
            event = milliseconds(rows.column(column))
            latest, ahead = _latest_plausible(event, times, rows, max_ahead_ms)
    effects = msgspec.structs.replace(effects, rows=rows)
    last, size = outcome.outline.last, effects.nbytes
    return BufferedBatch(
        shard_id, epoch, effects, event, last, effective, latest, size, ahead=ahead, timers=outcome.timers
    )


def _latest_plausible(
    event: NDArray[np.int64], arrival: NDArray[np.int64], rows: pa.Table, max_ahead_ms: int | None
) -> tuple[int | None, Ahead | None]:
    """Return the latest event time that is at most ``max_ahead_ms`` after its arrival, and what was further ahead.

    The event time is None if all rows were further ahead; the second value is None if no row was. With ``max_ahead_ms``
    None, no row is too far ahead. There must be at least one row.
    """
    furthest = int(np.argmax(event - arrival))
    ahead_ms = int(event[furthest] - arrival[furthest])
    if max_ahead_ms is None or ahead_ms <= max_ahead_ms:
        return int(event.max()), None
    near = event[event - arrival <= max_ahead_ms]
    sequence, sub = (rows.column(name)[furthest].as_py() for name in ("_sequence", "_sub_sequence"))
    ahead = Ahead(len(event) - len(near), f"{sequence}/{sub}" if sub else sequence, ahead_ms)
    return int(near.max()) if len(near) else None, ahead


@dataclass(eq=False, slots=True)
class Buffer:
    """Accepted batches that are not durable yet, in the order in which they were accepted; knows each shard's."""

    bytes: int = field(init=False, default=0)
    """Bytes of all batches."""
    new_bytes: int = field(init=False, default=0)
    """Bytes of those that no cycle has seen."""
    removals: int = field(init=False, default=0)
    """How many batches were removed. As long as it stays, each batch that the ledger lacked is still here."""
    _batches: dict[int, BufferedBatch] = field(init=False, default_factory=dict)
    _next: int = field(init=False, default=0)
    _seen: int = field(init=False, default=0)
    """The number from which on they are new."""
    _moves: dict[str, int] = field(init=False, default_factory=dict)
    """Of each shard whose latest batch only moves its position, and that no cycle has seen yet, its number."""
    # A cycle asks for every shard what of it is durable: each must find its own without a look at the others.
    _numbers: dict[str, dict[int, None]] = field(init=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch: BufferedBatch) -> int:
        """Take a batch in; return its number."""
        number = self._next
        self._moves.pop(batch.shard_id, None)
        self._batches[number] = batch
        self._next += 1
        self._numbers.setdefault(batch.shard_id, {})[number] = None
        self.bytes += batch.bytes
        self.new_bytes += batch.bytes
        return number

    def move(
        self,
        shard_id: str,
        epoch: int,
        position: Sequence | None,
        effective_ms: int | None = None,
        latest_event_ms: int | None = None,
        store: str = "",
    ) -> None:
        """Move the position of a shard of this store without rows, and its times; None: that stays where it is.

        Until a cycle has seen it, one such batch takes in what the next ones say: thousands of quiet shards have no others.
        """
        number = self._moves.get(shard_id)
        if number is None or (batch := self._batches[number]).epoch != epoch:
            batch = BufferedBatch(
                shard_id, epoch, NOTHING, _NO_TIMES, position, effective_ms, latest_event_ms, store=store
            )
            self._moves[shard_id] = self.add(batch)
            return
        if position is not None:
            batch.last = position
        if effective_ms is not None:
            batch.effective_ms = effective_ms
        if latest_event_ms is not None and (
            batch.latest_event_ms is None or latest_event_ms > batch.latest_event_ms
        ):
            batch.latest_event_ms = latest_event_ms

    def __contains__(self, number: int) -> bool:
        return number in self._batches

    def snapshot(self) -> dict[int, BufferedBatch]:
        """Return what is there now, by a number that stays."""
        self._moves.clear()
        self._seen, self.new_bytes = self._next, 0
        return dict(self._batches)

    def remove(self, numbers: Iterable[int]) -> None:
        """Drop batches by their numbers; those dropped meanwhile are passed over."""
        for number in numbers:
            batch = self._batches.pop(number, None)
            if batch is None:
                continue
            self.removals += 1
            self.bytes -= batch.bytes
            self.new_bytes -= batch.bytes if number >= self._seen else 0
            if self._moves.get(batch.shard_id) == number:
                del self._moves[batch.shard_id]
            left = self._numbers[batch.shard_id]
            del left[number]
            if not left:
                del self._numbers[batch.shard_id]

    def of_store(self, store_id: str) -> list[BufferedBatch]:
        """Return the batches of a store's shards that were accepted for good, in their order: without redriven ones."""
        return [batch for batch in self._batches.values() if batch.store == store_id and not batch.redriven]

    def drop_shard(self, shard_id: str) -> int:
        """Drop a shard's batches: it is opened again and they will be delivered again. Return how many."""
        dropped = tuple(self._numbers.get(shard_id, ()))
        self.remove(dropped)
        return len(dropped)

    def drop_registered(self, numbers: Iterable[int], stores: AbstractSet[str]) -> None:
        """Drop the batches of stores among those that a flush has registered; redriven ones and a shard's end stay.

        ``drop_durable`` does not find all of them: timers that fired move no position.
        """
        self.remove(
            [
                number
                for number in numbers
                if (batch := self._batches.get(number)) is not None
                and batch.store in stores
                and not (batch.redriven or batch.ends_shard)
            ]
        )

    def drop_durable(self, shard_id: str, epoch: int, position: Sequence) -> None:
        """Drop a connection's batches up to a position that the ledger has already; a shard's end stays."""
        of_shard = ((number, self._batches[number]) for number in self._numbers.get(shard_id, ()))
        self.remove(
            [
                number
                for number, batch in of_shard
                if batch.epoch == epoch
                and not batch.ends_shard
                and batch.last is not None
                and batch.last <= position
            ]
        )


def flush_at(most_bytes: int, written_bytes: int, passed: float) -> int:
    """Return the bytes of rows that start a flush at once: half of what the window will still receive.

    ``written_bytes``: bytes of rows flushed since the last cut; ``passed``: the share of the window's time that has
    passed, 0 if it is unknown.

    What is not durable when a window's last row comes delays the window, 16 MiB by some 70 ms on a slow core; and so does
    each segment that its job opens, by 2 to 5 ms. So flushes are few and large, and ever smaller towards its end.
    """
    if not written_bytes:
        return max(1, most_bytes // 4)
    if not passed:
        return most_bytes
    to_come = written_bytes / passed - written_bytes
    return min(most_bytes, max(1, most_bytes // 16, int(to_come / 2)))


def plan(
    batches: SequenceABC[BufferedBatch],
    *,
    spec: WindowSpec | None,
    clock: int,
    progress: BatchProgress,
    now_ms: int,
    durable: Mapping[str, Sequence | None],
    kind: Callable[[WindowKey], SegmentKind],
    stores: Mapping[str, StoreUpdate] | None = None,
) -> FlushPlan:
    """Merge batches (in the order in which they were accepted) and split their rows by window.

    ``clock``: the next value of the merge clock. ``durable``: each shard's position in the ledger, which its update goes
    on from. ``kind``: what rows for a window are for, since it may be cut already. ``stores``: how a change of each store is
    registered.
    """
    with_rows = [(rows, batch.event_ms) for batch in batches if (rows := batch.effects.rows) is not None]
    files: tuple[WindowRows, ...] = ()
    if with_rows and spec is not None:
        files, progress = _split(with_rows, spec, clock, progress, now_ms, kind)
    rows = sum(map(len, files))
    updates, state = _state(batches, stores or {})
    return FlushPlan(
        files,
        _positions(batches, durable),
        _effects(batch for batch in batches if not batch.redriven),
        rows,
        clock + rows,
        progress,
        tuple(letter_id for batch in batches for letter_id in batch.redriven),
        _effects(batch for batch in batches if batch.redriven),
        updates,
        state,
    )


def _effects(batches: Iterable[BufferedBatch]) -> Effects:
    """Return all effects except rows and state."""
    effects = Effects.without_rows([batch.effects for batch in batches])
    return msgspec.structs.replace(effects, state=()) if effects.state else effects


def _state(
    batches: SequenceABC[BufferedBatch], stores: Mapping[str, StoreUpdate]
) -> tuple[tuple[StoreUpdate, ...], pa.Table | None]:
    """Return the stores that change, and their changes."""
    newest_first = [
        (batch.store, blob) for batch in reversed(batches) for blob in reversed(batch.effects.state)
    ]
    updates = tuple(stores[store] for store in sorted({store for store, _ in newest_first}))
    if not updates:
        return (), None
    dues_ms = {batch.store: batch.timers.next_due_ms for batch in batches if batch.timers is not None}
    updates = tuple(
        replace(update, next_due_ms=dues_ms.get(update.store_id, update.next_due_ms)) for update in updates
    )
    serials = {update.store_id: update.previous + 1 for update in updates}
    return updates, state_files.changes(newest_first, serials)


def _split(
    runs: list[tuple[pa.Table, NDArray[np.int64]]],
    spec: WindowSpec,
    clock: int,
    progress: BatchProgress,
    now_ms: int,
    kind: Callable[[WindowKey], SegmentKind],
) -> tuple[tuple[WindowRows, ...], BatchProgress]:
    table = pa.concat_tables([rows for rows, _ in runs])
    event = np.concatenate([event_ms for _, event_ms in runs])
    order = merge_order([rows.column("_time").to_numpy() for rows, _ in runs])
    if order is not None:
        event = event[order]
    ranks = np.arange(clock, clock + len(table), dtype=np.int64)
    assignment = assign(spec, event, progress=progress, now_ms=now_ms)
    if len(assignment.keys) > 1:
        # One gather for both orders: rows by window, inside a window by the merge.
        by_window = np.argsort(assignment.index, kind="stable")
        ranks = ranks[by_window]
        order = by_window if order is None else order[by_window]
        # Otherwise each gather of a window's rows would combine the batches' columns again.
        table = table.combine_chunks()
    counts = np.bincount(assignment.index, minlength=len(assignment.keys))
    starts = np.concatenate(([0], np.cumsum(counts))).tolist()
    files = []
    for key, first, behind in zip(assignment.keys, starts[:-1], starts[1:], strict=True):
        own = table.slice(first, behind - first) if order is None else table
        places = None if order is None else order[first:behind]
        files.append(WindowRows(key, own, places, ranks[first:behind], kind(key)))
    return tuple(files), assignment.progress


def _positions(
    batches: Iterable[BufferedBatch], durable: Mapping[str, Sequence | None]
) -> tuple[PositionUpdate, ...]:
    """Return one update a shard: batches of a shard stand in its order, so the last word wins.

    Where none of them moves the position it stays: that of a handler which has not checkpointed, or of a shard with redriven
    letters that change its store. The update then only proves the epoch.
    """
    merged: dict[str, PositionUpdate] = {}
    for batch in batches:
        if batch.redriven and not batch.store:
            continue
        known = merged.get(batch.shard_id)
        events = (known.event_ms if known else None, batch.latest_event_ms)
        stands = known.position if known else durable.get(batch.shard_id)
        merged[batch.shard_id] = PositionUpdate(
            batch.shard_id,
            batch.epoch,
            stands if batch.last is None else batch.last,
            batch.effective_ms if batch.effective_ms is not None or known is None else known.effective_ms,
            max((ms for ms in events if ms is not None), default=None),
            ended=batch.ends_shard or (known is not None and known.ended),
            previous=durable.get(batch.shard_id),
        )
    return tuple(merged.values())
