"""One shard under one connection: what a source holds of the coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from mldserver.coordinator.core.flush import moved
from mldserver.coordinator.core.positions import ShardPosition

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mldserver.coordinator.coordinator import Coordinator
    from mldserver.coordinator.core.flush import BufferedBatch
    from mldserver.records import Sequence
    from mldserver.runtime.interface import BatchOutcome
    from mldserver.state.ledger import ShardState

__all__ = ["ShardSession"]


class ShardSession:
    """A ``ShardIntake``. It dies when the shard is opened again, or its owner lets go; then it does nothing."""

    def __init__(
        self,
        coordinator: Coordinator,
        shard_id: str,
        state: ShardState,
        parked: Mapping[str, Sequence],
        *,
        within_aggregates: bool = True,
    ) -> None:
        """Start at the ledger's position, under the epoch just raised; ``parked``: keys with dead letters."""
        self._coordinator = coordinator
        self.shard_id = shard_id
        self.epoch = state.epoch
        self.parked = parked
        self.position = ShardPosition(state.position, within_aggregates=within_aggregates)
        self.alive = True
        self.finishing = False
        """Whether no batch follows."""

    @property
    def after(self) -> Sequence | None:
        """Everything at or before it was accepted earlier and must be dropped unseen."""
        return self.position.accepted

    def began(self) -> None:
        """Note that a batch was received: the shard is not silent while it is worked on."""
        if self.alive:
            self._coordinator.watermark.began(self.shard_id, self._coordinator.clock.steady_ms())

    async def accept(self, outcome: BatchOutcome) -> None:
        """Take a batch's rows; returns when the daemon may be answered."""
        if not self.alive:
            return
        self._coordinator.take(self, outcome)
        await self._coordinator.admit(self)
        self._answered()

    def settle(self, outcome: BatchOutcome, batch: BufferedBatch) -> BufferedBatch:
        """Count a batch as accepted; return it with the end of what it makes durable."""
        outline = outcome.outline
        self.position.deliver(outline.last)
        if outline.records > outline.duplicates:
            self.position.accept(outline.last)
        last = self.position.claim(outcome.position if outcome.keeps_position else outline.last)
        return batch if last == batch.last else replace(batch, last=last)

    def advance(self, position: Sequence) -> None:
        """Note that a handler which keeps its position has checkpointed so far in a hook of its own."""
        last = self.position.claim(position) if self.alive else None
        if last is not None:
            self._coordinator.buffer.add(moved(self.shard_id, self.epoch, last))

    def checkpoint_due(self) -> Sequence | None:
        """Return the durable position when it is ahead of the last checkpoint, else None."""
        return self.position.due() if self.alive else None

    def checkpointed(self, position: Sequence) -> None:
        """Note that the daemon stored a checkpoint."""
        self.position.store(position)

    async def drain(self) -> None:
        """Flush what was accepted."""
        if self.alive:
            self._leaving()
            await self._coordinator.flush("shutdown_requested")
            self._answered()

    async def end(self) -> bool:
        """Flush, and mark the shard ended durably. False: it is owned elsewhere."""
        if not self.alive:
            return False
        self._leaving()
        self._coordinator.end(self)
        await self._coordinator.flush("shard_ended")
        if self._replaced():
            return False
        self.alive = False
        self._coordinator.ended(self)
        return True

    def _leaving(self) -> None:
        # While the ledger is out of reach nothing more comes: taken for idle, the shard would let windows close whose rows
        # its children have, or its next owner.
        self._coordinator.watermark.leaving(self.shard_id)

    def _answered(self) -> None:
        if self.alive:
            self._coordinator.watermark.answered(self.shard_id, self._coordinator.clock.steady_ms())

    def _replaced(self) -> bool:
        return not self.alive

    async def lost(self) -> None:
        """Flush what was accepted, then let go."""
        if self.alive:
            self._leaving()
            await self._coordinator.flush("lease_lost")
        self.disconnected()

    async def finish(self) -> None:
        """Be held back no more: no batch follows, and what was taken is made durable by the server's last flush."""
        self.finishing = True
        await self._coordinator.release()

    def disconnected(self) -> None:
        """Let go without an ending; what is buffered is still flushed."""
        if self.alive:
            self.alive = False
            self._coordinator.disconnected(self)
