"""Readiness: whether everything works, and if not, what waits for what."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mldserver.assembly import Parts


class Readiness:
    """Green once every part works; red while something needs a person or a restart."""

    def __init__(self) -> None:
        """Start red, silently: a server that starts is not broken."""
        self._green = asyncio.Event()
        self._told_broken = False
        """Whether it was told, since it was green last, that something is broken."""

    @property
    def is_green(self) -> bool:
        """Whether everything works now."""
        return self._green.is_set()

    async def green(self) -> None:
        """Return once everything works."""
        await self._green.wait()

    def look(self, parts: Parts) -> str | None:
        """Look at the parts; return a change that is worth telling: why it turned red, or nothing (``""``) where it turned green."""
        red = _red(parts)
        if red is None:
            was_green = self._green.is_set()
            self._green.set()
            self._told_broken = False
            return None if was_green else ""
        # Spark that is still starting is no news; what is broken is, also where it breaks while Spark starts again.
        reason, broken = red
        news = self._green.is_set() or (broken and not self._told_broken)
        self._green.clear()
        if not news:
            return None
        self._told_broken = broken
        return reason


def _red(parts: Parts) -> tuple[str, bool] | None:
    """Return why it is red, and whether that is more than a part that has not started yet; None: it is green."""
    if parts.source.waits_for is not None:
        return parts.source.waits_for, False
    status, trouble = parts.coordinator.status(), parts.runtime.trouble
    if status.windows_halted:
        trouble = f"window {status.windows_halted[0]} keeps failing and every other waits for it"
    elif status.flush_failing:
        trouble = "rows cannot be made durable: see the latest flush.failed"
    elif status.stuck:
        who = "the watermark" if status.held_by is None else f"shard {status.held_by}"
        where = "" if status.held_by_server is None else f" at server {status.held_by_server}"
        trouble = f"{who}{where} stands still ({status.reason}), and windows that are due wait for it"
    if trouble is not None:
        return trouble, True
    if parts.engine is not None and not parts.engine.is_ready:
        return "Spark is not running: windows wait for it, rows go on being stored", False
    return None
