"""How redriven dead letters become part of a flush."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from mldserver.coordinator.core.flush import Buffer, buffered
from mldserver.coordinator.core.ledger_view import LedgerView
from mldserver.coordinator.core.sessions import Sessions
from mldserver.runtime.interface import BatchOutcome
from mldserver.windows import WindowSpec


@dataclass(eq=False, slots=True)
class RedriveIntake:
    """Accepts the outcomes of redriven dead letters."""

    view: LedgerView
    spec: WindowSpec | None
    buffer: Buffer
    flush: Callable[[str], Awaitable[None]]
    """Returns when a whole cycle that began after the call is done."""
    sessions: Sessions

    @property
    def wanted(self) -> int:
        """How many dead letters in the ledger are marked for a redrive."""
        return self.view.state.redrives

    @property
    def elsewhere(self) -> frozenset[str]:
        """Shards that another server has: that server redrives their letters."""
        return self.view.owned_elsewhere()

    async def register(self, shard_id: str, outcome: BatchOutcome, ids: tuple[str, ...]) -> None:
        """Register what letters produced together with their removal; leave it out if the letters were removed before.

        All that the shard had accepted before is durable too when this returns. If the handler keeps state, the outcome is of the
        shard's live session, and counts for it once it is registered.
        """
        # Rows keep the times that they would have had; no position moves.
        batch = buffered(shard_id, 0, outcome, floor_ms=None, spec=self.spec)
        batch.last = batch.effective_ms = batch.latest_event_ms = None
        batch.redriven = ids
        session = self.sessions.live(shard_id)
        if session is not None and session.store is not None:
            batch.epoch, batch.store = session.epoch, session.store.store_id
        number = self.buffer.add(batch)
        try:
            await self.flush("redrive")
        finally:
            # After a cancellation the letters are redriven again, and must not be in one flush twice.
            self.buffer.remove([number])
