"""Windows that are cut: where rows go that still come for them, and when they are computed again. A synchronous core.

A row that comes for a window that is cut is late. By policy it waits for the window's next revision, as long as the
ledger retains the window's segments, or it goes to the late dataset. Only the ledger knows for certain what is cut and
what is retained (another server may have done either): what is held here is a picture of it, corrected by refusals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mldserver.state.ledger import SegmentKind, WindowState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mldserver.coordinator.windows import WindowKey
    from mldserver.state.ledger import FlushResult, LedgerState

__all__ = ["CutWindows", "LateRules"]

_REMEMBERED = 10_000
"""How many windows that the ledger does not tell of any more are known to be cut. For one that is forgotten the ledger
refuses the late rows, which are then planned again."""


@dataclass(frozen=True, slots=True)
class LateRules:
    """What becomes of late rows."""

    recompute: bool = True
    """Whether they make a new revision of their window; False: they go to the late dataset."""
    delay_ms: int = 60_000
    """How long late rows of one window are gathered before it is computed again."""
    retained_bytes: int = 10 << 30
    """Segments of published windows that are kept at most, in bytes."""


class CutWindows:
    """Which windows are cut, which of them are retained, and which have late rows waiting."""

    def __init__(self, rules: LateRules) -> None:
        """Know of none yet."""
        self._rules = rules
        self._retained: dict[str, bool] = {}
        """Every window known to be cut, and whether late rows still lead to a revision."""
        self._cut_below_ms: int | None = None
        self._due_ms: dict[str, int] = {}
        """Windows with rows that wait for the next revision, and when they shall be computed again."""

    @property
    def waiting(self) -> int:
        """How many windows have rows that wait for the next revision."""
        return len(self._due_ms)

    def learn(self, state: LedgerState, now_ms: int) -> None:
        """Take over what the ledger holds now."""
        self._cut_below_ms = state.cut_below_ms
        # Windows that were published and are not retained are not told any more, but rows may come for them still.
        gone = [window_id for window_id in self._retained if window_id not in state.windows]
        self._retained = dict.fromkeys(gone[-_REMEMBERED:], False)
        waiting = self._due_ms
        self._due_ms = {}
        for entry in state.windows.values():
            if entry.state is WindowState.OPEN:
                continue
            self._retained[entry.window_id] = entry.retained
            # A window that was set aside waits for a person, and its late rows with it.
            if entry.pending and entry.state is not WindowState.SET_ASIDE:
                due_ms = waiting.get(entry.window_id, now_ms + self._rules.delay_ms)
                self._due_ms[entry.window_id] = due_ms

    def kind(self, key: WindowKey) -> SegmentKind:
        """Return what rows for a window that is not known to be open are for."""
        retained = self._retained.get(key.id)
        if retained is None:
            below = self._cut_below_ms
            forgotten = below is not None and key.end_ms is not None and key.end_ms <= below
            return SegmentKind.LATE if forgotten else SegmentKind.WINDOW
        return SegmentKind.RECOMPUTE if retained and self._rules.recompute else SegmentKind.LATE

    def cut(self, window_ids: Iterable[str]) -> None:
        """Note windows that were cut: they take up what waited for them."""
        for window_id in window_ids:
            self._retained.setdefault(window_id, True)
            self._due_ms.pop(window_id, None)

    def refused(self, result: FlushResult) -> None:
        """Note what a refusal of the ledger says of windows."""
        for window_id in result.cut_windows:
            self._retained.setdefault(window_id, True)
        self.expired(result.expired_windows)

    def expired(self, window_ids: Iterable[str]) -> None:
        """Note windows that are not retained any more."""
        for window_id in window_ids:
            self._retained[window_id] = False

    def registered(self, window_ids: Iterable[str], now_ms: int) -> None:
        """Note windows that have rows in the ledger for their next revision."""
        for window_id in window_ids:
            self._due_ms.setdefault(window_id, now_ms + self._rules.delay_ms)

    def due(self, now_ms: int, *, at_once: bool) -> tuple[str, ...]:
        """Return the windows that shall be cut again now, those that waited longest first."""
        waiting = sorted(self._due_ms.items(), key=lambda item: (item[1], item[0]))
        return tuple(window_id for window_id, due_ms in waiting if at_once or due_ms <= now_ms)
