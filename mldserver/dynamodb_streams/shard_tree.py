"""The shards of a stream as a tree, from answers of DescribeStream in any order; and where in a shard to begin. Pure.

AWS's answers may be outdated, incomplete or empty for a while. So an answer only adds shards: a shard that it lacks may still
exist. A shard is forgotten only when its records were delivered, or AWS said that this shard is gone, and
``FORGOTTEN_AFTER`` answers in a row lack it.

A shard is read after its parent. A parent that no answer names must be resolved first: it is listed, or AWS says that it is
gone. If reading began inside shards (of a token, or of the ledger), the ancestors of these shards are not read. While such an
ancestor is unresolved, any shard could be an ancestor too: then only these shards and their descendants are read.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

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
    named: bool = False
    """Whether an answer of AWS has named the shard."""
    begun: bool = False
    """Whether reading began in this shard: its ancestors are not read."""
    top: bool = False
    """Whether it is read without waiting for its parent: no ancestor is left to read."""
    finished: bool = False
    absent: int = 0
    """Whole answers in a row without it."""


@dataclass(slots=True)
class ShardTree:
    """The known shards. There is never a circle of parents, whatever AWS says."""

    _nodes: dict[str, _Node] = field(default_factory=dict)
    _children: dict[str, set[str]] = field(default_factory=dict)
    """Also of parents that are not known (any more)."""

    def __contains__(self, shard_id: str) -> bool:
        return shard_id in self._nodes

    def add_listing(self, shards: Iterable[StreamShard], *, whole: bool) -> tuple[str, ...]:
        """Add the shards of an answer; return the ids that were not known, in order.

        ``whole``: the answer counts as complete, so a shard that it lacks may be forgotten later.
        """
        named = {shard.id: shard for shard in shards}
        new = tuple(sorted(named.keys() - self._nodes.keys()))
        for shard in named.values():
            node = self._update_node(shard)
            node.named, node.absent = True, 0
        if whole and named:
            self._count_absent(named.keys())
        return new

    def _update_node(self, shard: StreamShard) -> _Node:
        """Add what an answer says about a shard to its node, which is made if it is new; return the node."""
        node = self._nodes.setdefault(shard.id, _Node(StreamShard(shard.id)))
        # The first parent that is named stays. Ignore a parent that would make the shard its own ancestor.
        known, parent = node.shard, node.shard.parent or shard.parent
        if known.parent is None and parent is not None:
            if shard.id in (parent, *self.ancestors(parent)):
                parent = None
            else:
                self._children.setdefault(parent, set()).add(shard.id)
        # An outdated answer must not reopen a closed shard.
        first = known.first if shard.first is None else shard.first
        last = known.last if shard.last is None else shard.last
        node.shard = StreamShard(shard.id, parent, first, last)
        return node

    def _count_absent(self, named: AbstractSet[str]) -> None:
        """Count a complete answer for the shards that it lacks. Forget finished shards that 100 answers in a row have lacked."""
        for name in self._nodes.keys() - named:
            node, parent = self._nodes[name], self._nodes[name].shard.parent
            node.absent += 1
            if not node.finished or node.absent < FORGOTTEN_AFTER:
                continue
            del self._nodes[name]
            for child in self.children(name):
                self._nodes[child].top = True
            if parent is not None:
                self._children[parent].discard(name)
                if not self._children[parent]:
                    del self._children[parent]

    def begin(self, shards: Iterable[StreamShard]) -> None:
        """Note the shards in which reading began before: nothing above them is read. They need not be listed."""
        for shard in shards:
            self._update_node(shard).begun = True

    def gone(self, shard_id: str) -> None:
        """Note that an unresolved shard does not exist any more."""
        node = self._update_node(StreamShard(shard_id))
        node.top = True
        node.finished = node.finished or not node.begun

    def exists(self, shard_id: str) -> None:
        """Note that an unresolved shard exists, though no answer names it: it is read as one without a parent."""
        self._update_node(StreamShard(shard_id)).top = True

    def finished(self, shard_id: str) -> None:
        """Note that nothing of a shard is left to hand over (all of it was, or AWS says that it is gone): its children may start.

        It need not be known yet.
        """
        self._nodes.setdefault(shard_id, _Node(StreamShard(shard_id))).finished = True

    def is_finished(self, shard_id: str) -> bool:
        """Whether a shard needs no more reading; an unknown one counts as finished."""
        node = self._nodes.get(shard_id)
        return node is None or node.finished

    def readable(self) -> tuple[str, ...]:
        """Return the shards to read now: those that are not finished, while their parents are. In the order of their ids."""
        return self._survey()[0]

    def unresolved(self) -> tuple[str, ...]:
        """Return the ids for which shards wait and that no answer has named, until ``gone`` or ``exists`` is called."""
        return self._survey()[1]

    def _survey(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return ``readable()`` and ``unresolved()`` together: one pass over the tree finds both."""
        nodes = self._nodes
        ancestors, unresolved_ancestors = self._ancestors_of_begun()
        readable: list[str] = []
        unresolved: set[str] = set()
        for shard_id, node in sorted(nodes.items()):
            if node.finished or shard_id in ancestors:
                continue
            parent = node.shard.parent
            starts_a_lineage = node.begun or node.top
            if not (starts_a_lineage or parent is None or parent in ancestors):
                if parent not in nodes:
                    unresolved.add(parent)
                    continue
                if not nodes[parent].finished:
                    continue
            # While an ancestor is unresolved, a shard outside these lineages could be an ancestor too.
            if unresolved_ancestors and not (node.begun or self._descends(shard_id)):
                unresolved |= unresolved_ancestors
                continue
            readable.append(shard_id)
        return tuple(readable), tuple(sorted(unresolved))

    def _ancestors_of_begun(self) -> tuple[set[str], set[str]]:
        """Return the ancestors of the shards in which reading began, and which ancestors no answer of AWS has named."""
        ancestors: set[str] = set()
        unresolved: set[str] = set()
        for shard_id in [name for name, node in self._nodes.items() if node.begun]:
            name, node = shard_id, self._nodes.get(shard_id)
            while node and not node.top and node.shard.parent and node.shard.parent not in ancestors:
                name = node.shard.parent
                ancestors.add(name)
                node = self._nodes.get(name)
            if node is None or not (node.named or node.top or node.shard.parent):
                unresolved.add(name)
        return ancestors, unresolved

    def _descends(self, shard_id: str) -> bool:
        """Return whether reading began in an ancestor of the shard."""
        return any(name in self._nodes and self._nodes[name].begun for name in self.ancestors(shard_id))

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
        """Return the parents of every shard that exists as far as is known, by its id."""
        exist = (name for name, node in self._nodes.items() if node.named or not node.finished)
        return {shard_id: self.parents(shard_id) for shard_id in sorted(exist)}

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
