"""Where a shard is read from that the ledger has no position of. Pure.

Where the pipeline begins for the first time, that is what the operator says: ``latest`` and times become a time there and
then. It is kept in the ledger as a position that any record lies behind, so that a crash decides nothing anew, and is
durable for all shards that a server begins with before any record of them is handed over. Later, a shard is read from its
oldest record: it is a child of one that was read, or a root that is new.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mldserver.dynamodb_streams.positions import Token
from mldserver.dynamodb_streams.shard_tree import LATEST, TRIM_HORIZON, After, At, Since
from mldserver.records import Sequence

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mldserver.dynamodb_streams.positions import Position
    from mldserver.dynamodb_streams.shard_tree import ShardTree, Start, StreamShard
    from mldserver.sources.intake import KnownShard


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a pipeline begins that was never there."""

    everywhere: Start = TRIM_HORIZON
    shards: Mapping[str, Start] = field(default_factory=dict)
    """Of a token: so its shards, and none of their ancestors."""
    token: Token | None = None

    @classmethod
    def of(cls, position: Position) -> Beginning:
        """Begin at a position."""
        if not isinstance(position, Token):
            return cls(position)
        new = TRIM_HORIZON if position.since_ms is None else Since(position.since_ms)
        return cls(new, {shard.id: shard.start for shard in position.shards}, position)

    def before(self, shards: Iterable[StreamShard], tree: ShardTree) -> set[str]:
        """Return the shards of a listing that lie before it: a token's ancestors; for ``latest`` all that is closed."""
        out = {shard.id for shard in shards if shard.last is not None and self.everywhere is LATEST}
        for shard_id in self.shards:
            out.update(tree.ancestors(shard_id))
        return {shard_id for shard_id in out if shard_id in tree} - self.shards.keys()

    def is_ahead(self, known: Mapping[str, KnownShard]) -> bool:
        """Whether nothing was read yet: no shard has a position, but for places of a token that were kept before a crash.

        That a shard has ended says nothing: where its child is opened, it has, unread.
        """
        places = {shard_id: storable(start, 0) for shard_id, start in self.shards.items()}
        return all(shard.position in {None, places.get(name)} for name, shard in known.items())

    def start(self, shard_id: str, *, found_ms: int | None) -> Start:
        """Return where a shard without a known parent begins.

        ``found_ms``: when the pipeline began, for a shard that appeared later: all that was created since is wanted.
        """
        start = self.shards.get(shard_id, self.everywhere)
        return Since(found_ms) if start is LATEST and found_ms is not None else start


def stored(position: Sequence) -> Start:
    """Return where to go on from the ledger's position."""
    return After(position.number) if position.number else Since(position.sub)


def storable(start: Start, now_ms: int) -> Sequence | None:
    """Return the position that keeps a beginning in the ledger; None: a shard without one begins there anyway."""
    match start:
        case After(number):
            return Sequence(number)
        case At(number):
            return Sequence(number - 1)
        case Since(ms):
            return Sequence(0, ms)
    return Sequence(0, now_ms) if start is LATEST else None


def inherited(parents: Iterable[str], known: Mapping[str, KnownShard]) -> Start:
    """Return where a shard without a position begins where others have one.

    Where the parent has had no record since a time, its child may have some from before. So may, where another server
    begins just now, a shard without a parent.
    """
    read = [known[parent] for parent in parents if parent in known]
    positions = [shard.position for shard in read or known.values() if shard.position is not None]
    return (
        Since(min(times)) if (times := [each.sub for each in positions if not each.number]) else TRIM_HORIZON
    )
