"""What a coordinator goes by."""

from __future__ import annotations

from dataclasses import dataclass

from mldserver.config.settings import FlowSettings

__all__ = ["CoordinatorRules"]


@dataclass(frozen=True, kw_only=True)
class CoordinatorRules(FlowSettings):
    """The settings, and what the handler says of its windows."""

    on_arrival: bool = True
    """Windows are cut on arrival time (False: on a column)."""
    disorder_ms: int = 0
    parks: bool = False
    """Whether records wait behind dead letters of their partition key."""

    @property
    def recompute(self) -> bool:
        """Whether late rows make a new revision of their window; False: they go to the late dataset."""
        return self.late == "recompute"

    @property
    def retained_bytes(self) -> int:
        """Segments of published windows that are kept at most: what waits for its first output must find room."""
        return min(self.retention_bytes, self.segment_disk_bytes // 2)
