"""Tells in the log where the watermark stands: when it moves, and once a minute while it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from mldserver.coordinator.watermark import View

__all__ = ["Standing"]

log = structlog.get_logger("mldserver")

_MINUTE_MS: Final = 60_000


class Standing:
    """What was told last."""

    def __init__(self, view: View, now_ms: int) -> None:
        """Begin with a view that is not worth a line."""
        self._seen = view
        self._moved_ms = now_ms

    def note(self, view: View, now_ms: int, *, waiting: bool) -> None:
        """Take in a view; ``waiting``: there are windows that wait for it."""
        seen, self._seen = self._seen, view
        told = {
            "watermark_ms": view.watermark_ms,
            "held_by": view.holder.shard_id,
            "server": view.holder.server_id,
            "reason": view.holder.reason,
        }
        if view.watermark_ms != seen.watermark_ms:
            self._moved_ms = now_ms
            log.debug("watermark.advanced", **told)
        elif waiting and now_ms - self._moved_ms >= _MINUTE_MS:
            self._moved_ms = now_ms
            log.info("watermark.held", seconds=_MINUTE_MS // 1000, **told)
