"""The other servers on the ledger: who lives, and what each reads. A synchronous core; steady time is passed in.

Every server tells, with each beat, how far its own shards are. What it tells holds once everything that it counted on
is registered, so that the least of all is a watermark for all. Two things make that sound:

* A shard that changes hands is *missing* for everyone until its new owner has beaten again: only that beat surely counts
  the shard in. The one that lost it drops it no earlier, so that between the two it is always counted by somebody.
* A server that tells nothing (it has just started, has just taken a shard, or misses one) holds the watermark. So does
  one whose beats stop: what it told holds, but idle it is no more, since its shards may bring rows that it cannot store.

Servers' clocks are never compared. A server is silent while its beat, whatever it says, does not change before the eyes
of the one that looks; it is overdue when it was for the timeout. Time in which nobody looked (the ledger was out of
reach, the process was stopped) counts for little: it says nothing of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mldserver.ledger.contract import ServerState, ShardState

__all__ = ["DRAIN", "Peers"]

DRAIN: Final = "drain:"
"""What the id of a server begins with that only drains: it takes no rows in, and no other drain waits for it."""


@dataclass(slots=True)
class _Peer:
    state: ServerState
    """As it told last."""
    silent_ms: int = 0
    """For how long its latest beat was seen to stand still."""


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
        self._looked_ms: int | None = None
        self._peers: dict[str, _Peer] = {}
        self._claims: dict[str, _Claim] = {}

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def serving(self) -> int:
        """How many of them take rows in."""
        return sum(not server_id.startswith(DRAIN) for server_id in self._peers)

    def learn(
        self, servers: Mapping[str, ServerState], shards: Mapping[str, ShardState], now_ms: int
    ) -> None:
        """Take in what the ledger holds."""
        watched_ms = 0 if self._looked_ms is None else min(now_ms - self._looked_ms, self._timeout_ms // 2)
        self._looked_ms = now_ms
        known = self._peers
        self._peers = {name: _Peer(state) for name, state in servers.items() if name != self.server_id}
        for server_id, peer in self._peers.items():
            before = known.get(server_id)
            if before is not None and before.state.beat_ms == peer.state.beat_ms:
                peer.silent_ms = before.silent_ms + watched_ms
        claims, self._claims = self._claims, {}
        for shard_id, shard in shards.items():
            if shard.owner is not None and shard.owner in self._peers and not shard.ended:
                claim = claims.get(shard_id)
                if claim is None or claim[:2] != (shard.owner, shard.epoch):
                    claim = _Claim(shard.owner, shard.epoch, self._peers[shard.owner].state.beat_ms)
                self._claims[shard_id] = claim

    def counts(self, shard_id: str) -> bool:
        """Whether another server owns the shard and has beaten since it took it: what it tells counts the shard in."""
        claim = self._claims.get(shard_id)
        return claim is not None and self._peers[claim.owner].state.beat_ms != claim.beat_ms

    def owns(self, shard_id: str) -> bool:
        """Whether another server that is not buried has taken the shard, whether or not it counts it in yet."""
        return shard_id in self._claims

    def states(self) -> tuple[ServerState, ...]:
        """Return what each of them told last; one that misses its beats is not idle any more."""
        return tuple(
            replace(peer.state, idle=False, reason="silent")
            if peer.state.idle and peer.silent_ms >= self._timeout_ms // 2
            else peer.state
            for peer in self._peers.values()
        )

    def silent_ms(self, server_id: str) -> int:
        """Return for how long a server's latest beat was seen to stand still."""
        return self._peers[server_id].silent_ms

    def overdue(self) -> tuple[ServerState, ...]:
        """Return those whose beat has not changed for the timeout."""
        return tuple(peer.state for peer in self._peers.values() if peer.silent_ms >= self._timeout_ms)
