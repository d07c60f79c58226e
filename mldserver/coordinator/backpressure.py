"""Holds shards back while memory or disk is short, or an operator pauses them: the answers to their daemons wait.

The daemon sends no more of such a shard, renews its lease meanwhile, and nothing is lost.

Memory is freed by the flush that is asked for at the same time. As it runs short those wait that are ahead of the
watermark, while whoever holds it goes on; that one waits only where even its rows alone come faster than they can be
written, or cannot be written at all: then nothing else would bound them.

Disk is freed by windows. While one is being computed, or what is there belongs to none that is open, nobody's progress
frees anything, and everyone waits. Else it takes the watermark to close the next one: whoever holds it goes on, and those
ahead of it wait.

A pause holds the answer that a daemon waits for, and nothing else: what was answered already is worked on to its end. A
drain is a pause of one shard before which all that it gave is made durable and checkpointed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mldserver.base.clock import Clock
    from mldserver.coordinator.core.flush import Buffer
    from mldserver.coordinator.core.open_windows import CoordinatorRules
    from mldserver.coordinator.core.sessions import Session
    from mldserver.coordinator.core.watermark import Watermark

log = structlog.get_logger("mldserver")

_SHORT: Final = 0.75
"""The share of the memory from which on those wait that are ahead; the rest is for whoever holds the watermark."""


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
    """Says how much there is in memory."""
    watermark: Watermark
    """Says who is how far ahead."""
    clock: Clock
    segment_bytes: int = field(init=False, default=0)
    """What the segments on disk take."""
    settled_bytes: int = field(init=False, default=0)
    """What those of them take whose windows are not open: closing windows frees none of it."""
    computing: bool = field(init=False, default=False)
    """Whether a window is being computed, or waits for that."""
    holder: str | None = field(init=False, default=None)
    """The shard that holds the watermark."""
    paused: bool = field(init=False, default=False)
    """Whether every shard is paused."""
    paused_shards: set[str] = field(init=False, default_factory=set)
    """Those that are paused by themselves."""
    draining: set[str] = field(init=False, default_factory=set)
    """Those of them that are to be flushed and checkpointed first, and are not yet."""
    waiting: set[str] = field(init=False, default_factory=set)
    """The shards whose answers wait."""
    held: frozenset[str] = field(init=False, default=frozenset())
    """Those that must wait, before their next answer."""
    _changed: asyncio.Condition = field(init=False, default_factory=asyncio.Condition)

    def weigh(self) -> None:
        """Decide anew who waits."""
        # Asked with every batch: while there is room it must not take longer the more shards there are.
        memory, most = self.buffer.bytes, self.rules.buffer_bytes
        disk_is_full = self.segment_bytes > self.rules.segment_disk_bytes
        if memory <= most * _SHORT and not disk_is_full:
            self.held = frozenset()
            return
        in_vain = self.computing or self.settled_bytes > self.rules.segment_disk_bytes
        everyone = memory > most or (disk_is_full and in_vain)
        # Whoever may give rows: also a stale connection whose shard was ended elsewhere, which has not been heard here.
        self.held = shards_to_hold(self.watermark.reached_ms(), holder=None if everyone else self.holder)

    def is_paused(self, shard_id: str) -> bool:
        """Whether a shard is paused, by itself or as all are."""
        return self.paused or shard_id in self.paused_shards

    def is_held(self, session: Session) -> bool:
        """Whether the session's shard must wait."""
        self.weigh()
        shard_id = session.shard_id
        held = self.paused or shard_id in self.held or shard_id in self.paused_shards
        return held and not session.finishing

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition`` holds; it is asked again after each ``release``."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def wait(self, session: Session) -> None:
        """Wait while there is no room for more of the session's shard."""
        if session.shard_id not in self.held or session.finishing:
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
            await self.until(
                lambda: not session.alive or session.finishing or session.shard_id not in self.held
            )
        finally:
            self.waiting.discard(session.shard_id)
        log.info("shard.released", shard=session.shard_id, seconds=(self.clock.steady_ms() - began_ms) / 1000)

    async def release(self) -> None:
        """Decide anew, and let those go on that need not wait."""
        self.weigh()
        async with self._changed:
            self._changed.notify_all()
