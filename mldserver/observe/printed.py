"""What another process prints on one of its standard streams, within bounds: a flood is cut, and what is cut is counted.

A handler, or a function on Spark's workers, that prints a line for each row makes millions of them: were all of them
logged, the event loop would have time for nothing else.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import structlog

from mldserver.observe.flood import Flood

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Printed"]

log = structlog.get_logger("mldserver")

_TOLD_SECONDS: Final = 1.0
"""How often at most it is told that lines were left out."""


class Printed:
    """One stream's lines on their way into the log."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begin with room for a burst; ``now`` gives seconds."""
        self._now = now
        self._flood = Flood(now)
        self._lost = 0
        self._since = ""
        self._told = now()

    def passes(self) -> bool:
        """Whether one more line is to be logged; it is counted otherwise."""
        if self._lost and self._now() - self._told >= _TOLD_SECONDS:
            self.tell()
        if self._flood.passes():
            return True
        if not self._lost:
            self._since = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        self._lost += 1
        return False

    def tell(self) -> None:
        """Log how many lines were left out since that was told last, if there were any."""
        if self._lost:
            log.warning("log.lost", lines=self._lost, since=self._since)
            self._lost, self._told = 0, self._now()
