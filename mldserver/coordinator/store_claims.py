"""Which store of keyed state a shard needs that is opened."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from mldserver.base.backoff import Backoff
from mldserver.base.clock import Clock
from mldserver.consumer.intake import ShardOpening
from mldserver.coordinator.core.ledger_view import LedgerView
from mldserver.errors import PeerError
from mldserver.stores import KeyRange, StoreClaim

log = structlog.get_logger("mldserver")

_RANGE_SECONDS: Final = (1.0, 30.0)
"""First and longest wait until the stream is asked again for a shard's range of keys."""
_DYNAMODB_SHARD: Final = re.compile(r"shardId-\d{20}-[0-9a-f]{8}")
"""How DynamoDB names a stream's shards. Kinesis names have 12 digits."""


@dataclass(kw_only=True, eq=False, slots=True)
class StoreClaims:
    """Finds the stores of shards: on Kinesis by the ranges of keys that the stream lists."""

    view: LedgerView
    clock: Clock
    ask_stream: Callable[[], Awaitable[bool]] | None
    """See ``Coordinator``."""
    keyed: bool
    """Whether the handler keeps state, so that each shard needs a store."""
    ranges: Mapping[str, KeyRange | None] = field(init=False, default_factory=dict)
    """The ranges of the shards that the stream listed last."""

    async def claim(self, opening: ShardOpening) -> StoreClaim | None:
        """Return which store the shard needs, once the stream says which keys the shard has. None: the handler keeps no state.

        Raises PeerError for a shard of a DynamoDB stream, whose listing has no ranges.
        """
        shard_id, waits = opening.shard_id, Backoff(*_RANGE_SECONDS)
        if not self.keyed or opening.store is not None:
            return opening.store
        if _DYNAMODB_SHARD.fullmatch(shard_id):
            raise PeerError(
                f"A daemon connected for shard {shard_id} of a DynamoDB stream, but the handler keeps state.",
                did="The connection was closed, and nothing of the shard was taken.",
                advice="Read the table's stream directly, with --source dynamodb:TABLE: only then do all shards that a shard "
                "splits into come to one server.",
                shard=shard_id,
            )
        while (key_range := self._range_of(shard_id)) is None:
            if self.ask_stream is None:
                return StoreClaim(None)  # a source of another kind, whose shards have no ranges
            if not await self.ask_stream() or self._range_of(shard_id) is None:
                delay = waits.failed()
                log.warning("shard.range_unknown", shard=shard_id, delay_seconds=delay)
                await self.clock.sleep(delay)
        return StoreClaim(key_range)

    def _range_of(self, shard_id: str) -> KeyRange | None:
        """Return the range of a shard as the stream lists it, or as the ledger knows it from before."""
        store = self.view.state.stores.get(shard_id)
        return self.ranges.get(shard_id) or (None if store is None else store.key_range)
