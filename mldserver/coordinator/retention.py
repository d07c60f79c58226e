"""What is let go of, and when: segments of old windows, then the windows, then the shards that ended.

A step a cycle, so that nothing waits long for what a server finds that comes back after a day.

A shard that ended must be remembered for as long as the stream keeps records of it (a day by default, a year at most;
AWS limits). Whoever deletes the daemon's lease table has the shard read again from its beginning, and its rows are known
for duplicates by its position only; a daemon that stopped before it had checkpointed the shard's end comes back where
no position is known, and is refused; and children that are read late find no time to go on from. So where the stream is
named its own listing decides, which names a shard for exactly that long; where it is not, a time that is set.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from mldserver.base.kill_points import kill_point

if TYPE_CHECKING:
    from mldserver.base.clock import Clock
    from mldserver.coordinator.core.lineage import Lineage
    from mldserver.coordinator.core.windows import CoordinatorRules, CutWindows
    from mldserver.ledger.operations import Ledger
    from mldserver.output.store import Garbage

log = structlog.get_logger("mldserver")

_EXPIRE_MS: Final = 60_000
"""How often the ledger is asked for windows to expire while their segments take less than their share of the disk."""

_EXPIRED: Final = 500
"""How many windows expire at a time: a server that comes back after a day must not delete for minutes in one cycle."""

_PRUNED: Final = 5000
"""How many windows are forgotten at a time."""

_PRUNE_MS: Final = 3_600_000
"""How often the ledger is asked to forget what is old."""

_HEARD_MS: Final = 600_000
"""How much longer than it is retained a window is remembered: by then every server has heard that it is over, and need
not read the whole ledger anew because news of it are gone."""


@dataclass(kw_only=True, eq=False, slots=True)
class Retention:
    """When what was let go of last. Nothing is forgotten within the first hour."""

    rules: CoordinatorRules
    ledger: Ledger
    cut_windows: CutWindows
    garbage: Garbage
    lineage: Lineage
    clock: Clock
    listed: frozenset[str] | None
    """The shards that the stream still lists; None before it has, and empty where it is not named."""
    _expired_ms: int = field(init=False)
    _pruned_ms: int = field(init=False)
    _expiring: bool = field(init=False, default=False)
    """Whether more windows may have to expire now."""
    _pruning: bool = field(init=False, default=False)
    """Whether more may have to be forgotten."""

    def __post_init__(self) -> None:
        self._expired_ms = self._pruned_ms = self.clock.steady_ms()

    async def step(self, held_bytes: int) -> tuple[int, tuple[str, ...], bool]:
        """Let go of what is past its retention. ``held_bytes``: what all segments take.

        Returns the bytes of files deleted, the ended shards that were forgotten, and whether the next step should follow
        at once. Raises LedgerError and OSError; repeatable.
        """
        # The ledger keeps times of day; what only this server remembers goes by its steady time.
        wall_ms, now_ms = self.clock.now_ms(), self.clock.steady_ms()
        deleted = await self.expire(wall_ms - self.rules.retention_ms, held_bytes)
        shards: tuple[str, ...] = ()
        if self._pruning or now_ms - self._pruned_ms >= _PRUNE_MS:
            keep, ended_ms = self.listed or frozenset(), self.rules.shard_retention_ms
            pruned = await self.ledger.prune(
                windows_before_ms=wall_ms - self.rules.retention_ms - _HEARD_MS,
                shards_before_ms=0 if self.listed is None else wall_ms - ended_ms,
                keep_shards=keep,
                limit=_PRUNED,
            )
            self._pruning, self._pruned_ms = pruned >= _PRUNED, now_ms
            if self.listed is not None:
                shards = self.lineage.forget_ended(now_ms - ended_ms, keep=keep)
        return deleted, shards, self._expiring or self._pruning

    async def expire(self, published_before_ms: int, held_bytes: int) -> int:
        """Stop retaining windows that are too old, or too large together; return the bytes of files deleted.

        ``held_bytes``: what all segments take. Asks the ledger only now and then while that is little.
        """
        now_ms = self.clock.steady_ms()
        soon = held_bytes > self.rules.retained_bytes or self._expiring
        if not soon and now_ms - self._expired_ms < _EXPIRE_MS:
            return await self.garbage.delete()
        self._expired_ms = now_ms
        free = await self.ledger.expire(
            published_before_ms=published_before_ms, keep_bytes=self.rules.retained_bytes, limit=_EXPIRED
        )
        kill_point("window.expired")
        windows = dict.fromkeys(segment.window_id for segment in free)
        self._expiring = len(windows) >= _EXPIRED
        self.cut_windows.expired(windows)
        if free:
            log.debug("window.expired", windows=len(windows), segments=len(free))
        self.garbage.add(free)
        return await self.garbage.delete()
