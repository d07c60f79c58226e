"""A shard's session, as a source uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mldserver.coordinator.shards import IntakeSession
    from mldserver.runtime.interface import BatchOutcome


async def accept(session: IntakeSession, outcome: BatchOutcome) -> None:
    """Hand a batch in; return when its daemon may be answered."""
    if not session.accept_batch(outcome, session._shards.clock.steady_ms()):
        await session.wait_for_room()
