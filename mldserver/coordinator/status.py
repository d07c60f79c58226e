"""One snapshot of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mldserver.coordinator.core.watermark import View
    from mldserver.coordinator.flusher import Flusher
    from mldserver.jobs.runner import WindowRunner

__all__ = ["CoordinatorStatus", "status_of"]


@dataclass(frozen=True, slots=True)
class CoordinatorStatus:
    """What the coordinator knows right now; counts are since the start of the server."""

    shards_connected: int
    shards_missing: tuple[str, ...]
    rows_accepted: int
    rows_durable: int
    rows_late: int
    rows_ahead: int
    """Rows whose time ran too far ahead of their records' arrival."""
    dead_letters: int
    buffered_bytes: int
    segment_bytes: int
    windows_open: int
    windows_waiting: int
    """Cut, and not published yet."""
    windows_published: int
    windows_set_aside: int
    windows_halted: tuple[str, ...]
    watermark_ms: int | None
    held_by: str | None
    """The shard that holds the watermark, when it is one shard."""
    held_by_server: str | None
    """The server that holds it, when it is another one."""
    reason: str
    """Why the watermark stands where it stands."""
    stuck: bool
    """Whether rows have waited for it to move for longer than they may."""
    servers: int
    """Servers on the ledger, this one included; others that only drain are left out."""
    stream_ended: bool
    flush_failing: bool


def status_of(
    flusher: Flusher,
    runner: WindowRunner | None,
    view: View,
    *,
    connected: int,
    missing: tuple[str, ...],
    rows_accepted: int,
    rows_ahead: int,
    buffered_bytes: int,
    segment_bytes: int,
    servers: int,
    stream_ended: bool,
    stuck: bool,
    flush_failing: bool,
) -> CoordinatorStatus:
    """Return a snapshot of what a coordinator's parts count."""
    return CoordinatorStatus(
        shards_connected=connected,
        shards_missing=missing,
        rows_accepted=rows_accepted,
        rows_durable=flusher.rows_durable,
        rows_late=flusher.rows_late,
        rows_ahead=rows_ahead,
        dead_letters=flusher.dead_letters,
        buffered_bytes=buffered_bytes,
        segment_bytes=segment_bytes,
        windows_open=len(flusher.open_windows or ()),
        windows_waiting=runner.waiting if runner else 0,
        windows_published=runner.published if runner else 0,
        windows_set_aside=runner.set_aside if runner else 0,
        windows_halted=tuple(sorted(runner.halted)) if runner else (),
        watermark_ms=view.watermark_ms,
        held_by=view.holder.shard_id,
        held_by_server=view.holder.server_id,
        reason=view.holder.reason,
        stuck=stuck,
        servers=servers,
        stream_ended=stream_ended,
        flush_failing=flush_failing,
    )
