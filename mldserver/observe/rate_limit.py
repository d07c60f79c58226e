"""How many lines of others' making get into the log: a burst, then so many a second. Synchronous, no I/O."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BURST", "LINES_A_SECOND", "RateLimit"]

LINES_A_SECOND: Final = 200
BURST: Final = 1000


class RateLimit:
    """Lets a burst pass, then so many lines a second."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begin with room for a burst; ``now`` gives seconds."""
        self._now = now
        self._room = float(BURST)
        self._at = now()

    def passes(self) -> bool:
        """Whether one more line does."""
        now = self._now()
        self._room = min(float(BURST), self._room + (now - self._at) * LINES_A_SECOND)
        self._at = now
        if self._room < 1:
            return False
        self._room -= 1
        return True
