"""Readiness: whether everything works, and if not, what waits for what."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mldserver.assembly import Parts
    from mldserver.coordinator.reports import CoordinatorStatus


class Change(NamedTuple):
    """Readiness turned."""

    ready: bool
    reason: str


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

    def look(self, parts: Parts) -> Change | None:
        """Look at the parts; return a change, if there is one worth telling."""
        red = _reason(parts)
        if red is None:
            if self._green.is_set():
                return None
            self._green.set()
            self._told_broken = False
            return Change(ready=True, reason="")
        # Spark that is still starting is no news; what is broken is, also where it breaks while Spark starts again.
        news = self._green.is_set() or (red.broken and not self._told_broken)
        self._green.clear()
        if not news:
            return None
        self._told_broken = red.broken
        return Change(ready=False, reason=red.reason)


class _Red(NamedTuple):
    reason: str
    broken: bool
    """Whether it is more than a part that has not started yet."""


def _reason(parts: Parts) -> _Red | None:
    if parts.source.waits_for is not None:
        return _Red(parts.source.waits_for, broken=False)
    trouble = _trouble(parts.coordinator.status()) or parts.runtime.trouble
    if trouble is not None:
        return _Red(trouble, broken=True)
    if parts.engine is not None and not parts.engine.is_ready:
        return _Red("Spark is not running: windows wait for it, rows go on being stored", broken=False)
    return None


def _trouble(status: CoordinatorStatus) -> str | None:
    if status.windows_halted:
        return f"window {status.windows_halted[0]} keeps failing and every other waits for it"
    if status.flush_failing:
        return "rows cannot be made durable: see the latest flush.failed"
    if status.stuck:
        who = "the watermark" if status.held_by is None else f"shard {status.held_by}"
        where = "" if status.held_by_server is None else f" at server {status.held_by_server}"
        return f"{who}{where} stands still ({status.reason}), and windows that are due wait for it"
    return None
