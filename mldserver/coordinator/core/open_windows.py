"""Which window a row belongs to, which windows are open, which may close, and what all take. A synchronous core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from mldserver.ledger.contract import BatchProgress, WindowState, batch_id, batch_number
from mldserver.windows import Batches, Tumbling, WindowSpec, tumbling_id, tumbling_starts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from mldserver.ledger.contract import LedgerState, WindowEntry

__all__ = ["Assignment", "OpenWindows", "SegmentUsage", "WindowKey", "assign"]

_UNDER_WAY: Final = frozenset({WindowState.CUT, WindowState.COMMITTED})


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

    Tumbling windows look at the event times only; ``batches`` count rows on from ``progress``.
    """
    if isinstance(spec, Tumbling):
        starts, index = np.unique(tumbling_starts(event_ms, spec), return_inverse=True)
        keys = tuple(WindowKey(tumbling_id(start), start, start + spec.size_ms) for start in starts.tolist())
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


class OpenWindows:
    """The windows that have durable rows and are not cut yet, and which of them may close."""

    def __init__(self, spec: WindowSpec, progress: BatchProgress | None = None) -> None:
        """Start with none open; ``progress`` is what the ledger knows of ``batches``."""
        self.spec = spec
        self.progress = progress or BatchProgress()
        self._open: dict[str, WindowKey] = {}
        self._aging: tuple[int, int] | None = None
        """The ``batches`` window in progress, and since when it is open by this server's steady time."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, window_id: str) -> bool:
        return window_id in self._open

    def opened(self, keys: Iterable[WindowKey]) -> None:
        """Note windows that have a registered segment."""
        for key in keys:
            self._open.setdefault(key.id, key)

    def cut(self, window_ids: Iterable[str]) -> None:
        """Note windows that were cut. Cutting the ``batches`` window in progress starts the next one."""
        for window_id in window_ids:
            self._open.pop(window_id, None)
            if isinstance(self.spec, Batches):
                self.progress = self.progress.behind([window_id])

    def overdue(self, wall_ms: int) -> bool:
        """Whether a window is open that ends before ``wall_ms``, lateness included; those from the future are not."""
        if isinstance(self.spec, Batches):
            return False
        ends = (key.end_ms for key in self._open.values() if key.end_ms is not None)
        return min(ends, default=wall_ms) + self.spec.lateness_ms < wall_ms

    def closable(
        self, *, watermark_ms: int | None, now_ms: int, wall_ms: int, close_all: bool = False
    ) -> tuple[str, ...]:
        """Return the ids of the open windows that may be cut, oldest first.

        Tumbling: the watermark has reached end + lateness. Batches: full, or open for longer than the maximal age, by
        the steady time ``now_ms``; the time of day says only how old one is that is seen for the first time.
        ``close_all``: every one (the stream is over, or quiet).
        """
        keys = sorted(self._open.values(), key=lambda key: (key.start_ms or 0, key.id))
        if close_all:
            return tuple(key.id for key in keys)
        if isinstance(self.spec, Tumbling):
            if watermark_ms is None:
                return ()
            reached = watermark_ms - self.spec.lateness_ms
            return tuple(key.id for key in keys if key.end_ms is not None and key.end_ms <= reached)
        return tuple(key.id for key in keys if self._batch_done(key, self.spec, now_ms, wall_ms))

    def _batch_done(self, key: WindowKey, spec: Batches, now_ms: int, wall_ms: int) -> bool:
        number = batch_number(key.id)
        if number is not None and number < self.progress.number:
            return True
        opened = self.progress.opened_ms
        if opened is None:
            return False
        if self._aging is None or self._aging[0] != self.progress.number:
            self._aging = self.progress.number, now_ms - max(0, wall_ms - opened)
        return now_ms - self._aging[1] >= spec.max_age_ms


class SegmentUsage:
    """What the ledger holds of the windows of all servers, kept up by its news.

    A day of one-second windows is 86,400 retained ones. What a cycle must know of them all is kept here and changed by
    what changed, so that a cycle costs what happened since the last one.
    """

    def __init__(self) -> None:
        self.segment_bytes = 0
        """What the segments take that windows wait for, or retain."""
        self.open_bytes = 0
        """What those take whose windows are open."""
        self.under_way: dict[str, WindowEntry] = {}
        """Windows that are cut or committed."""
        self._bytes: dict[str, tuple[int, int]] = {}
        """Of each window with segments what these take, and what while it is open."""

    def learn(self, state: LedgerState) -> None:
        """Take in a state of the ledger: everything, or the news since the last one."""
        if not state.since:
            self.segment_bytes = self.open_bytes = 0
            self.under_way, self._bytes = {}, {}
        for entry in state.windows.values():
            size = sum(segment.bytes for segment in (*entry.segments, *entry.pending))
            opened = size if entry.state is WindowState.OPEN else 0
            before, opened_before = self._bytes.pop(entry.window_id, (0, 0))
            self.segment_bytes += size - before
            self.open_bytes += opened - opened_before
            if size:
                self._bytes[entry.window_id] = size, opened
            self.under_way.pop(entry.window_id, None)
            if entry.state in _UNDER_WAY:
                self.under_way[entry.window_id] = entry
