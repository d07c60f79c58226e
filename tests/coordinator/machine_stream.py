"""A stream and its lease table, said naively: what a daemon delivers, and what must come of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["row", "none", "bad"]


@dataclass(frozen=True, slots=True)
class Made:
    """A record, and what the handler makes of it: a row, nothing, or a dead letter."""

    number: int
    ms: int
    """Arrival time."""
    at_ms: int
    """Event time, where windows are cut on a column."""
    kind: Kind


@dataclass(slots=True)
class StreamShard:
    parents: tuple[str, ...] = ()
    records: list[Made] = field(default_factory=list)
    closed: bool = False
    """Split or merged: nothing is added any more."""
    lease: int = 0
    """The token of the connection that has the lease; older ones may not checkpoint."""
    checkpoint: int = 0
    ended: bool = False
    """Its end is checkpointed."""


class Stream:
    """Shards by name; sequence numbers rise over all of them, as Kinesis gives them."""

    def __init__(self) -> None:
        self.shards = {name: StreamShard() for name in ("a", "b")}
        self._numbers = itertools.count(1)
        self._names = itertools.count()

    def add(self, name: str, ms: int, at_ms: int, kind: Kind) -> None:
        self.shards[name].records.append(Made(next(self._numbers), ms, at_ms, kind))

    def child(self, *parents: str) -> None:
        """Split one shard (call it twice), or merge two."""
        for parent in parents:
            self.shards[parent].closed = True
        self.shards[f"c{next(self._names)}"] = StreamShard(parents)

    def growing(self) -> list[str]:
        return [name for name, shard in self.shards.items() if not shard.closed]

    def readable(self) -> list[str]:
        """Return the shards that a daemon may have a lease of: not ended, and all parents have ended."""
        return [
            name
            for name, shard in self.shards.items()
            if not shard.ended and all(self.shards[parent].ended for parent in shard.parents)
        ]

    def effective(self, name: str) -> list[int]:
        """Return the effective time of each record of a shard: never less than before, or than the parents' last."""
        times: list[int] = []
        floor = self._floor(name)
        for record in self.shards[name].records:
            floor = max(floor, record.ms)
            times.append(floor)
        return times

    def _floor(self, name: str) -> int:
        return max(
            ((self.effective(p) or [self._floor(p)])[-1] for p in self.shards[name].parents), default=0
        )
