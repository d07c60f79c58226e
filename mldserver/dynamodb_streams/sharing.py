"""Which shards a server reads, where several share a stream. Pure: each server decides for itself, from the same ledger.

All see the same shards, owners and servers sooner or later, and come to the same plan by that. While they do not, two may
take the same shard: the ledger's epochs leave it to the later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_KEPT: Final = 10
"""A server keeps an unclaimed shard for this many ``forsaken_ms``: the assigned server cannot read it."""


class Plan(NamedTuple):
    """What one server must do."""

    take: tuple[str, ...]
    give_up: tuple[str, ...]


def share(
    owners: Mapping[str, str | None],
    servers: AbstractSet[str],
    me: str,
    *,
    leaving: AbstractSet[str] = frozenset(),
    forsaken: AbstractSet[str] = frozenset(),
) -> Plan:
    """Return what ``me``, one of ``servers``, must take and give up.

    ``owners``: the owner of every shard to read now; None: no server. ``leaving``: shards that this server is about
    to give up already. ``forsaken``: those unread for so long that any server may take them.
    """
    counts = dict.fromkeys(servers, 0)
    for owner in owners.values():
        if owner in counts:
            counts[owner] += 1
    fair, extra = divmod(len(owners), len(servers))
    # Those that have most keep the odd ones: nothing moves that need not.
    by_count = sorted(servers, key=lambda server: (-counts[server], server))
    targets = {server: fair + (place < extra) for place, server in enumerate(by_count)}
    take = []
    for shard_id in sorted(shard_id for shard_id, owner in owners.items() if owner is None):
        taker = min(servers, key=lambda server: (counts[server] - targets[server], server))
        counts[taker] += 1
        if taker == me or shard_id in forsaken:
            take.append(shard_id)
    mine = [shard_id for shard_id, owner in owners.items() if owner == me]
    mine.sort(key=lambda shard_id: (shard_id not in leaving, shard_id))
    return Plan(tuple(take), tuple(mine[: max(0, len(mine) - targets[me])]))


@dataclass(slots=True)
class Unread:
    """Shards that no server seems to read, though each is assigned to one."""

    forsaken_ms: int
    """After this time any server may take them."""
    kept_until_ms: dict[str, int] = field(default_factory=dict)
    """Lately unclaimed shards: the server that took one keeps it until then (steady time)."""
    _since_ms: dict[str, int] = field(default_factory=dict)

    def look(self, unread: AbstractSet[str], now_ms: int) -> frozenset[str]:
        """Take in the shards unread now, at a steady time; return those that any server may take."""
        self._since_ms = {name: self._since_ms.get(name, now_ms) for name in unread}
        forsaken = {
            name for name, since_ms in self._since_ms.items() if now_ms - since_ms >= self.forsaken_ms
        }
        kept = {name: ms for name, ms in self.kept_until_ms.items() if now_ms < ms}
        self.kept_until_ms = kept | dict.fromkeys(forsaken, now_ms + _KEPT * self.forsaken_ms)
        return frozenset(forsaken)
