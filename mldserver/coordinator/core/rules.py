"""What a coordinator goes by."""

from __future__ import annotations

from dataclasses import dataclass, field

from mldserver.coordinator.core.late import LateRules
from mldserver.coordinator.core.watermark import WatermarkRules

__all__ = ["CoordinatorRules"]


@dataclass(frozen=True, slots=True)
class CoordinatorRules:
    """What the coordinator goes by; times in milliseconds, sizes in bytes."""

    flush_interval_ms: int = 5_000
    flush_bytes: int = 64 << 20
    buffer_bytes: int = 512 << 20
    segment_bytes: int = 50 << 30
    missing_limit_ms: int = 600_000
    retention_ms: int = 86_400_000
    """How long published windows are remembered, and their segments retained for late rows."""
    shard_retention_ms: int = 8 * 86_400_000
    """How long ended shards are remembered at least: longer than the stream keeps records (see ``retention.py``)."""
    accept_gap: bool = False
    parks: bool = False
    """Whether records wait behind dead letters of their partition key."""
    server_timeout_ms: int = 30_000
    """A server that has not beaten for this long is taken for dead by the others."""
    late: LateRules = field(default_factory=LateRules)
    max_ahead_ms: int | None = 600_000
    """How far a row's event time may run ahead of its record's arrival and still say how far its shard is."""
    watermark: WatermarkRules = field(default_factory=WatermarkRules)
