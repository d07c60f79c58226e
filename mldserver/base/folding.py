"""Folds equal log lines: the first is logged at once, further ones are counted and logged once a minute with their number."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final

_FOLD_MS: Final = 60_000


@dataclass(slots=True)
class Folding:
    """Decides which of equal events are logged: for events that records and peers can cause as often as they like."""

    now_ms: Callable[[], int]
    """Steady milliseconds."""
    most: int = 1_000
    """Keys that are remembered. Beyond that the key that was not seen for longest is forgotten, which costs a line."""
    _seen: dict[Hashable, tuple[int, int]] = field(default_factory=dict)
    """For each key: when it was logged last, and how many events were not logged since."""

    def count(self, key: Hashable) -> int:
        """Count an event; return how many events with this key to log in one line now. 0: log nothing yet."""
        now_ms = self.now_ms()
        logged_ms, unlogged = self._seen.pop(key, (now_ms - _FOLD_MS, 0))
        due = now_ms - logged_ms >= _FOLD_MS
        self._seen[key] = (now_ms, 0) if due else (logged_ms, unlogged + 1)
        if len(self._seen) > self.most:
            del self._seen[next(iter(self._seen))]
        return unlogged + 1 if due else 0
