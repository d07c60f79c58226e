"""Report progress to status, log and readiness: the watermark, rows from the future, and missing shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import structlog

from mldserver.coordinator.core.lineage import Lineage
from mldserver.coordinator.core.open_windows import MOST_AHEAD, CoordinatorRules
from mldserver.coordinator.core.watermark import View
from mldserver.records import DeadLetter

if TYPE_CHECKING:
    from mldserver.coordinator.core.flush import Ahead

log = structlog.get_logger("mldserver")

_MINUTE_MS: Final = 60_000
_RESTART_MS: Final = 5 * _MINUTE_MS
"""How long a Java daemon may take to start and lease its shards: one to three minutes with KCL's own intervals."""


@dataclass(frozen=True, slots=True)
class CoordinatorStatus:
    """What the coordinator knows right now; counts are since the start of the server."""

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
    unread_shards: int
    """Shards that have not ended, where none has been read for longer than a daemon's restart takes; 0 before that."""
    servers: int
    """Servers on the ledger, this one included; others that only drain are left out."""
    stream_ended: bool
    flush_failing: str
    """Why rows cannot be made durable; empty: they can."""
    flushes: int
    segments: int
    """Files of rows that were registered, and next what they took."""
    segment_bytes_written: int
    latest_letters: tuple[DeadLetter, ...]
    """The oldest first."""
    letters_elsewhere: bool
    """Whether dead letters go elsewhere than into the ledger."""
    late_by_window: Mapping[str, int]
    """Rows that came late, of the windows for which some came lately."""


class Reports:
    """The last reports about the watermark, rows from the future, and missing shards."""

    def __init__(
        self,
        view: View,
        now_ms: int,
        *,
        rules: CoordinatorRules,
        lineage: Lineage,
        owned: Callable[[str], bool],
    ) -> None:
        """Begin with a view that is not logged.

        ``owned``: whether another server has taken a shard. Such a shard is not reported as missing: it will connect.
        """
        self._rules, self._lineage, self._owned = rules, lineage, owned
        # By then leases have moved, and dead servers have expired.
        self._tell_ms = max(rules.settle_time_ms, rules.server_timeout_ms)
        self._missing: set[str] = set()
        self._seen = view
        self._waiting_ms = self._told_ms = now_ms
        self.stuck = False
        """Whether rows wait for longer than they may."""
        self.unread_shards = 0
        """See ``CoordinatorStatus``."""
        self._read_ms = now_ms
        """When a shard was read last, or none waited."""
        self.rows_ahead = self._untold = 0
        self._ahead_told_ms = now_ms - _MINUTE_MS
        self._furthest: tuple[int, str, str] = (0, "", "")

    def report_view(self, view: View, now_ms: int, *, waiting: bool) -> None:
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
        # A shard that is missing is left out after its limit: what holds the watermark for longer needs a person.
        limit_ms = self._rules.missing_limit_ms + self._rules.idle_time_ms
        self.stuck = not view.idle and now_ms - self._waiting_ms >= limit_ms

    def count_unread(self, now_ms: int, *, had_shards: bool) -> None:
        """Look whether shards wait and none is read. ``had_shards``: the ledger has one, so that there was a daemon."""
        unread = self._lineage.unread() if had_shards else 0
        if not unread:
            self._read_ms = now_ms
        limit_ms = min(_RESTART_MS, self._rules.missing_limit_ms)
        self.unread_shards = unread if now_ms - self._read_ms >= limit_ms else 0

    def count_ahead(self, shard_id: str, ahead: Ahead) -> None:
        """Count a batch's rows that run too far ahead of their records' arrival."""
        self.rows_ahead += ahead.rows
        self._untold += ahead.rows
        self._furthest = max(self._furthest, (ahead.ahead_ms, shard_id, ahead.sequence))

    def log_ahead(self, now_ms: int) -> None:
        """Log what ran ahead since the last time, unless that is less than a minute ago."""
        if not self._untold or now_ms - self._ahead_told_ms < _MINUTE_MS:
            return
        ahead_ms, shard_id, sequence = self._furthest
        log.warning(
            "row.ahead",
            shard=shard_id,
            sequence=sequence,
            ahead_seconds=ahead_ms / 1000,
            rows=self._untold,
            what=f"The time of record {sequence} lies {timedelta(milliseconds=ahead_ms)} after its arrival.",
            did="Such rows are kept in separate windows, and do not close other windows. Beyond"
            f" {MOST_AHEAD} such windows, or a tenth of segment_disk_bytes, they go to the late dataset.",
            advice="Mend the clock that stamped it. If it is right, raise max_ahead; to have such records as dead"
            " letters, set on_ahead to fail.",
        )
        self._ahead_told_ms, self._untold, self._furthest = now_ms, 0, (0, "", "")

    def log_missing(self, now_ms: int) -> None:
        """Log which shards are missing; leave out those that are for too long."""
        missing, limit_ms = self._lineage.missing(), self._rules.missing_limit_ms
        self._missing.intersection_update(node.id for node in missing)
        for node in missing:
            missing_ms = now_ms - node.since_ms
            due = self._tell_ms <= missing_ms < limit_ms and not self._owned(node.id)
            if due and node.id not in self._missing:
                self._missing.add(node.id)
                log.warning(
                    "shard.missing",
                    shard=node.id,
                    seconds=missing_ms / 1000,
                    what=f"Shard {node.id} is known but has no connection; no window closes before it returns.",
                    advice="A daemon takes one to three minutes to start and to lease its shards. If none is starting, start the one"
                    f" that owns the shard. After {limit_ms // 1000} s without a connection the shard is left out.",
                )
        for shard_id in self._lineage.leave_out(now_ms, limit_ms):
            log.error(
                "shard.left_out",
                shard=shard_id,
                seconds=limit_ms / 1000,
                what=f"Shard {shard_id} has been missing for {limit_ms // 1000} s.",
                did="It holds the windows no longer: rows it still delivers for closed windows will be late.",
                advice="Start the daemon that owns the shard, or raise missing_limit. `mldserver ledger forget` removes a name"
                " that the stream does not have.",
            )
