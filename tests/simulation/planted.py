"""Bugs to be planted: classes of the server, and what stands in for them. Each must be found by some world."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mldserver.coordinator.coordinator import Coordinator
from mldserver.coordinator.holding import Holding
from mldserver.coordinator.lineage import Lineage
from mldserver.coordinator.shard_session import ShardSession
from mldserver.coordinator.watermark import Watermark
from mldserver.state.store import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mldserver.coordinator.watermark import View
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


class NeverHolds(Holding):
    """Answers every daemon, however short memory is."""

    def is_held(self, _session: ShardSession) -> bool:
        return False


class Orphans(Lineage):
    """Lets a shard's times begin anew, wherever its parents' ended."""

    def floor_ms(self, shard_id: str) -> int | None:
        return self[shard_id].effective_ms


class GoesBack(Watermark):
    """Takes the least of the shards for the watermark, whatever it was before."""

    def commit(self, view: View) -> None:
        if view.watermark_ms is not None:
            self._watermark_ms = view.watermark_ms

    def _reached(self, value: int) -> int:
        return value


BUGS: Mapping[str, Mapping[object, object]] = {
    "an await between check and act": {Coordinator: AwaitsBeforeItForgets},
    "a checkpoint that runs ahead": {ShardSession: ChecksPointsTooEarly},
    "a ledger without fences": {SqliteStore: Unfenced},
    "nobody is held": {Holding: NeverHolds},
    "children without their parents' times": {Lineage: Orphans},
    "a watermark that goes back": {Watermark: GoesBack},
}
