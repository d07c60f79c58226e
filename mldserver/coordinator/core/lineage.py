"""Lineage: which shards are known, who their parents are, and which of them must be connected. A synchronous core.

A shard is known from the ledger, from a connection, or from ListShards. It is *expected* to be connected when it has
not ended and none of its known parents is still open: the KCL starts a child only after every parent's end was
checkpointed (KCL 3.1.3), so a child that connects proves that its ancestors have ended.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

__all__ = ["Lineage", "Presence", "ShardNode"]


class Presence(enum.Enum):
    """Where a shard is, seen from here."""

    CONNECTED = "connected"
    ELSEWHERE = "elsewhere"
    """Another server reads it: it counts through what that server tells."""
    MISSING = "missing"
    """Known, expected, and without a connection: it holds the watermark."""
    LEFT_OUT = "left_out"
    """Missing for longer than the limit: it holds nothing any more."""
    ENDED = "ended"


_READ = frozenset({Presence.CONNECTED, Presence.ELSEWHERE, Presence.ENDED})
"""What proves that a shard's ancestors have ended."""


@dataclass(slots=True)
class ShardNode:
    """One known shard."""

    id: str
    parents: tuple[str, ...] = ()
    presence: Presence = Presence.MISSING
    since_ms: int = 0
    """Since when it is present in this way."""
    effective_ms: int | None = None
    """Effective time of its last accepted record."""
    children: set[str] = field(default_factory=set)


class Lineage:
    """The graph of known shards."""

    def __init__(self) -> None:
        """Start with no shard known."""
        self._nodes: dict[str, ShardNode] = {}

    def __contains__(self, shard_id: str) -> bool:
        return shard_id in self._nodes

    def __getitem__(self, shard_id: str) -> ShardNode:
        return self._nodes[shard_id]

    def __len__(self) -> int:
        return len(self._nodes)

    def know(
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
        node = self._nodes.get(shard_id)
        new = node is None
        if node is None:
            presence = Presence.ENDED if ended else Presence.MISSING
            node = self._nodes[shard_id] = ShardNode(
                shard_id, presence=presence, since_ms=now_ms, effective_ms=effective_ms
            )
            node.children.update(other.id for other in self._nodes.values() if shard_id in other.parents)
            if any(self._nodes[child].presence in _READ for child in node.children):
                self._move(shard_id, Presence.ENDED, now_ms)
        gained = tuple(parent for parent in dict.fromkeys(parents) if parent not in node.parents)
        node.parents += gained
        for parent in gained:
            if parent in self._nodes:
                self._nodes[parent].children.add(shard_id)
        if gained and node.presence in _READ:
            self._end_ancestors(shard_id, now_ms)
        return new

    def proved_ended(self, shard_id: str) -> tuple[str, ...]:
        """Return the ancestors that are not known to have ended: a connection of the shard proves that they have."""
        proved: list[str] = []
        queue = list(self._nodes[shard_id].parents)
        while queue:
            node = self._nodes.get(queue.pop())
            if node is not None and node.presence is not Presence.ENDED and node.id not in proved:
                proved.append(node.id)
                queue.extend(node.parents)
        return tuple(proved)

    def connect(self, shard_id: str, now_ms: int) -> None:
        """Note that a known shard has a connection, and that its ancestors have ended."""
        self._move(shard_id, Presence.CONNECTED, now_ms)
        self._end_ancestors(shard_id, now_ms)

    def disconnect(self, shard_id: str, now_ms: int) -> None:
        """Note that a shard's connection is gone without the shard's end."""
        if self._nodes[shard_id].presence is Presence.CONNECTED:
            self._move(shard_id, Presence.MISSING, now_ms)

    def elsewhere(self, shard_id: str, now_ms: int, *, read: bool) -> None:
        """Note whether another server reads a shard. One that is connected here, or has ended, stays what it is."""
        presence = self._nodes[shard_id].presence
        if read and presence in {Presence.MISSING, Presence.LEFT_OUT}:
            self._move(shard_id, Presence.ELSEWHERE, now_ms)
            self._end_ancestors(shard_id, now_ms)
        elif not read and presence is Presence.ELSEWHERE:
            self._move(shard_id, Presence.MISSING, now_ms)

    def reach(self, shard_id: str, effective_ms: int | None) -> None:
        """Note how far another server has read a shard: its children's records come no earlier."""
        node = self._nodes[shard_id]
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
            node = self._nodes[queue.pop()]
            if node.effective_ms is not None:
                times.append(node.effective_ms)
                continue
            # Shards that were split and merged again have ancestors by many ways: each is asked once.
            unseen = {parent for parent in node.parents if parent in self._nodes} - seen
            seen |= unseen
            queue.extend(unseen)
        return max(times, default=None)

    def connected(self) -> list[ShardNode]:
        """Return the shards that have a connection."""
        return [n for n in self._nodes.values() if n.presence is Presence.CONNECTED]

    def missing(self) -> list[ShardNode]:
        """Return the shards that are expected and have no connection."""
        return [n for n in self._nodes.values() if n.presence is Presence.MISSING and self._parents_ended(n)]

    def all_ended(self) -> bool:
        """Whether the stream can be over: some shard has ended, and every other has too or was left out."""
        presences = {node.presence for node in self._nodes.values()}
        return Presence.ENDED in presences and presences <= {Presence.ENDED, Presence.LEFT_OUT}

    def forget_ended(self, before_ms: int, *, keep: AbstractSet[str] = frozenset()) -> tuple[str, ...]:
        """Drop the shards that ended before a time, but for those to keep; return them.

        Their children keep them as unknown parents.
        """
        ended = (node for node in self._nodes.values() if node.presence is Presence.ENDED)
        old = [node for node in ended if node.since_ms < before_ms and node.id not in keep]
        for node in old:
            del self._nodes[node.id]
        for node in self._nodes.values():
            node.children.difference_update(gone.id for gone in old)
        return tuple(node.id for node in old)

    def _parents_ended(self, node: ShardNode) -> bool:
        # An unknown parent counts as finished: its records were trimmed, or read before this ledger began.
        parents = (self._nodes.get(p) for p in node.parents)
        return all(p is None or p.presence in {Presence.ENDED, Presence.LEFT_OUT} for p in parents)

    def _move(self, shard_id: str, presence: Presence, now_ms: int) -> None:
        node = self._nodes[shard_id]
        if node.presence is not presence:
            node.presence, node.since_ms = presence, now_ms
            for child in (self._nodes[child_id] for child_id in node.children):
                # A child is missing from when it can first be expected, not from when it was first listed. One that was
                # left out because its parent was is waited for after all: the parent came back and ended.
                if presence is Presence.ENDED and child.presence in {Presence.MISSING, Presence.LEFT_OUT}:
                    child.presence, child.since_ms = Presence.MISSING, now_ms

    def _end_ancestors(self, shard_id: str, now_ms: int) -> None:
        for ancestor in self.proved_ended(shard_id):
            self._move(ancestor, Presence.ENDED, now_ms)
