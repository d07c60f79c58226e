"""What the server tells of itself, and whether it is ready: made from its parts, in its own process."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Final

import structlog

from mldserver import __version__
from mldserver.admin.status import Status

if TYPE_CHECKING:
    from mldserver.assembly import Parts
    from mldserver.base.clock import Clock
    from mldserver.config.settings import Settings

log = structlog.get_logger("mldserver")

_LOOK_SECONDS: Final = 0.25


class Readiness:
    """Green once every part works; red while something needs a person or a restart."""

    def __init__(self) -> None:
        """Start red, silently: a server that starts is not broken."""
        self.green = asyncio.Event()
        """Set while everything works; read only."""
        self._told_broken = False
        """Whether it was told, since it was green last, that something is broken."""

    def look(self, parts: Parts) -> str | None:
        """Look at the parts; return a change that is worth telling: why it turned red, or nothing (``""``) where it turned green."""
        red = unready(parts)
        if not red:
            was_green = self.green.is_set()
            self.green.set()
            self._told_broken = False
            return None if was_green else ""
        # Spark that is still starting is no news; what is broken is, also where it breaks while Spark starts again.
        reason, broken = red[0]
        news = self.green.is_set() or (broken and not self._told_broken)
        self.green.clear()
        if not news:
            return None
        self._told_broken = broken
        return reason

    async def watch(self, parts: Parts, clock: Clock, stopping: asyncio.Event) -> None:
        """Look again and again, and log what is worth telling, until cancelled."""
        began_ms = clock.steady_ms()
        while True:
            reason = self.look(parts)
            if reason == "":
                log.info("server.ready", seconds=(clock.steady_ms() - began_ms) / 1000)
            elif reason is not None and not stopping.is_set():
                log.error("server.unready", reason=reason)
            await clock.sleep(_LOOK_SECONDS)


def unready(parts: Parts) -> list[tuple[str, bool]]:
    """Return why it is red, the most urgent first, and whether each is more than a part that has not started yet."""
    status = parts.coordinator.status()
    found: list[tuple[str, bool]] = []
    if parts.source.waits_for is not None:
        found.append((parts.source.waits_for, False))
    if status.windows_halted:
        window = status.windows_halted[0]
        found.append((f"window {window} keeps failing and every other waits for it", True))
    if status.flush_failing:
        found.append(("rows cannot be made durable: see the latest flush.failed", True))
    if status.stuck:
        who = "the watermark" if status.held_by is None else f"shard {status.held_by}"
        where = "" if status.held_by_server is None else f" at server {status.held_by_server}"
        found.append(
            (f"{who}{where} stands still ({status.reason}), and windows that are due wait for it", True)
        )
    if parts.runtime.trouble is not None:
        found.append((parts.runtime.trouble, True))
    if parts.engine is not None and not parts.engine.is_ready:
        why = parts.engine.trouble
        reason = "Spark is not running" if why is None else f"Spark computes no window. {why}"
        found.append((f"{reason}: windows wait for it, rows go on being stored", why is not None))
    return found


def document(settings: Settings, parts: Parts | None, *, doing: str, now_ms: int, started_ms: int) -> Status:
    """Return the status document. ``parts``: None until they work; ``doing``: what a server does that is not at work."""
    stopping = doing.startswith("stops")
    reasons = [f"the server {doing}"] if stopping or parts is None else [why for why, _ in unready(parts)]
    return Status(
        taken_ms=now_ms,
        pipeline=settings.pipeline,
        handler=settings.handler,
        version=__version__,
        host=socket.gethostname(),
        pid=os.getpid(),
        server_id=settings.server_id or "",
        started_ms=started_ms,
        ready=not reasons,
        reasons=tuple(reasons),
        stopping=stopping,
    )
