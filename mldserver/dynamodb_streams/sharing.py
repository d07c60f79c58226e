"""Which shards a server reads, where several share a stream. Pure: each server decides for itself, from the same ledger.

All see the same shards, owners and servers sooner or later, and come to the same plan by that. While they do not, two may
take the same shard: the ledger's epochs leave it to the later one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet


class Plan(NamedTuple):
    """What one server is to do."""

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
    """Return what ``me``, one of ``servers``, is to take and to give up.

    ``owners``: of every shard that is to be read now, its owner; None: nobody. ``leaving``: shards that this server is
    about to give up already. ``forsaken``: those that nobody has taken for so long that anybody may.
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
