"""Tells where the watermark stands, and which rows are kept from moving it: in the log, and to readiness."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from mldserver.coordinator.flush import Ahead
    from mldserver.coordinator.watermark import View

__all__ = ["AheadRows", "Standing"]

log = structlog.get_logger("mldserver")

_MINUTE_MS: Final = 60_000


class Standing:
    """What was told last, and since when rows wait."""

    def __init__(self, view: View, now_ms: int, *, limit_ms: int) -> None:
        """Begin with a view that is not worth a line; ``limit_ms``: how long rows may wait for it to move."""
        self._limit_ms = limit_ms
        self._seen = view
        self._waiting_ms = self._told_ms = now_ms
        self.stuck = False
        """Whether rows wait for longer than they may."""

    def note(self, view: View, now_ms: int, *, waiting: bool) -> None:
        """Take in a view; ``waiting``: there are rows that wait for it to move."""
        seen, self._seen = self._seen, view
        fields = {
            "watermark_ms": view.watermark_ms,
            "held_by": view.holder.shard_id,
            "server": view.holder.server_id,
            "reason": view.holder.reason,
        }
        if view.watermark_ms != seen.watermark_ms:
            log.debug("watermark.advanced", **fields)
        if view.watermark_ms != seen.watermark_ms or not waiting:
            self._waiting_ms = self._told_ms = now_ms
        elif now_ms - self._told_ms >= _MINUTE_MS:
            self._told_ms = now_ms
            log.info("watermark.held", seconds=(now_ms - self._waiting_ms) / 1000, **fields)
        self.stuck = not view.idle and now_ms - self._waiting_ms >= self._limit_ms


class AheadRows:
    """Rows that run too far ahead of their records' arrival: counted, and told once a minute."""

    def __init__(self, now_ms: int, *, max_ahead_ms: int | None) -> None:
        """Begin with none; ``max_ahead_ms``: how far they may run ahead."""
        self._max_ahead_ms = max_ahead_ms
        self._told_ms = now_ms - _MINUTE_MS
        self._untold = 0
        self._furthest: tuple[int, str, str] = (0, "", "")
        self.rows = 0

    def note(self, shard_id: str, ahead: Ahead) -> None:
        """Count a batch's rows."""
        self.rows += ahead.rows
        self._untold += ahead.rows
        self._furthest = max(self._furthest, (ahead.ahead_ms, shard_id, ahead.sequence))

    def tell(self, now_ms: int) -> None:
        """Log what came since the last time, unless that is less than a minute ago."""
        if not self._untold or now_ms - self._told_ms < _MINUTE_MS:
            return
        ahead_ms, shard_id, sequence = self._furthest
        log.warning(
            "row.ahead",
            shard=shard_id,
            sequence=sequence,
            ahead_seconds=ahead_ms / 1000,
            rows=self._untold,
            what=f"The time of record {sequence} lies {timedelta(milliseconds=ahead_ms)} after its arrival.",
            did="Such rows are kept in their own windows; no other window closes because of them.",
            advice="Mend the clock that stamped it. If it is right, raise max_ahead; to have such records as dead"
            " letters, set on_ahead to fail.",
        )
        self._told_ms, self._untold, self._furthest = now_ms, 0, (0, "", "")
