"""Windows that are cut: where rows go that still come for them, and when they are computed again. A synchronous core.

A row that comes for a window that is cut is late. By policy it waits for the window's next revision, as long as the
ledger retains the window's segments, or it goes to the late dataset. Only the ledger knows for certain what is cut and
what is retained (another server may have done either): what is held here is a picture of it, corrected by refusals.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from mldserver.ledger.contract import SegmentKind, WindowState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mldserver.coordinator.core.open_windows import WindowKey
    from mldserver.coordinator.core.rules import CoordinatorRules
    from mldserver.ledger.contract import FlushResult, LedgerState

__all__ = ["CutWindows"]

_REMEMBERED = 10_000
"""How many windows that the ledger does not tell of any more are known to be cut, from one look at it to the next. For one
that is forgotten the ledger refuses the late rows, which are then planned again."""


class CutWindows:
    """Which windows are cut, which of them are retained, and which have late rows waiting."""

    def __init__(self, rules: CoordinatorRules) -> None:
        """Know of none yet."""
        self._rules = rules
        self._retained: dict[str, None] = {}
        """Windows known to be cut whose late rows still lead to a revision."""
        self._over: dict[str, None] = {}
        """Windows known to be cut that are not retained any more, those known longest first."""
        self._cut_below_ms: int | None = None
        self._due_ms: dict[str, int] = {}
        """Windows with rows that wait for the next revision, and when they shall be computed again."""

    @property
    def waiting(self) -> int:
        """How many windows have rows that wait for the next revision."""
        return len(self._due_ms)

    def learn(self, state: LedgerState, now_ms: int) -> None:
        """Take over what the ledger holds now: all of it, or the news since the last time."""
        self._cut_below_ms = state.cut_below_ms
        if not state.since:
            # Windows that were published and are not retained are not told, but rows may come for them still.
            known = self._retained | dict.fromkeys(self._due_ms)
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
                self._due_ms.pop(entry.window_id, None)
        # Not where refusals are noted: a flush must not forget of one window what it has to know of another.
        for window_id in list(itertools.islice(self._over, max(0, len(self._over) - _REMEMBERED))):
            del self._over[window_id]

    def kind(self, key: WindowKey) -> SegmentKind:
        """Return what rows for a window that is not known to be open are for."""
        if key.id in self._retained and self._rules.recompute:
            return SegmentKind.RECOMPUTE
        if key.id in self._retained or key.id in self._over:
            return SegmentKind.LATE
        below = self._cut_below_ms
        forgotten = below is not None and key.end_ms is not None and key.end_ms <= below
        return SegmentKind.LATE if forgotten else SegmentKind.WINDOW

    def cut(self, window_ids: Iterable[str]) -> None:
        """Note windows that were cut: they take up what waited for them."""
        for window_id in window_ids:
            self._note(window_id)
            self._due_ms.pop(window_id, None)

    def _note(self, window_id: str) -> None:
        if window_id not in self._over:
            self._retained[window_id] = None

    def refused(self, result: FlushResult) -> None:
        """Note what a refusal of the ledger says of windows."""
        for window_id in result.cut_windows:
            self._note(window_id)
        self.expired(result.expired_windows)

    def expired(self, window_ids: Iterable[str]) -> None:
        """Note windows that are not retained any more."""
        for window_id in window_ids:
            self._retained.pop(window_id, None)
            self._due_ms.pop(window_id, None)
            self._over[window_id] = None

    def registered(self, window_ids: Iterable[str], now_ms: int) -> None:
        """Note windows that have rows in the ledger for their next revision."""
        for window_id in window_ids:
            self._due_ms.setdefault(window_id, now_ms + self._rules.recompute_delay_ms)

    def due(self, now_ms: int, *, at_once: bool) -> tuple[str, ...]:
        """Return the windows that shall be cut again now, those that waited longest first."""
        waiting = sorted(self._due_ms.items(), key=lambda item: (item[1], item[0]))
        return tuple(window_id for window_id, due_ms in waiting if at_once or due_ms <= now_ms)
