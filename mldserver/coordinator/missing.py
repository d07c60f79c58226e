"""Looks after shards that are expected and have no connection: says so once, and leaves them out after a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

    from mldserver.coordinator.lineage import Lineage

__all__ = ["MissingShards"]

log = structlog.get_logger("mldserver")


class MissingShards:
    """What was told of the missing shards of a lineage."""

    def __init__(
        self, lineage: Lineage, *, tell_ms: int, limit_ms: int, owned: Callable[[str], bool]
    ) -> None:
        """Tell of a shard after ``tell_ms`` without a connection, leave it out after ``limit_ms``.

        ``owned``: whether another server has taken a shard, of which nothing is told: it is on its way.
        """
        self._lineage = lineage
        self._tell_ms = tell_ms
        self._owned = owned
        self._limit_ms = limit_ms
        self._told: set[str] = set()

    def look(self, now_ms: int) -> None:
        """Log who is missing; leave out those that are missing for too long."""
        missing = self._lineage.missing()
        self._told.intersection_update(node.id for node in missing)
        for node in missing:
            missing_ms = now_ms - node.since_ms
            due = self._tell_ms <= missing_ms < self._limit_ms and not self._owned(node.id)
            if due and node.id not in self._told:
                self._told.add(node.id)
                log.warning(
                    "shard.missing",
                    shard=node.id,
                    seconds=missing_ms / 1000,
                    what=f"Shard {node.id} is known but has no connection; no window closes before it returns.",
                    advice=f"Start the daemon that owns it. After {self._limit_ms // 1000} s it is left out.",
                )
        for shard_id in self._lineage.leave_out(now_ms, self._limit_ms):
            log.error(
                "shard.left_out",
                shard=shard_id,
                seconds=self._limit_ms / 1000,
                what=f"Shard {shard_id} has been missing for {self._limit_ms // 1000} s.",
                did="It holds the windows no longer: rows it still delivers for closed windows will be late.",
                advice="Start the daemon that owns the shard, or raise missing_limit.",
            )
