"""What is let go of, and when: segments of old windows, then the windows, then the shards that ended.

A step a cycle, so that nothing waits long for what a server finds that comes back after a day.

A shard that ended must be remembered for as long as the stream keeps records of it (a day by default, a year at most;
AWS limits). Whoever deletes the daemon's lease table has the shard read again from its beginning, and its rows are known
for duplicates by its position only; a daemon that stopped before it had checkpointed the shard's end comes back where
no position is known, and is refused; and children that are read late find no time to go on from. So where the stream is
named its own listing decides, which names a shard for exactly that long; where it is not, a time that is set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mldserver.base.clock import Clock
    from mldserver.coordinator.core.lineage import Lineage
    from mldserver.coordinator.core.rules import CoordinatorRules
    from mldserver.coordinator.flusher import Flusher

__all__ = ["LetGo", "Retention"]

_PRUNE_MS: Final = 3_600_000
"""How often the ledger is asked to forget what is old."""

_HEARD_MS: Final = 600_000
"""How much longer than it is retained a window is remembered: by then every server has heard that it is over, and need
not read the whole ledger anew because news of it are gone."""


@dataclass(frozen=True, slots=True)
class LetGo:
    """What one step came to."""

    bytes: int
    """Of files deleted."""
    shards: tuple[str, ...]
    """Ended shards that were forgotten."""
    more: bool
    """Whether the next step should follow at once."""


class Retention:
    """When what was let go of last."""

    def __init__(
        self, *, rules: CoordinatorRules, flusher: Flusher, lineage: Lineage, clock: Clock, named: bool
    ) -> None:
        """Forget nothing within the first hour; where the stream is ``named``, no shard before it was listed."""
        self._rules = rules
        self._flusher = flusher
        self._lineage = lineage
        self._clock = clock
        self._pruned_ms = clock.steady_ms()
        self.listed: frozenset[str] | None = None if named else frozenset()
        """The shards that the stream still lists; None before it has, and empty where it is not named."""

    async def step(self, held_bytes: int) -> LetGo:
        """Let go of what is past its retention. ``held_bytes``: what all segments take.

        Raises LedgerError and OSError; repeatable.
        """
        # The ledger keeps times of day; what only this server remembers goes by its steady time.
        wall_ms, now_ms = self._clock.now_ms(), self._clock.steady_ms()
        deleted = await self._flusher.expire(wall_ms - self._rules.retention_ms, held_bytes)
        shards: tuple[str, ...] = ()
        if self._flusher.pruning or now_ms - self._pruned_ms >= _PRUNE_MS:
            keep, ended_ms = self.listed or frozenset(), self._rules.shard_retention_ms
            shards_before_ms = 0 if self.listed is None else wall_ms - ended_ms
            await self._flusher.prune(wall_ms - self._rules.retention_ms - _HEARD_MS, shards_before_ms, keep)
            self._pruned_ms = now_ms
            if self.listed is not None:
                shards = self._lineage.forget_ended(now_ms - ended_ms, keep=keep)
        return LetGo(deleted, shards, self._flusher.expiring or self._flusher.pruning)
