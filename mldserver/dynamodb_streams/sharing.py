"""Which shards a server reads, where several share a stream. Pure: each server decides for itself, from the same ledger.

Soon all servers see the same shards, owners and servers, and so compute the same plan. Until then, two servers may take the
same shard: then the ledger's epochs give it to the server that opened it last.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_KEPT: Final = 10
"""A server keeps an unclaimed shard for this many ``unclaimed_ms``: the assigned server cannot read it."""


class Plan(NamedTuple):
    """Ids of the shards that one server must start to read (``take``) and stop reading (``give_up``)."""

    take: tuple[str, ...]
    give_up: tuple[str, ...]


def share(
    owners: Mapping[str, str | None],
    servers: AbstractSet[str],
    me: str,
    *,
    leaving: AbstractSet[str] = frozenset(),
    unclaimed: AbstractSet[str] = frozenset(),
) -> Plan:
    """Return the shards that ``me``, one of ``servers``, must take and give up, so that all servers have equally many.

    ``owners``: the owner of every shard to read now; None: no server. ``leaving``: shards that this server is already
    giving up; they count first among those to give up. ``unclaimed``: shards unread for so long that any server may
    take them, not only the server that they are assigned to.
    """
    counts = dict.fromkeys(servers, 0)
    for owner in owners.values():
        if owner in counts:
            counts[owner] += 1
    fair, extra = divmod(len(owners), len(servers))
    # The remainder goes to the servers with the most shards, so that as few shards as possible move.
    by_count = sorted(servers, key=lambda server: (-counts[server], server))
    targets = {server: fair + (rank < extra) for rank, server in enumerate(by_count)}
    take = []
    for shard_id in sorted(shard_id for shard_id, owner in owners.items() if owner is None):
        # Assign each unowned shard to the server that lacks most. Every server computes all assignments.
        taker = min(servers, key=lambda server: (counts[server] - targets[server], server))
        counts[taker] += 1
        if taker == me or shard_id in unclaimed:
            take.append(shard_id)
    mine = [shard_id for shard_id, owner in owners.items() if owner == me]
    mine.sort(key=lambda shard_id: (shard_id not in leaving, shard_id))  # those in ``leaving`` first
    return Plan(tuple(take), tuple(mine[: max(0, len(mine) - targets[me])]))


@dataclass(slots=True)
class Unread:
    """Shards that no server seems to read, though each is assigned to one."""

    unclaimed_ms: int
    """After this time any server may take them."""
    kept_until_ms: dict[str, int] = field(default_factory=dict)
    """Lately unclaimed shards: the server that took one keeps it until then (steady time)."""
    _since_ms: dict[str, int] = field(default_factory=dict)

    def update(self, unread: AbstractSet[str], now_ms: int) -> frozenset[str]:
        """Note the shards that are unread now (``now_ms``: steady time); return those that any server may take."""
        self._since_ms = {name: self._since_ms.get(name, now_ms) for name in unread}
        unclaimed = {
            name for name, since_ms in self._since_ms.items() if now_ms - since_ms >= self.unclaimed_ms
        }
        kept = {name: ms for name, ms in self.kept_until_ms.items() if now_ms < ms}
        self.kept_until_ms = kept | dict.fromkeys(unclaimed, now_ms + _KEPT * self.unclaimed_ms)
        return frozenset(unclaimed)
