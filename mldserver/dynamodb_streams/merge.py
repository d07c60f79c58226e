"""Shards merged into one order. A pure core: no event loop, times are passed in.

An item's *effective time* is the highest time of its shard so far, and at least the last effective time of the parent
shard. So the order inside a shard, and parents before children, win over times. Items are returned by (effective time,
clock). The clock counts the pages in the order in which they came.

An item is returned once no item that comes later can belong before it. Two facts show that:
- The next items of a shard are not earlier than its last item.
- If a request found a shard at the stream's tip, the shard's next items were created after that request began.
The caller may pass over a shard that does not answer: until the next page or tip of that shard, the merge ignores it.

The heap holds pages, not items. From the page whose first item is the earliest, all items not later than the next page's
first item are returned at once. DynamoDB's times are whole seconds, so such runs are long.
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
    """Effective time of the last item that came. Later items have at least this time."""
    tip_ms: int = _NEVER
    """Its next items were created after this steady time."""
    waiting: int = 0
    """Items that came and were not returned yet."""
    passed_over: bool = False
    """Whether the merge does not wait for its next items."""


@dataclass(slots=True)
class _MergePage(Generic[_T]):
    shard: _MergeShard
    items: Sequence[_T]
    times: list[int]
    """The items' effective times, in order."""
    came_ms: int
    """Steady time at which the page came: its items were created before."""
    at: int = 0
    """Index of the first item that was not returned yet."""


@dataclass(eq=False, slots=True)
class Merge(Generic[_T]):
    """Takes pages of shards in, and gives their items out in order."""

    _shards: dict[str, _MergeShard] = field(default_factory=dict)
    _heads: list[tuple[int, int, _MergePage[_T]]] = field(default_factory=list)
    """A heap of pages, by the effective time of their first item and by the clock."""
    _clock: int = 0

    def open(self, shard_id: str, *, floor_ms: int | None = None) -> None:
        """Add a shard. Until its first page or tip, no item later than ``floor_ms`` is returned.

        ``floor_ms``: the parent's last effective time; None: there is no parent.
        """
        self._shards[shard_id] = _MergeShard(0 if floor_ms is None else floor_ms)

    def feed(self, shard_id: str, items: Sequence[_T], times: list[int], *, now_ms: int) -> None:
        """Take a page of an open shard in: at least one item, with their times (ms). ``now_ms``: steady time."""
        shard = self._shards[shard_id]
        # Most pages are in order already, and this check is cheap.
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
        """Return the next items in the merged order, and remove them: those that no later item of any shard can precede.

        An empty list: all items must wait for another shard's page or tip. Items of equal times may exceed ``limit``.
        """
        items: list[_T] = []
        heads = self._heads
        awaited = [shard for shard in self._shards.values() if not shard.passed_over]
        # No shard can bring an item earlier than this.
        complete_ms = min((shard.last_ms for shard in awaited), default=math.inf)
        while heads and len(items) < limit:
            head_ms, clock, page = heads[0]
            until_ms = complete_ms
            if head_ms > complete_ms:
                # A shard that was at its tip after this page came cannot bring items that belong before the page's.
                not_at_tip = (shard.last_ms for shard in awaited if shard.tip_ms <= page.came_ms)
                until_ms = min(not_at_tip, default=math.inf)
            if head_ms > until_ms:
                break
            # The second page in order is one of the heap's next two entries.
            next_ms, next_clock = min(heads[1:3], default=(math.inf, 0))[:2]
            # Of items with equal times, those of the page that came first are returned first.
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
