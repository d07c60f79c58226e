"""The ledger as this server read it last: one value for all parts of the coordinator. A synchronous core."""

from __future__ import annotations

from dataclasses import dataclass, field

from mldserver.ledger.contract import LedgerState
from mldserver.output.layout import writer_tag


@dataclass(eq=False, slots=True)
class LedgerView:
    """What the ledger held when the latest cycle read it. The cycle replaces ``state``; all other parts only read it."""

    server_id: str
    """This server."""
    state: LedgerState = field(default_factory=LedgerState)
    """Of windows only what changed since the cycle before (see ``LedgerState.since``)."""

    @property
    def tag(self) -> str:
        """What marks the files that this server writes for this ledger."""
        return writer_tag(self.state.ledger_id, self.server_id)

    def owned_elsewhere(self) -> frozenset[str]:
        """Return the shards that have not ended and that another server owns."""
        return frozenset(
            shard.shard_id
            for shard in self.state.shards.values()
            if shard.owner not in {None, self.server_id} and not shard.ended
        )
