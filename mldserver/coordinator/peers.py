"""The other servers on the ledger: who lives, and what each reads. A synchronous core; the time is passed in.

Every server tells, with each beat, how far its own shards are. What it tells holds once everything that it counted on
is registered, so that the least of all is a watermark for all. Two things make that sound:

* A shard that changes hands is *missing* for everyone until its new owner has beaten again: only that beat surely counts
  the shard in. The one that lost it drops it no earlier, so that between the two it is always counted by somebody.
* A server that tells nothing (it has just started, has just taken a shard, or misses one) holds the watermark.

Servers' clocks may differ. A server is overdue when its beat, whatever it says, has not changed for the timeout on the
clock of the one that looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mldserver.state.ledger import ServerState, ShardState

__all__ = ["Peers"]


@dataclass(slots=True)
class _Peer:
    told: ServerState
    since_ms: int
    """When its latest beat was first seen here."""


class _Claim(NamedTuple):
    """A shard's owner, and the beat at which it was first seen to be."""

    owner: str
    epoch: int
    beat_ms: int


class Peers:
    """What the latest looks at the ledger have shown of other servers."""

    def __init__(self, server_id: str, *, timeout_ms: int) -> None:
        """Start alone. ``timeout_ms``: after so long without a beat a server is overdue."""
        self.server_id = server_id
        self._timeout_ms = timeout_ms
        self._peers: dict[str, _Peer] = {}
        self._claims: dict[str, _Claim] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def learn(
        self, servers: Mapping[str, ServerState], shards: Mapping[str, ShardState], now_ms: int
    ) -> None:
        """Take in what the ledger holds."""
        for server_id, told in servers.items():
            known = self._peers.get(server_id)
            if server_id != self.server_id and (known is None or known.told.beat_ms != told.beat_ms):
                self._peers[server_id] = _Peer(told, now_ms)
        self._peers = {server_id: peer for server_id, peer in self._peers.items() if server_id in servers}
        self._claims = {
            shard_id: self._claim(shard)
            for shard_id, shard in shards.items()
            if shard.owner in self._peers and not shard.ended
        }

    def _claim(self, shard: ShardState) -> _Claim:
        assert shard.owner is not None
        known = self._claims.get(shard.shard_id)
        if known is not None and known[:2] == (shard.owner, shard.epoch):
            return known
        return _Claim(shard.owner, shard.epoch, self._peers[shard.owner].told.beat_ms)

    def counts(self, shard_id: str) -> bool:
        """Whether another server owns the shard and has beaten since it took it: what it tells counts the shard in."""
        claim = self._claims.get(shard_id)
        return claim is not None and self._peers[claim.owner].told.beat_ms != claim.beat_ms

    def told(self) -> tuple[ServerState, ...]:
        """Return what each of them told last."""
        return tuple(peer.told for peer in self._peers.values())

    def overdue(self, now_ms: int) -> tuple[ServerState, ...]:
        """Return those whose beat has not changed for the timeout."""
        return tuple(peer.told for peer in self._peers.values() if now_ms - peer.since_ms >= self._timeout_ms)
