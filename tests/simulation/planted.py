"""Bugs to be planted: classes of the server, and what stands in for them. Each must be found by some world."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mldserver.coordinator.coordinator import Coordinator
from mldserver.coordinator.shard_session import ShardSession
from mldserver.state.store import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mldserver.records import Sequence
    from mldserver.state.ledger import Flush, FlushResult


class AwaitsBeforeItForgets(Coordinator):
    """Sees that all that is buffered is durable, awaits, and only then empties the buffer."""

    async def _flush(self, *args: Any) -> bool:
        complete = await super()._flush(*args)
        await self.clock.sleep(0.01)
        if complete:
            self.buffer.remove(self.buffer.snapshot())
        return complete


class ChecksPointsTooEarly(ShardSession):
    """Checkpoints what was accepted, before it is durable."""

    def checkpoint_due(self) -> Sequence | None:
        return self.position.accepted if super().checkpoint_due() is not None else None


class Unfenced(SqliteStore):
    """Moves positions whoever owns the shard, and wherever it stands."""

    def register(self, flush: Flush, *, now_ms: int) -> FlushResult:
        known = self.peek().shards
        positions = tuple(
            replace(each, epoch=known[each.shard_id].epoch, previous=known[each.shard_id].position)
            for each in flush.positions
        )
        return super().register(replace(flush, positions=positions), now_ms=now_ms)


BUGS: Mapping[str, Mapping[object, object]] = {
    "an await between check and act": {Coordinator: AwaitsBeforeItForgets},
    "a checkpoint that runs ahead": {ShardSession: ChecksPointsTooEarly},
    "a ledger without fences": {SqliteStore: Unfenced},
}
