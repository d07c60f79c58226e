"""Holds shards back while memory or disk is short: the answers to their daemons wait.

Memory is freed by the flush that is asked for at the same time, whoever holds the watermark: everyone waits for it.

Disk is freed by windows. While one is being computed, or what is there belongs to none that is open, nobody's progress
frees anything, and everyone waits. Else it takes the watermark to close the next one: whoever holds it goes on, and those
ahead of it wait.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from mldserver.coordinator.budget import Load, shards_to_hold

if TYPE_CHECKING:
    from mldserver.clock import Clock
    from mldserver.coordinator.buffer import Buffer
    from mldserver.coordinator.lineage import Lineage
    from mldserver.coordinator.picture import Picture
    from mldserver.coordinator.rules import CoordinatorRules
    from mldserver.coordinator.shard_session import ShardSession
    from mldserver.coordinator.watermark import Watermark

__all__ = ["Holding"]

log = structlog.get_logger("mldserver")


class Holding:
    """Which shards wait now, and how long those that ask must."""

    def __init__(
        self, *, rules: CoordinatorRules, buffer: Buffer, lineage: Lineage, watermark: Watermark, clock: Clock
    ) -> None:
        """Hold nobody; ``buffer``, ``lineage`` and ``watermark`` say who is how far ahead with how much."""
        self._rules = rules
        self._buffer = buffer
        self._lineage = lineage
        self._watermark = watermark
        self._clock = clock
        self._held: frozenset[str] = frozenset()
        self._changed = asyncio.Condition()
        self.segment_bytes = 0
        """What the segments on disk take."""
        self.settled_bytes = 0
        """What those of them take whose windows are not open: closing windows frees none of it."""
        self.computing = False
        """Whether a window is being computed, or waits for that."""
        self.holder: str | None = None
        """The shard that holds the watermark."""

    def count(self, picture: Picture, doomed_bytes: int) -> None:
        """Count what is on disk anew: other servers write and delete segments too."""
        self.segment_bytes = picture.segment_bytes + doomed_bytes
        self.settled_bytes = self.segment_bytes - picture.open_bytes
        self.computing = bool(picture.under_way)

    def weigh(self) -> None:
        """Decide anew who waits."""
        budget = self._rules.segment_bytes
        if self._buffer.bytes <= self._rules.buffer_bytes and self.segment_bytes <= budget:
            self._held = (
                frozenset()
            )  # asked with every batch: it must not take longer the more shards there are
            return
        loads = [Load(node.id, self._watermark.shard_ms(node.id)) for node in self._lineage.connected()]
        if self._buffer.bytes > self._rules.buffer_bytes:
            self._held = frozenset(load.shard_id for load in loads)
        else:
            in_vain = self.computing or self.settled_bytes > budget
            self._held = shards_to_hold(loads, holder=None if in_vain else self.holder)

    def is_held(self, session: ShardSession) -> bool:
        """Whether the session's shard must wait."""
        self.weigh()
        return session.shard_id in self._held

    async def wait(self, session: ShardSession) -> None:
        """Wait while the session's shard is held back."""
        began_ms = self._clock.now_ms()
        log.info(
            "shard.held",
            shard=session.shard_id,
            buffered_bytes=self._buffer.bytes,
            budget_bytes=self._rules.buffer_bytes,
        )
        async with self._changed:
            await self._changed.wait_for(lambda: not session.alive or session.shard_id not in self._held)
        log.info("shard.released", shard=session.shard_id, seconds=(self._clock.now_ms() - began_ms) / 1000)

    async def release(self) -> None:
        """Decide anew, and let those go on that need not wait."""
        self.weigh()
        async with self._changed:
            self._changed.notify_all()
