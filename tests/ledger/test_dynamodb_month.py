"""A month of a pipeline in DynamoDB: the table and the book in memory stay as large as after the first days."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mldserver.ledger.contract import Commit, Flush, PositionUpdate, Segment, SegmentKind, ServerState
from mldserver.records import Sequence
from tests.ledger.dynamodb_fake import size_of

if TYPE_CHECKING:
    from mldserver.ledger.dynamodb import DynamoLedger
    from tests.ledger.dynamodb_fake import FakeDynamo

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
DAYS = 31


class Shards:
    """The shards of a stream: each day a shard is split, on two days of four, or two are merged, on the others."""

    def __init__(self) -> None:
        self.read: dict[str, Sequence | None] = {}
        """Where each open shard stands."""
        self._numbers = itertools.count()

    async def open(self, ledger: DynamoLedger, *parents: str) -> None:
        shard_id = f"shard-{next(self._numbers):06d}"
        assert (await ledger.open_shard(shard_id, parents)).epoch == 1
        self.read[shard_id] = None

    async def change(self, ledger: DynamoLedger, day: int) -> None:
        """Read parents to their end, then open their children."""
        oldest = sorted(self.read)
        parents = oldest[:1] if day % 4 < 2 else oldest[:2]
        await ledger.end_shards(frozenset(parents))
        for parent in parents:
            del self.read[parent]
        for _ in range(3 - len(parents)):
            await self.open(ledger, *parents)

    def move(self, to: Sequence, now_ms: int) -> tuple[PositionUpdate, ...]:
        moves = tuple(
            PositionUpdate(shard_id, 1, to, now_ms, now_ms, previous=before)
            for shard_id, before in self.read.items()
        )
        self.read = dict.fromkeys(self.read, to)
        return moves


async def play_hour(ledger: DynamoLedger, hour: int, shards: Shards, clock: Any) -> None:
    """Fill a window, publish it, take late rows of one of five hours ago, and let go of what is a day old."""
    clock.ms += HOUR_MS
    name, bounds = f"w{hour:06d}", (hour * HOUR_MS, (hour + 1) * HOUR_MS)
    segments = tuple(Segment(f"{name}-{n}", name, 5, 500, *bounds) for n in range(3))
    late: tuple[Segment, ...] = ()
    if hour >= 5:
        again, start = f"w{hour - 5:06d}", (hour - 5) * HOUR_MS
        rows = Segment(f"again-{hour}", again, 1, 100, start, start + HOUR_MS, SegmentKind.RECOMPUTE)
        late = (rows, dataclasses.replace(rows, path=f"late-{hour}", kind=SegmentKind.LATE))
    assert (
        await ledger.register(
            Flush(shards.move(Sequence(hour + 1), clock.ms), (*segments, *late), clock=hour)
        )
    ).registered
    names = tuple(dict.fromkeys(each.window_id for each in (*segments, *late)))
    assert len(await ledger.cut(names)) == len(names)
    begun = await ledger.begin_attempts(names)
    await ledger.commit(tuple(Commit(each, begun[each], "stage", ("f",), 1) for each in names))
    await ledger.published(begun)
    await ledger.late_published((f"late-{hour}",))
    await ledger.expire(published_before_ms=clock.ms - DAY_MS, keep_bytes=10**9)
    await ledger.prune(windows_before_ms=clock.ms - DAY_MS, shards_before_ms=clock.ms - 3 * DAY_MS)
    await ledger.sync(ServerState("one", clock.ms), 1)


async def test_over_a_month_the_table_and_the_book_stay_as_large_as_after_the_first_days(
    ledger_on: Callable[..., DynamoLedger], dynamo: FakeDynamo, clock: Any
) -> None:
    ledger = ledger_on(compact_bytes=4_000)
    await ledger.open()
    shards = Shards()
    await shards.open(ledger)
    sizes: list[dict[str, int]] = []
    for day in range(DAYS):
        most: dict[str, int] = {}
        for hour in range(day * 24, day * 24 + 24):
            await play_hour(ledger, hour, shards, clock)
            for what, size in measured(ledger, dynamo).items():
                most[what] = max(size, most.get(what, 0))
        await shards.change(ledger, day)
        sizes.append(most)
    for what in sizes[0]:
        early, late = (max(size[what] for size in days) for days in (sizes[5:12], sizes[-7:]))
        assert late <= early * 1.1 + 1, what
    assert sizes[-1]["windows"] <= 24 + 7
    # At most three are open, and six ended on the last days; there were 48.
    assert max(size["shards"] for size in sizes) <= 9
    assert max(shards.read) == "shard-000047"
    await ledger.close()


def measured(ledger: DynamoLedger, dynamo: FakeDynamo) -> dict[str, int]:
    assert ledger._journal is not None
    book, items = ledger._journal.book, dynamo.items["p"]
    return {
        "items": len(items),
        "bytes": sum(size_of(item) for item in items.values()),
        "windows": len(book.windows),
        "paths": len(book.paths),
        "changed": len(book.changed),
        "shards": len(book.shards),
    }
