"""What the ledger holds of windows, kept up by its news: a synchronous core.

A day of one-second windows is 86,400 retained ones. What a cycle must know of them all (what their segments take, which
of them are under way) is kept here and changed by what changed, so that a cycle costs what happened since the last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mldserver.ledger.contract import WindowState

if TYPE_CHECKING:
    from mldserver.ledger.contract import LedgerState, WindowEntry

__all__ = ["SegmentUsage"]

_UNDER_WAY: Final = frozenset({WindowState.CUT, WindowState.COMMITTED})


class SegmentUsage:
    """The windows of all servers, as of the latest news."""

    def __init__(self) -> None:
        """Know of none yet."""
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
            self._count(entry)
            self.under_way.pop(entry.window_id, None)
            if entry.state in _UNDER_WAY:
                self.under_way[entry.window_id] = entry

    def _count(self, entry: WindowEntry) -> None:
        size = sum(segment.bytes for segment in (*entry.segments, *entry.pending))
        opened = size if entry.state is WindowState.OPEN else 0
        before, opened_before = self._bytes.pop(entry.window_id, (0, 0))
        self.segment_bytes += size - before
        self.open_bytes += opened - opened_before
        if size:
            self._bytes[entry.window_id] = size, opened
