"""Which shards a server reads, where several share a stream. Pure: each server decides for itself, from the same ledger.

Soon all servers see the same shards, owners and servers, and so compute the same plan. Until then, two servers may take the
same shard: then the ledger's epochs give it to the server that opened it last.

If the handler keeps state, all descendants of a root shard are a *family*: they share a store, so one server reads them all. If
several servers have shards of a family, the server with the smallest id keeps the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_KEPT: Final = 10
"""A server keeps an unclaimed shard for this many ``unclaimed_ms``: the assigned server cannot read it."""


_NO_FAMILIES: Final[Mapping[str, str]] = {}


class Plan(NamedTuple):
    """Ids of the shards that one server must start to read (``take``) and stop reading (``give_up``)."""

    take: tuple[str, ...]
    give_up: tuple[str, ...]


def share(
    owners: Mapping[str, str | None],
    servers: AbstractSet[str],
    me: str,
    *,
    families: Mapping[str, str] = _NO_FAMILIES,
    leaving: AbstractSet[str] = frozenset(),
    unclaimed: AbstractSet[str] = frozenset(),
    kept: AbstractSet[str] = frozenset(),
) -> Plan:
    """Return the shards that ``me``, one of ``servers``, must take and give up, so that all servers have equally many families.

    ``owners``: the owner of every shard to read now; None: no server. ``families``: the family of each shard; a shard that is
    left out is a family by itself. ``leaving``: shards that this server is already giving up; their families count first among
    those to give up. ``unclaimed``: shards unread for so long that any server may take them, not only the server that they are
    assigned to. ``kept``: shards whose families this server does not give up for the sake of equal numbers.
    """
    members: dict[str, list[str]] = {}
    for shard_id in sorted(owners):
        members.setdefault(families.get(shard_id, shard_id), []).append(shard_id)
    holders = {
        family: _holder({owners[shard_id] for shard_id in shards} - {None}, servers)
        for family, shards in members.items()
    }
    counts = dict.fromkeys(servers, 0)
    for holder in holders.values():
        if holder in counts:
            counts[holder] += 1
    fair, extra = divmod(len(holders), len(servers))
    # The remainder goes to the servers with the most families, so that as few families as possible move.
    by_count = sorted(servers, key=lambda server: (-counts[server], server))
    targets = {server: fair + (rank < extra) for rank, server in enumerate(by_count)}
    mine = [family for family, holder in holders.items() if holder == me]
    first = {
        family for family in mine if any(owners[each] == me and each in leaving for each in members[family])
    }
    mine.sort(key=lambda family: (family not in first, family))
    excess = mine[: max(0, len(mine) - targets[me])]
    mine = [family for family in mine if family not in excess or not kept.isdisjoint(members[family])]
    for family in sorted(family for family, holder in holders.items() if holder is None):
        # Assign each unowned family to the server that lacks most. Every server computes all assignments.
        taker = min(servers, key=lambda server: (counts[server] - targets[server], server))
        counts[taker] += 1
        if taker == me or not unclaimed.isdisjoint(members[family]):
            mine.append(family)
    here = {shard_id for family in mine for shard_id in members[family]}
    return Plan(
        tuple(shard_id for shard_id, owner in sorted(owners.items()) if owner is None and shard_id in here),
        tuple(shard_id for shard_id, owner in sorted(owners.items()) if owner == me and shard_id not in here),
    )


def _holder(owners: AbstractSet[str | None], servers: AbstractSet[str]) -> str | None:
    """Return which of the owners of a family's shards keeps the family: all servers name the same one. None: it has no owner."""
    return min(filter(None, owners), key=lambda owner: (owner not in servers, owner), default=None)


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
