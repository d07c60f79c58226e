"""Readiness: whether everything works, and if not, what waits for what."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mldserver.assembly import Parts

__all__ = ["Change", "Readiness"]


class Change(NamedTuple):
    """Readiness turned."""

    ready: bool
    reason: str


class Readiness:
    """Green once every part works; red while something needs a person or a restart."""

    def __init__(self) -> None:
        """Start red, silently: a server that starts is not broken."""
        self._green = asyncio.Event()
        self._was_green = False

    @property
    def is_green(self) -> bool:
        """Whether everything works now."""
        return self._green.is_set()

    async def green(self) -> None:
        """Return once everything works."""
        await self._green.wait()

    def look(self, parts: Parts) -> Change | None:
        """Look at the parts; return a change, if there is one worth telling."""
        reason = _reason(parts)
        if reason is None:
            if self._green.is_set():
                return None
            self._green.set()
            self._was_green = True
            return Change(ready=True, reason="")
        if not self._green.is_set():
            return None
        self._green.clear()
        return Change(ready=False, reason=reason)


def _reason(parts: Parts) -> str | None:
    status = parts.coordinator.status()
    if not parts.listener.is_listening:
        return "no address is listened on"
    if parts.engine is not None and not parts.engine.is_ready:
        return "Spark is not running: windows wait for it, rows go on being stored"
    if status.windows_halted:
        return f"window {status.windows_halted[0]} keeps failing and every other waits for it"
    if status.flush_failing:
        return "rows cannot be made durable: see the latest flush.failed"
    return None
