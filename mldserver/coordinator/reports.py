"""What status, log and readiness are told: where the watermark stands, rows from the future, shards that are missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

    from mldserver.coordinator.core.flush import Ahead
    from mldserver.coordinator.core.lineage import Lineage
    from mldserver.coordinator.core.watermark import View

log = structlog.get_logger("mldserver")

_MINUTE_MS: Final = 60_000


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


class Reports:
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

    def __init__(self, now_ms: int) -> None:
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


@dataclass(kw_only=True, eq=False, slots=True)
class MissingShards:
    """What was told of the missing shards of a lineage."""

    lineage: Lineage
    tell_ms: int
    """After so long without a connection a shard is told of."""
    limit_ms: int
    """After so long it is left out."""
    owned: Callable[[str], bool]
    """Whether another server has taken a shard, of which nothing is told: it is on its way."""
    _told: set[str] = field(init=False, default_factory=set)

    def look(self, now_ms: int) -> None:
        """Log who is missing; leave out those that are missing for too long."""
        missing = self.lineage.missing()
        self._told.intersection_update(node.id for node in missing)
        for node in missing:
            missing_ms = now_ms - node.since_ms
            due = self.tell_ms <= missing_ms < self.limit_ms and not self.owned(node.id)
            if due and node.id not in self._told:
                self._told.add(node.id)
                log.warning(
                    "shard.missing",
                    shard=node.id,
                    seconds=missing_ms / 1000,
                    what=f"Shard {node.id} is known but has no connection; no window closes before it returns.",
                    advice=f"Start the daemon that owns it. After {self.limit_ms // 1000} s it is left out.",
                )
        for shard_id in self.lineage.leave_out(now_ms, self.limit_ms):
            log.error(
                "shard.left_out",
                shard=shard_id,
                seconds=self.limit_ms / 1000,
                what=f"Shard {shard_id} has been missing for {self.limit_ms // 1000} s.",
                did="It holds the windows no longer: rows it still delivers for closed windows will be late.",
                advice="Start the daemon that owns the shard, or raise missing_limit.",
            )
