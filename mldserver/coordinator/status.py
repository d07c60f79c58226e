"""One snapshot of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CoordinatorStatus"]


@dataclass(frozen=True, slots=True)
class CoordinatorStatus:
    """What the coordinator knows right now; counts are since the start of the server."""

    shards_connected: int
    shards_missing: tuple[str, ...]
    rows_accepted: int
    rows_durable: int
    rows_late: int
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
    servers: int
    """Servers on the ledger, this one included."""
    stream_ended: bool
    flush_failing: bool
