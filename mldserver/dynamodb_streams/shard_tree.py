"""The shards of a stream as a tree, from answers of DescribeStream in any order; and where in a shard to begin. Pure.

What AWS answers may be old, short or empty for a while. So an answer only adds: that a shard is missing from it says
nothing yet. A shard is forgotten when its records were handed over, or AWS said of this very shard that it is gone, and
then only after ``FORGOTTEN_AFTER`` answers in a row without it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Set as AbstractSet

FORGOTTEN_AFTER: Final = 100
"""Whole answers in a row without it, until a finished shard is forgotten. One that came back later would be read again."""


class Sentinel(enum.Enum):
    """A place in every shard."""

    TRIM_HORIZON = "TRIM_HORIZON"
    """Before the oldest record that is still there."""
    LATEST = "LATEST"
    """Behind the newest one."""


TRIM_HORIZON: Final = Sentinel.TRIM_HORIZON
LATEST: Final = Sentinel.LATEST


@dataclass(frozen=True, slots=True)
class At:
    """With the record of this sequence number."""

    number: int


@dataclass(frozen=True, slots=True)
class After:
    """Behind the record of this sequence number."""

    number: int


@dataclass(frozen=True, slots=True)
class Since:
    """With the first record that was created at this time (milliseconds since the epoch) or later."""

    ms: int


Start: TypeAlias = Sentinel | At | After | Since
"""Where in a shard to begin."""


class StreamShard(NamedTuple):
    """One shard, as DescribeStream has it."""

    id: str
    parent: str | None = None
    first: int | None = None
    """The lowest sequence number it can have."""
    last: int | None = None
    """The highest; None while it is open."""


@dataclass(slots=True)
class _Node:
    shard: StreamShard
    finished: bool = False
    absent: int = 0
    """Whole answers in a row without it."""
    orphaned: int = 0
    """Whole answers that named it without its parent."""


@dataclass(slots=True)
class ShardTree:
    """The known shards. There is never a circle of parents, whatever AWS says."""

    _nodes: dict[str, _Node] = field(default_factory=dict)
    _children: dict[str, set[str]] = field(default_factory=dict)
    """Also of parents that are not known (any more)."""

    def __contains__(self, shard_id: str) -> bool:
        return shard_id in self._nodes

    def learn(self, shards: Iterable[StreamShard], *, whole: bool) -> tuple[str, ...]:
        """Take in what an answer names; return the shards that were not known, in the order of their ids.

        ``whole``: it was read to its last page, and names all shards as far as AWS knows just now.
        """
        named = {shard.id: shard for shard in shards}
        new = tuple(sorted(named.keys() - self._nodes.keys()))
        for shard in named.values():
            node = self._nodes.setdefault(shard.id, _Node(StreamShard(shard.id)))
            node.absent = 0
            # The first parent that is named stays. One that would make the shard its own ancestor is none.
            known, parent = node.shard, node.shard.parent or shard.parent
            if known.parent is None and parent is not None:
                if shard.id in (parent, *self.ancestors(parent)):
                    parent = None
                else:
                    self._children.setdefault(parent, set()).add(shard.id)
            # An old answer does not open a closed shard again.
            first = known.first if shard.first is None else shard.first
            last = known.last if shard.last is None else shard.last
            node.shard = StreamShard(shard.id, parent, first, last)
        if whole and named:
            self._left_out(named.keys())
        return new

    def _left_out(self, named: AbstractSet[str]) -> None:
        """Count what a whole answer lacks: parents of the shards that it names, and shards, which are forgotten in the end."""
        for name in named:
            node, parent = self._nodes[name], self._nodes[name].shard.parent
            node.orphaned += parent is not None and parent not in self._nodes
        for name in self._nodes.keys() - named:
            node, parent = self._nodes[name], self._nodes[name].shard.parent
            node.absent += 1
            if not node.finished or node.absent < FORGOTTEN_AFTER:
                continue
            del self._nodes[name]
            if parent is not None:
                self._children[parent].discard(name)
                if not self._children[parent]:
                    del self._children[parent]

    def finished(self, shard_id: str) -> None:
        """Note that nothing of a shard is left to hand over (all of it was, or AWS says that it is gone): its children may start.

        It need not be known yet.
        """
        self._nodes.setdefault(shard_id, _Node(StreamShard(shard_id))).finished = True

    def is_finished(self, shard_id: str) -> bool:
        """Whether nothing more is to be read of a shard; an unknown one counts as finished."""
        node = self._nodes.get(shard_id)
        return node is None or node.finished

    def doubtful(self) -> tuple[str, ...]:
        """Return the shards whose parent is not known, as one whole answer alone has said: it may have been short."""
        nodes = self._nodes.values()
        return tuple(n.shard.id for n in nodes if n.orphaned == 1 and n.shard.parent not in self._nodes)

    def readable(self) -> tuple[str, ...]:
        """Return the shards to read now: those that are not finished, while their parents are. In the order of their ids."""
        return tuple(
            shard_id
            for shard_id, node in sorted(self._nodes.items())
            if not node.finished and all(map(self.is_finished, self.parents(shard_id)))
        )

    def parents(self, shard_id: str) -> tuple[str, ...]:
        """Return the parent's id, whether or not that shard is known; nothing for a shard that has none."""
        node = self._nodes.get(shard_id)
        return () if node is None or node.shard.parent is None else (node.shard.parent,)

    def children(self, shard_id: str) -> tuple[str, ...]:
        """Return the known children, in the order of their ids; those of an unknown shard too."""
        return tuple(sorted(self._children.get(shard_id, ())))

    def ancestors(self, shard_id: str) -> tuple[str, ...]:
        """Return the parent, its parent and so on, as far as they are known, and the first that is not."""
        found: tuple[str, ...] = ()
        while parents := self.parents(found[-1] if found else shard_id):
            found += parents
        return found

    def listing(self) -> dict[str, tuple[str, ...]]:
        """Return the parents of every known shard, by its id."""
        return {shard_id: self.parents(shard_id) for shard_id in sorted(self._nodes)}

    def walk(self) -> Iterator[tuple[int, StreamShard]]:
        """Yield every known shard with its depth, parents before their children: the tree as it is shown.

        Its roots are the shards that have no parent, or none that is known. All in the order of their ids.
        """
        nodes = sorted(self._nodes.items(), reverse=True)
        stack = [(0, shard_id) for shard_id, node in nodes if node.shard.parent not in self._nodes]
        while stack:
            depth, shard_id = stack.pop()
            yield depth, self._nodes[shard_id].shard
            stack += [(depth + 1, child) for child in reversed(self.children(shard_id))]
