"""What a coordinator goes by, and its windows: which a row belongs to, which are open, which are cut. A synchronous core.

A row that comes for a window that is cut is late. By policy it waits for the window's next revision, as long as the
ledger retains the window's segments, or it goes to the late dataset. Only the ledger knows for certain which windows
are cut or retained, because other servers change this too. This module holds a copy, which the ledger's refusals
correct.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from mldserver.config.settings import FlowSettings
from mldserver.ledger.contract import (
    BatchProgress,
    FlushResult,
    LedgerState,
    SegmentKind,
    WindowEntry,
    WindowState,
    batch_id,
    batch_number,
)
from mldserver.windows import Batches, TimeWindows, WindowSpec, overlapping, pane_starts, time_window_id

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_AHEAD: Final = 100
"""How many windows, or panes of sliding windows, may be open that are too far ahead of the stream."""

_REMEMBERED = 10_000
"""How many cut windows that the ledger no longer lists are remembered between two reads. For a window that was
dropped here the ledger refuses late rows, and the server plans them again."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorRules(FlowSettings):
    """The settings, and what the handler says of its windows."""

    on_arrival: bool = True
    """Windows are cut on arrival time (False: on a column)."""
    disorder_ms: int = 0
    overlap: bool = False
    """Whether windows share segments: they are sliding windows."""
    in_order: bool = False
    """Whether each window is computed with the result of the one before: rows for a window before one that was cut are late."""
    parks: bool = False
    """Whether records wait behind dead letters of their partition key."""
    settle_time_ms: int = 10_000
    """After the start and after each new shard, windows wait this long for other shards: after a restart a daemon takes
    some seconds to connect all its shards, and a shard that was never seen holds no window."""


@dataclass(frozen=True, slots=True)
class WindowKey:
    """A window's identity and bounds (ms; None for ``batches``)."""

    id: str
    start_ms: int | None = None
    end_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which window each row of a flush belongs to."""

    index: NDArray[np.int64]
    """For each row, the place of its window in ``keys``."""
    keys: tuple[WindowKey, ...]
    """The windows touched, in order of their start or number."""
    progress: BatchProgress
    """Where ``batches`` windows stand afterwards."""


def assign(
    spec: WindowSpec, event_ms: NDArray[np.int64], *, progress: BatchProgress, now_ms: int
) -> Assignment:
    """Assign rows, given in merge order, to windows. Pure: a flush that was refused is simply assigned again.

    Windows of time look at the event times only; ``batches`` count rows on from ``progress``. Of sliding windows a row is
    assigned to the last one that contains it: ``windows_with`` returns the others.
    """
    if isinstance(spec, TimeWindows):
        starts = pane_starts(event_ms, spec)
        if len(starts) and starts.min() == starts.max():
            starts, index = starts[:1], np.zeros(len(starts), np.int64)  # nearly always; the other way sorts
        else:
            starts, index = np.unique(starts, return_inverse=True)
        keys = tuple(
            WindowKey(time_window_id(start), start, start + spec.size_ms) for start in starts.tolist()
        )
        return Assignment(index.astype(np.int64, copy=False), keys, progress)
    rows = len(event_ms)
    if rows == 0:
        return Assignment(np.empty(0, np.int64), (), progress)
    if progress.rows >= spec.max_rows:
        # The bound was lowered since: the open one is full.
        progress = BatchProgress(progress.number + 1)
    full, inside = divmod(progress.rows + rows, spec.max_rows)
    index = (np.arange(rows, dtype=np.int64) + progress.rows) // spec.max_rows
    keys = tuple(WindowKey(batch_id(progress.number + i)) for i in range(int(index[-1]) + 1))
    if inside == 0:
        return Assignment(index, keys, BatchProgress(progress.number + full))
    opened = progress.opened_ms if full == 0 and progress.rows else now_ms
    return Assignment(index, keys, BatchProgress(progress.number + full, inside, opened))


def windows_with(key: WindowKey, spec: WindowSpec | None) -> tuple[WindowKey, ...]:
    """Return every window that has the rows assigned to ``key``, the first to end in front; ``key`` is the last."""
    every_ms = spec.every_ms if isinstance(spec, TimeWindows) else None
    if every_ms is None or key.start_ms is None or key.end_ms is None:
        return (key,)
    return tuple(WindowKey(*window) for window in overlapping(key.start_ms, key.end_ms, every_ms))


@dataclass(eq=False, slots=True)
class OpenWindows:
    """The windows that have durable rows and are not cut yet, and which of them may close."""

    spec: WindowSpec
    progress: BatchProgress = field(default_factory=BatchProgress)
    """What the ledger knows of ``batches``."""
    ahead_from_ms: int | None = field(default=None)
    """Windows that begin after this time run too far ahead of the stream (``max_ahead``); None: none does."""
    _open: dict[str, WindowKey] = field(init=False, default_factory=dict)
    _bytes: dict[str, int] = field(init=False, default_factory=dict)
    """What the segments of each open window took when the ledger was read last."""
    _aging: tuple[int, int] | None = field(init=False, default=None)
    """The ``batches`` window in progress, and since when it is open by this server's steady time."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, window_id: str) -> bool:
        return window_id in self._open

    def opened(self, keys: Iterable[WindowKey]) -> None:
        """Note windows that have a registered segment."""
        for key in keys:
            self._open.setdefault(key.id, key)

    def add(self, entry: WindowEntry) -> None:
        """Note a window that is open in the ledger."""
        self._open.setdefault(entry.window_id, WindowKey(entry.window_id, entry.start_ms, entry.end_ms))
        self._bytes[entry.window_id] = sum(segment.bytes for segment in entry.segments)

    def is_ahead(self, key: WindowKey) -> bool:
        """Whether a window begins so far ahead of the stream that its rows must have a wrong time."""
        after_ms = self.ahead_from_ms
        return after_ms is not None and key.start_ms is not None and key.start_ms > after_ms

    def leave_out_ahead(self, keys: Iterable[WindowKey], most_bytes: int) -> frozenset[str]:
        """Return which windows may get no rows: they are ahead, and those that are open already fill their share.

        Nothing closes windows that are ahead before their time has come: without a bound on them there is none on the disk.
        """
        ahead = [key for key in keys if self.is_ahead(key)]
        if not ahead:
            return frozenset()
        held = [key.id for key in self._open.values() if self.is_ahead(key)]
        panes = self.spec.panes if isinstance(self.spec, TimeWindows) else 1  # so many windows list a segment
        if sum(self._bytes.get(window_id, 0) for window_id in held) >= most_bytes * panes:
            return frozenset(key.id for key in ahead)
        new = [key.id for key in ahead if key.id not in self._open]
        return frozenset(new[max(0, MOST_AHEAD - len(held) // panes) :])

    def latest_end_ms(self, window_ids: Iterable[str]) -> int | None:
        """Return the end of the last of these open windows that is not too far ahead of the stream; None: there is none."""
        keys = (self._open[window_id] for window_id in window_ids)
        return max(
            (key.end_ms for key in keys if key.end_ms is not None and not self.is_ahead(key)), default=None
        )

    def cut(self, window_ids: Iterable[str]) -> None:
        """Note windows that were cut. Cutting the ``batches`` window in progress starts the next one."""
        for window_id in window_ids:
            self._open.pop(window_id, None)
            self._bytes.pop(window_id, None)
            if isinstance(self.spec, Batches):
                self.progress = self.progress.behind([window_id])

    def overdue(self, wall_ms: int) -> bool:
        """Whether a window is open that ends before ``wall_ms``, lateness included; those from the future are not."""
        if isinstance(self.spec, Batches):
            return False
        ends = (key.end_ms for key in self._open.values() if key.end_ms is not None)
        return min(ends, default=wall_ms) + self.spec.lateness_ms < wall_ms

    def passed(self, watermark_ms: int | None) -> float:
        """Return the share of a pane that the watermark has passed; 0 where it closes no window."""
        if watermark_ms is None or not isinstance(self.spec, TimeWindows):
            return 0.0
        return (watermark_ms - self.spec.lateness_ms) % self.spec.pane_ms / self.spec.pane_ms

    def ends_ms(self) -> list[int]:
        """Return the ends of the open windows; those of ``batches`` have none."""
        return [key.end_ms for key in self._open.values() if key.end_ms is not None]

    def closable(
        self, *, watermark_ms: int | None, now_ms: int, wall_ms: int, close_all: bool = False
    ) -> tuple[str, ...]:
        """Return the ids of the open windows that may be cut, oldest first.

        Windows of time: the watermark has reached end + lateness. Batches: full, or open for longer than the maximal age, by
        the steady time ``now_ms``; the time of day says only how old one is that is seen for the first time.
        ``close_all``: every one (the stream is over, or quiet).
        """
        keys = sorted(self._open.values(), key=lambda key: (key.start_ms or 0, key.id))
        if close_all:
            return tuple(key.id for key in keys)
        if isinstance(self.spec, TimeWindows):
            if watermark_ms is None:
                return ()
            reached = watermark_ms - self.spec.lateness_ms
            return tuple(key.id for key in keys if key.end_ms is not None and key.end_ms <= reached)
        number, opened = self.progress.number, self.progress.opened_ms
        aged = False
        if opened is not None:
            if self._aging is None or self._aging[0] != number:
                self._aging = number, now_ms - max(0, wall_ms - opened)
            aged = now_ms - self._aging[1] >= self.spec.max_age_ms
        numbers = ((key.id, batch_number(key.id)) for key in keys)
        return tuple(key_id for key_id, of in numbers if aged or (of is not None and of < number))


@dataclass(eq=False, slots=True)
class CutWindows:
    """Which windows are cut, which of them are retained, and which have late rows waiting."""

    rules: CoordinatorRules
    due_ms: dict[str, int] = field(init=False, default_factory=dict)
    """Windows with rows that wait for the next revision, and when they shall be computed again."""
    _retained: dict[str, None] = field(init=False, default_factory=dict)
    """Windows known to be cut whose late rows still lead to a revision."""
    _over: dict[str, None] = field(init=False, default_factory=dict)
    """Windows known to be cut that are not retained any more, those known longest first."""
    _cut_below_ms: int | None = field(init=False, default=None)

    def update(self, state: LedgerState, now_ms: int) -> None:
        """Apply the ledger's state: the whole state, or the changes since the last call."""
        self._cut_below_ms = state.cut_below_ms
        if not state.since:
            # Windows that were published and are not retained are not told, but rows may come for them still.
            known = self._retained | dict.fromkeys(self.due_ms)
            self.expired([window_id for window_id in known if window_id not in state.windows])
        for entry in state.windows.values():
            if entry.state is WindowState.OPEN:
                continue
            if not entry.retained or entry.is_skipped:
                self.expired([entry.window_id])
                continue
            self._retained[entry.window_id] = None
            # A window that was set aside waits for a person, and its late rows with it.
            if entry.pending and entry.state is not WindowState.SET_ASIDE:
                self.registered([entry.window_id], now_ms)
            else:
                self.due_ms.pop(entry.window_id, None)
        # Not where refusals are noted: a flush must not forget of one window what it has to know of another.
        for window_id in list(itertools.islice(self._over, max(0, len(self._over) - _REMEMBERED))):
            del self._over[window_id]

    def kind(self, key: WindowKey) -> SegmentKind:
        """Return what rows for a window that is not known to be open are for."""
        if key.id in self._retained and self.rules.late == "recompute":
            return SegmentKind.RECOMPUTE
        if key.id in self._retained or key.id in self._over:
            return SegmentKind.LATE
        below = self._cut_below_ms
        forgotten = below is not None and key.end_ms is not None and key.end_ms <= below
        return SegmentKind.LATE if forgotten else SegmentKind.WINDOW

    def cut(self, window_ids: Iterable[str]) -> None:
        """Note windows that were cut: they take up what waited for them."""
        for window_id in window_ids:
            if window_id not in self._over:
                self._retained[window_id] = None
            self.due_ms.pop(window_id, None)

    def refused(self, result: FlushResult) -> None:
        """Note what a refusal of the ledger says of windows."""
        self._retained |= dict.fromkeys(name for name in result.cut_windows if name not in self._over)
        self.expired(result.expired_windows)

    def expired(self, window_ids: Iterable[str]) -> None:
        """Note windows that are not retained any more."""
        for window_id in window_ids:
            self._retained.pop(window_id, None)
            self.due_ms.pop(window_id, None)
            self._over[window_id] = None

    def registered(self, window_ids: Iterable[str], now_ms: int) -> None:
        """Note windows that have rows in the ledger for their next revision."""
        for window_id in window_ids:
            self.due_ms.setdefault(window_id, now_ms + self.rules.recompute_delay_ms)

    def due(self, now_ms: int, *, at_once: bool) -> tuple[str, ...]:
        """Return the windows that shall be cut again now, those that waited longest first."""
        waiting = sorted(self.due_ms.items(), key=lambda item: (item[1], item[0]))
        return tuple(window_id for window_id, due_ms in waiting if at_once or due_ms <= now_ms)
