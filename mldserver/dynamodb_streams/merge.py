"""Shards merged into one order. A pure core: no event loop, times are passed in.

An item's *effective time* is the running maximum of times inside its shard, floored by the last of its parent: so the
order inside a shard, and parents before children, win over times. Items go out by (effective time, clock), where the
clock counts pages as they are handed over.

An item goes out once no later arrival can belong before it. A shard's future items are not earlier than its last item.
After a look that found the shard at the stream's tip, they were created after that look began. The caller may pass over
a shard that does not answer: until it is fed or at its tip again, items go out as if it had none.

Pages go through a heap, not items: from the page with the least head, all items not later than the next page's head
go out at once. DynamoDB's times are whole seconds, so such runs are long.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, Generic, TypeVar

_T = TypeVar("_T")

_NEVER: Final = -1


@dataclass(slots=True)
class _MergeShard:
    last_ms: int
    """Effective time of the last item that came: no later one has less."""
    tip_ms: int = _NEVER
    """What it brings from now on was created after this (steady) time."""
    waiting: int = 0
    """Items that came and did not go out."""
    passed_over: bool = False


@dataclass(slots=True)
class _MergePage(Generic[_T]):
    shard: _MergeShard
    items: Sequence[_T]
    times: list[int]
    """Their effective times, in order."""
    came_ms: int
    """Steady time at which it was here: its items were created before."""
    at: int = 0
    """The first item that did not go out."""


@dataclass(eq=False, slots=True)
class Merge(Generic[_T]):
    """Takes pages of shards in, and gives their items out in order."""

    _shards: dict[str, _MergeShard] = field(default_factory=dict)
    _heads: list[tuple[int, int, _MergePage[_T]]] = field(default_factory=list)
    """A heap of pages, by the effective time of their first item and by the clock."""
    _clock: int = 0

    def open(self, shard_id: str, *, floor_ms: int | None = None) -> None:
        """Add a shard: nothing beyond ``floor_ms`` (its parent's last) goes out until it is fed or at its tip."""
        self._shards[shard_id] = _MergeShard(0 if floor_ms is None else floor_ms)

    def feed(self, shard_id: str, items: Sequence[_T], times: list[int], *, now_ms: int) -> None:
        """Take a page of an open shard in: at least one item, with their times (ms). ``now_ms``: steady time."""
        shard = self._shards[shard_id]
        # Most pages are in order as they are, which costs little to see.
        if times[0] < shard.last_ms or times != sorted(times):
            times = list(accumulate(times, max, initial=shard.last_ms))[1:]
        shard.last_ms, shard.passed_over = times[-1], False
        shard.waiting += len(items)
        self._clock += 1
        heapq.heappush(self._heads, (times[0], self._clock, _MergePage(shard, items, times, now_ms)))

    def tip(self, shard_id: str, *, began_ms: int) -> None:
        """Note that an open shard had nothing more when it was asked, at this steady time."""
        shard = self._shards[shard_id]
        shard.tip_ms, shard.passed_over = began_ms, False

    def pass_over(self, shard_id: str) -> bool:
        """Do not wait for an open shard until it is fed or at its tip again; return whether it was waited for."""
        shard = self._shards[shard_id]
        waited_for, shard.passed_over = not shard.passed_over, True
        return waited_for

    def end(self, shard_id: str) -> None:
        """Note that an open shard was read to its end: its children may have records that were not read yet.

        Nothing later than its own last item goes out until ``close``.
        """
        self._shards[shard_id].tip_ms = _NEVER

    def close(self, shard_id: str) -> None:
        """Remove a shard, which then holds nothing back: it has ended, its items are out, its children open."""
        del self._shards[shard_id]

    def waiting(self, shard_id: str) -> int:
        """Return how many items of an open shard came and did not go out."""
        return self._shards[shard_id].waiting

    def take(self, limit: int) -> list[_T]:
        """Return what may go out next: not much more than ``limit`` items, none if all must wait."""
        items: list[_T] = []
        heads = self._heads
        awaited = [shard for shard in self._shards.values() if not shard.passed_over]
        sure_ms = min((shard.last_ms for shard in awaited), default=math.inf)
        while heads and len(items) < limit:
            head_ms, clock, page = heads[0]
            until_ms = sure_ms
            if head_ms > sure_ms:
                # A shard whose tip was seen since the page came has nothing that belongs before it.
                others = (shard.last_ms for shard in awaited if shard.tip_ms <= page.came_ms)
                until_ms = min(others, default=math.inf)
            if head_ms > until_ms:
                break
            next_ms, next_clock = min(heads[1:3], default=(math.inf, 0))[:2]
            # Of equal times, the page that came first goes first.
            if next_ms > until_ms or clock < next_clock:
                stop = bisect_right(page.times, min(next_ms, until_ms), page.at)
            else:
                stop = bisect_left(page.times, next_ms, page.at)
            items += page.items[page.at : stop]
            page.shard.waiting -= stop - page.at
            page.at = stop
            if stop < len(page.times):
                heapq.heapreplace(heads, (page.times[stop], clock, page))
            else:
                heapq.heappop(heads)
        return items
