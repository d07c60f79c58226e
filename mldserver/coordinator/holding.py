"""Holds shards back while memory or disk is short: the answers to their daemons wait."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from mldserver.coordinator.budget import Load, shards_to_hold

if TYPE_CHECKING:
    from mldserver.clock import Clock
    from mldserver.coordinator.buffer import Buffer
    from mldserver.coordinator.lineage import Lineage
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
        self.holder: str | None = None
        """The shard that holds the watermark, and is never held back itself."""
        self.failing = False
        """A flush that keeps failing frees nothing, whoever holds the watermark: then everyone waits."""

    def weigh(self) -> None:
        """Decide anew who waits."""
        loads = [
            Load(node.id, self._buffer.shard_bytes(node.id), self._watermark.shard_ms(node.id))
            for node in self._lineage.connected()
        ]
        memory = shards_to_hold(
            loads,
            used=self._buffer.bytes,
            budget=self._rules.buffer_bytes,
            holder=None if self.failing else self.holder,
        )
        disk = shards_to_hold(
            [load._replace(bytes=0) for load in loads],
            used=self.segment_bytes,
            budget=self._rules.segment_bytes,
            holder=self.holder,
        )
        self._held = memory | disk

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
