"""The known shards, their lineage, and the servers that read them. A synchronous core; time is passed in.

A shard is known from the ledger, from a connection, or from ListShards. It is *expected* to be connected when it has
not ended and none of its known parents is still open: the KCL starts a child only after every parent's end was
checkpointed (KCL 3.1.3), so a child that connects proves that its ancestors have ended.

Every server reports its own watermark with each heartbeat. A server reports a watermark only after all rows that it
depends on are registered, so the minimum over all servers is a watermark for all. Two rules make that sound:

* A shard that changes servers is *missing* for all servers until its new owner's next heartbeat, the first that surely
  includes the shard. The old owner drops the shard no earlier, so at least one server always includes it.
* A server that reports no watermark (it has just started, has just taken a shard, or misses a shard) holds the
  watermark. So does a server whose heartbeats stop: its last report stays valid, but the server no longer counts as
  idle, since its shards may bring rows that it cannot store.

Servers' clocks are never compared. A server is silent while an observing server reads the same heartbeat again. It is
overdue after the timeout. Time in which the observer could not look (the ledger was unreachable, the process was
stopped) counts little, because it shows nothing about other servers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from mldserver.ledger.contract import ServerState, ShardState

DRAIN: Final = "drain:"
"""What the id of a server begins with that only drains: it takes no rows in, and no other drain waits for it."""


class Presence(enum.Enum):
    """Where a shard is, seen from here."""

    CONNECTED = "connected"
    ELSEWHERE = "elsewhere"
    """Another server reads it and includes it in that server's own watermark."""
    MISSING = "missing"
    """Known, expected, and without a connection: it holds the watermark."""
    LEFT_OUT = "left_out"
    """Missing for longer than the limit: it holds nothing any more."""
    ENDED = "ended"


_READ = frozenset({Presence.CONNECTED, Presence.ELSEWHERE, Presence.ENDED})
"""What proves that a shard's ancestors have ended."""


@dataclass(slots=True)
class LineageNode:
    """One known shard."""

    id: str
    parents: tuple[str, ...] = ()
    presence: Presence = Presence.MISSING
    since_ms: int = 0
    """Since when it is present in this way."""
    read_ms: int = 0
    """Steady time up to which it is known to be read to the stream's tip. A shard without a reader lags by the time
    since then."""
    effective_ms: int | None = None
    """Effective time of its last accepted record."""
    children: set[str] = field(default_factory=set)
    adopted: bool = False
    """A session of this server fires the timers of its store, after its end: it is not forgotten."""


@dataclass(eq=False, slots=True)
class Lineage:
    """The graph of known shards."""

    nodes: dict[str, LineageNode] = field(init=False, default_factory=dict)
    """Only looked at by others."""

    def add(
        self,
        shard_id: str,
        now_ms: int,
        *,
        parents: Iterable[str] = (),
        ended: bool = False,
        effective_ms: int | None = None,
    ) -> bool:
        """Note that a shard exists; True when it was not known. A known shard only gains parents.

        A parent that is learned of after its child was read has ended: lists name closed shards for as long as the
        stream keeps their records, and a daemon that began at ``LATEST`` never reads them.
        """
        node = self.nodes.get(shard_id)
        new = node is None
        if node is None:
            presence = Presence.ENDED if ended else Presence.MISSING
            node = self.nodes[shard_id] = LineageNode(
                shard_id, presence=presence, since_ms=now_ms, read_ms=now_ms, effective_ms=effective_ms
            )
            node.children.update(other.id for other in self.nodes.values() if shard_id in other.parents)
            if any(self.nodes[child].presence in _READ for child in node.children):
                self._move(shard_id, Presence.ENDED, now_ms)
        gained = tuple(parent for parent in dict.fromkeys(parents) if parent not in node.parents)
        node.parents += gained
        for parent in gained:
            if parent in self.nodes:
                self.nodes[parent].children.add(shard_id)
        if gained and node.presence in _READ:
            self._end_ancestors(shard_id, now_ms)
        return new

    def proved_ended(self, shard_id: str) -> tuple[str, ...]:
        """Return the ancestors that are not known to have ended: a connection of the shard proves that they have."""
        proved: list[str] = []
        queue = list(self.nodes[shard_id].parents)
        while queue:
            node = self.nodes.get(queue.pop())
            if node is not None and node.presence is not Presence.ENDED and node.id not in proved:
                proved.append(node.id)
                queue.extend(node.parents)
        return tuple(proved)

    def connect(self, shard_id: str, now_ms: int) -> None:
        """Note that a known shard has a connection, and that its ancestors have ended."""
        self._move(shard_id, Presence.CONNECTED, now_ms)
        self._end_ancestors(shard_id, now_ms)
        self.nodes[shard_id].adopted = False

    def disconnect(self, shard_id: str, now_ms: int) -> None:
        """Note that a shard's connection is gone without the shard's end."""
        if self.nodes[shard_id].presence is Presence.CONNECTED:
            self._move(shard_id, Presence.MISSING, now_ms)
            self.nodes[shard_id].read_ms = now_ms

    def elsewhere(self, shard_id: str, now_ms: int, *, read: bool) -> None:
        """Note whether another server reads a shard. One that is connected here, or has ended, stays what it is."""
        presence = self.nodes[shard_id].presence
        if read and presence in {Presence.MISSING, Presence.LEFT_OUT}:
            self._move(shard_id, Presence.ELSEWHERE, now_ms)
            self._end_ancestors(shard_id, now_ms)
        elif not read and presence is Presence.ELSEWHERE:
            self._move(shard_id, Presence.MISSING, now_ms)
            self.nodes[shard_id].read_ms = now_ms

    def reach(self, shard_id: str, effective_ms: int | None) -> None:
        """Note how far another server has read a shard: its children's records come no earlier."""
        node = self.nodes[shard_id]
        times = [ms for ms in (node.effective_ms, effective_ms) if ms is not None]
        node.effective_ms = max(times, default=None)

    def end(self, shard_id: str, now_ms: int) -> None:
        """Note that a shard is read to its end."""
        self._move(shard_id, Presence.ENDED, now_ms)

    def leave_out(self, now_ms: int, limit_ms: int) -> tuple[str, ...]:
        """Leave out the expected shards that are missing for ``limit_ms`` or longer; return them."""
        overdue = [n for n in self.missing() if now_ms - n.since_ms >= limit_ms]
        for node in overdue:
            self._move(node.id, Presence.LEFT_OUT, now_ms)
        return tuple(node.id for node in overdue)

    def floor_ms(self, shard_id: str) -> int | None:
        """Return the least effective time that the shard's next record can have: its own last, or its ancestors'."""
        times: list[int] = []
        seen, queue = {shard_id}, [shard_id]
        while queue:
            node = self.nodes[queue.pop()]
            if node.effective_ms is not None:
                times.append(node.effective_ms)
                continue
            # Shards that were split and merged again have ancestors by many ways: each is asked once.
            unseen = {parent for parent in node.parents if parent in self.nodes} - seen
            seen |= unseen
            queue.extend(unseen)
        return max(times, default=None)

    def connected(self) -> list[LineageNode]:
        """Return the shards that have a connection."""
        return [n for n in self.nodes.values() if n.presence is Presence.CONNECTED]

    def missing(self) -> list[LineageNode]:
        """Return the shards that are expected and have no connection."""
        missing = (node for node in self.nodes.values() if node.presence is Presence.MISSING)
        # An unknown parent counts as finished: its records were trimmed, or read before this ledger began.
        over = {Presence.ENDED, Presence.LEFT_OUT}
        return [
            node
            for node in missing
            if all(self.nodes[p].presence in over for p in node.parents if p in self.nodes)
        ]

    def unread(self) -> int:
        """Return how many shards have not ended, where no server reads any; 0 where one is read, here or elsewhere."""
        presences = [node.presence for node in self.nodes.values()]
        if Presence.CONNECTED in presences or Presence.ELSEWHERE in presences:
            return 0
        return len(presences) - presences.count(Presence.ENDED)

    def all_ended(self) -> bool:
        """Whether the stream can be over: some shard has ended, and every other has too or was left out."""
        presences = {node.presence for node in self.nodes.values()}
        return Presence.ENDED in presences and presences <= {Presence.ENDED, Presence.LEFT_OUT}

    def forget_ended(self, before_ms: int, *, keep: AbstractSet[str] = frozenset()) -> tuple[str, ...]:
        """Drop the shards that ended before a time, except those in ``keep``; return the dropped ones.

        Their children keep them as unknown parents.
        """
        ended = (n for n in self.nodes.values() if n.presence is Presence.ENDED and not n.adopted)
        old = tuple(node.id for node in ended if node.since_ms < before_ms and node.id not in keep)
        self._drop(old)
        return old

    def forget(self, shard_id: str) -> None:
        """Drop a shard that is not in the stream, unless it is read, or has ended. Unknown shards are ignored."""
        node = self.nodes.get(shard_id)
        if node is not None and node.presence not in _READ:
            self._drop((shard_id,))

    def _drop(self, shard_ids: tuple[str, ...]) -> None:
        for shard_id in shard_ids:
            del self.nodes[shard_id]
        for node in self.nodes.values():
            node.children.difference_update(shard_ids)

    def _move(self, shard_id: str, presence: Presence, now_ms: int) -> None:
        node = self.nodes[shard_id]
        if node.presence is not presence:
            node.presence, node.since_ms = presence, now_ms
            for child in (self.nodes[child_id] for child_id in node.children):
                # A child is missing from when it can first be expected, not from when it was first listed. One that was
                # left out because its parent was is waited for after all: the parent came back and ended.
                if presence is Presence.ENDED and child.presence in {Presence.MISSING, Presence.LEFT_OUT}:
                    child.presence, child.since_ms = Presence.MISSING, now_ms

    def _end_ancestors(self, shard_id: str, now_ms: int) -> None:
        for ancestor in self.proved_ended(shard_id):
            self._move(ancestor, Presence.ENDED, now_ms)


class _SeenOwner(NamedTuple):
    """A shard's owner, and the beat at which it was first seen to be."""

    owner: str
    epoch: int
    beat_ms: int


@dataclass(eq=False, slots=True)
class Peers:
    """What the latest looks at the ledger have shown of other servers."""

    server_id: str
    """This one's."""
    timeout_ms: int
    """After so long without a beat a server is overdue."""
    silent_ms: dict[str, int] = field(init=False, default_factory=dict)
    """For how long each one's latest beat was seen to stand still."""
    _told: dict[str, ServerState] = field(init=False, default_factory=dict)
    """What each told last."""
    _looked_ms: int | None = field(init=False, default=None)
    _claims: dict[str, _SeenOwner] = field(init=False, default_factory=dict)

    @property
    def serving(self) -> int:
        """How many of them take rows in."""
        return sum(not server_id.startswith(DRAIN) for server_id in self._told)

    def update(
        self, servers: Mapping[str, ServerState], shards: Mapping[str, ShardState], now_ms: int
    ) -> None:
        """Take in what the ledger holds."""
        watched_ms = 0 if self._looked_ms is None else min(now_ms - self._looked_ms, self.timeout_ms // 2)
        self._looked_ms = now_ms
        before, silent_ms = self._told, self.silent_ms
        self._told = {name: told for name, told in servers.items() if name != self.server_id}
        self.silent_ms = {
            name: silent_ms[name] + watched_ms
            if name in before and before[name].beat_ms == told.beat_ms
            else 0
            for name, told in self._told.items()
        }
        claims, self._claims = self._claims, {}
        for shard_id, shard in shards.items():
            if shard.owner is not None and shard.owner in self._told and not shard.ended:
                claim = claims.get(shard_id)
                if claim is None or claim[:2] != (shard.owner, shard.epoch):
                    claim = _SeenOwner(shard.owner, shard.epoch, self._told[shard.owner].beat_ms)
                self._claims[shard_id] = claim

    def counts(self, shard_id: str) -> bool:
        """Whether another server owns the shard and includes it: it has sent a heartbeat since it took the shard."""
        claim = self._claims.get(shard_id)
        return claim is not None and self._told[claim.owner].beat_ms != claim.beat_ms

    def owns(self, shard_id: str) -> bool:
        """Whether another server that has not expired owns the shard, even if it does not include the shard yet."""
        return shard_id in self._claims

    def states(self) -> tuple[ServerState, ...]:
        """Return what each of them told last; one that misses its beats is not idle any more."""
        return tuple(
            replace(told, idle=False, reason="silent")
            if told.idle and self.silent_ms[name] >= self.timeout_ms // 2
            else told
            for name, told in self._told.items()
        )

    def overdue(self) -> tuple[ServerState, ...]:
        """Return those whose beat has not changed for the timeout."""
        return tuple(told for name, told in self._told.items() if self.silent_ms[name] >= self.timeout_ms)
