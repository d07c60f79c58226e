"""Hold shards back while memory or disk is short, or while an operator pauses them: their daemons' answers wait.

The daemon of a held shard sends no more records and renews its lease. Nothing is lost.

A flush, requested at the same time, frees memory. Above 75 % of the bound the shards ahead of the watermark wait, and
the shard that holds the watermark continues. Above the bound all shards wait, because only a flush frees memory.

Windows free disk. While a window is computed, or while segments of windows that are not open exceed the bound alone,
no shard's progress frees disk, and all shards wait. Otherwise the watermark must close the next window: its holder
continues, and the shards ahead of it wait.

At an orderly stop a shard waits only for memory, and only between batches that were answered early: more of them follow,
and the flush that ends the wait is the one that the stop needs too.

A pause holds only the answer that a daemon waits for. The server finishes the batches that it has already answered.
A pause of all shards is in the ledger, so that every server follows it and a restart keeps it. It and a drain, which pauses one
shard, make the accepted records durable and checkpoint them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from mldserver.base.clock import Clock
from mldserver.coordinator.core.sessions import Session
from mldserver.coordinator.core.watermark import Watermark

if TYPE_CHECKING:
    from mldserver.coordinator.core.flush import Buffer
    from mldserver.coordinator.core.open_windows import CoordinatorRules

log = structlog.get_logger("mldserver")

_SHORT: Final = 0.75
"""The share of the memory above which shards ahead of the watermark wait. The rest is for the shard that holds it."""


def shards_to_hold(reached_ms: Mapping[str, int | None], *, holder: str | None) -> frozenset[str]:
    """Return the shards that are ahead of ``holder``, which holds the watermark; without one, all.

    ``reached_ms``: each shard's own watermark; None: it has shown nothing, and is the furthest behind. Shards that are
    level with the holder, or behind it, are not held.
    """
    if holder is None:
        return frozenset(reached_ms)
    least = reached_ms.get(holder)
    return frozenset(
        shard_id
        for shard_id, ms in reached_ms.items()
        if shard_id != holder and ms is not None and (least is None or ms > least)
    )


@dataclass(kw_only=True, eq=False, slots=True)
class Backpressure:
    """Which shards wait now, and how long those that ask must."""

    rules: CoordinatorRules
    buffer: Buffer
    """Counts the bytes in memory."""
    watermark: Watermark
    """Gives each shard's own watermark."""
    clock: Clock
    segment_bytes: int = field(init=False, default=0)
    """What the segments on disk take."""
    settled_bytes: int = field(init=False, default=0)
    """The bytes of segments whose windows are not open: closing a window does not free them."""
    computing: bool = field(init=False, default=False)
    """Whether a window is being computed, or waits for that."""
    holder: str | None = field(init=False, default=None)
    """The shard that holds the watermark."""
    paused: bool = field(init=False, default=False)
    """Whether every shard is paused, as the ledger says."""
    paused_shards: set[str] = field(init=False, default_factory=set)
    """The shards that are paused individually."""
    draining: set[str] = field(init=False, default_factory=set)
    """The paused shards that an operator drains: the server must still flush and checkpoint them."""
    settled: set[str] = field(init=False, default_factory=set)
    """The paused shards whose daemons wait after their records were flushed and checkpointed."""
    waiting: set[str] = field(init=False, default_factory=set)
    """The shards whose answers wait."""
    held: frozenset[str] = field(init=False, default=frozenset())
    """The shards whose next answer must wait."""
    _changed: asyncio.Condition = field(init=False, default_factory=asyncio.Condition)

    def weigh(self) -> None:
        """Update the set of shards that must wait."""
        # Runs with every batch: while there is room, the cost must not grow with the number of shards.
        memory, most = self.buffer.bytes, self.rules.buffer_bytes
        disk_is_full = self.segment_bytes > self.rules.segment_disk_bytes
        if memory <= most * _SHORT and not disk_is_full:
            self.held = frozenset()
            return
        in_vain = self.computing or self.settled_bytes > self.rules.segment_disk_bytes
        everyone = memory > most or (disk_is_full and in_vain)
        # Include every shard that may give rows, also on a stale connection whose shard has ended on another server.
        self.held = shards_to_hold(self.watermark.reached_ms(), holder=None if everyone else self.holder)

    def is_paused(self, shard_id: str) -> bool:
        """Whether a shard is paused, by itself or as all are."""
        return self.paused or shard_id in self.paused_shards

    def must_settle(self, shard_id: str) -> bool:
        """Whether the server must still flush and checkpoint a paused shard whose daemon waits."""
        return shard_id in self.draining or (self.paused and shard_id not in self.settled)

    def is_held(self, session: Session) -> bool:
        """Whether the session's shard must wait."""
        self.weigh()
        shard_id = session.shard_id
        if session.finishing:
            return self._is_full
        if session.adopted:  # the watermark does not know it
            return self.paused or self._is_full
        return self.paused or shard_id in self.held or shard_id in self.paused_shards

    @property
    def _is_full(self) -> bool:
        return self.buffer.bytes > self.rules.buffer_bytes

    def _must_wait(self, session: Session, *, answered: bool) -> bool:
        if session.finishing:
            return answered and self._is_full
        return session.shard_id in self.held

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition`` holds; it is asked again after each ``release``."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def wait(self, session: Session, *, answered: bool) -> None:
        """Wait until the session's shard may continue, or its session ends.

        ``answered``: whether the daemon was already answered for the batch, so that further batches may follow it.
        """
        if not self._must_wait(session, answered=answered):
            return
        began_ms = self.clock.steady_ms()
        memory = self.buffer.bytes > self.rules.buffer_bytes * _SHORT
        log.info(
            "shard.held",
            shard=session.shard_id,
            short_of="memory" if memory else "disk",
            used_bytes=self.buffer.bytes if memory else self.segment_bytes,
            budget_bytes=self.rules.buffer_bytes if memory else self.rules.segment_disk_bytes,
        )
        self.waiting.add(session.shard_id)
        try:
            await self.until(lambda: not session.alive or not self._must_wait(session, answered=answered))
        finally:
            self.waiting.discard(session.shard_id)
        log.info("shard.released", shard=session.shard_id, seconds=(self.clock.steady_ms() - began_ms) / 1000)

    async def release(self) -> None:
        """Update the set of held shards, and wake the waiting tasks."""
        self.weigh()
        async with self._changed:
            self._changed.notify_all()
