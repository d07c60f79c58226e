"""Direct reading of DynamoDB Streams: what the merge costs against a heap of single records, and how fast shards are read.

The merged records are those of busy shards that catch up: 100 a second in each, a tenth of what DynamoDB takes in. Their
times are whole seconds, as DynamoDB's are: runs of about 100 records of a shard have one time.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import time
from collections.abc import Iterator
from typing import Final

from bench.rounds import in_turn, medians

from mldserver.dynamodb_streams import Stream
from mldserver.dynamodb_streams.merge import Merge
from mldserver.records import Record
from mldserver.testing import FakeStreams

__all__ = ["measure"]

MERGED: Final = (8, 64, 512)
"""Shards of the merge."""
READ: Final = (1, 8, 64)
"""Shards of the reader."""
PAGE: Final = 1000
TAKEN: Final = 4000
A_SECOND: Final = 100
START_MS: Final = 1_800_000_000_000


def pages(count: int, records: int) -> dict[str, list[list[Record]]]:
    """Return the pages of so many shards, in all about ``records``."""
    return {
        (name := f"shardId-{shard}"): [
            [
                Record(
                    shard_id=name,
                    sequence_number=str(number),
                    arrival_ms=START_MS + (number * 1000 // A_SECOND + shard * 7) // 1000 * 1000,
                )
                for number in range(first, min(first + PAGE, records // count))
            ]
            for first in range(0, records // count, PAGE)
        ]
        for shard in range(count)
    }


def merged(by_shard: dict[str, list[list[Record]]]) -> list[list[Record]]:
    """Merge as ``Stream`` does: each shard's next page comes when less than one is waiting."""
    merge: Merge[Record] = Merge()
    unread = {shard_id: iter(pages) for shard_id, pages in by_shard.items()}
    for shard_id in unread:
        merge.open(shard_id)
    out: list[list[Record]] = []
    while True:
        for shard_id in [name for name in unread if merge.waiting(name) < PAGE]:
            page = next(unread[shard_id], None)
            if page is not None:
                merge.feed(shard_id, page, [record.arrival_ms or 0 for record in page], now_ms=0)
            elif not merge.waiting(shard_id):
                del unread[shard_id]
                merge.close(shard_id)
        items = merge.take(TAKEN)
        if not (items or unread):
            return out
        out.append(items)


def heap(by_shard: dict[str, list[list[Record]]]) -> list[Record]:
    """Merge by a heap of single records, the next one of each shard."""
    clock = 0
    heads: list[tuple[int, int, Record, Iterator[Record]]] = []
    for pages in by_shard.values():
        following = itertools.chain.from_iterable(pages)
        record = next(following)
        heads.append((record.arrival_ms or 0, clock, record, following))
        clock += 1
    heapq.heapify(heads)
    out: list[Record] = []
    while heads:
        effective_ms, _, record, following = heads[0]
        out.append(record)
        succeeding = next(following, None)
        if succeeding is None:
            heapq.heappop(heads)
        else:
            clock += 1
            effective_ms = max(effective_ms, succeeding.arrival_ms or 0)
            heapq.heapreplace(heads, (effective_ms, clock, succeeding, following))
    return out


def merges(records: int, rounds: int) -> dict[int, dict[str, float]]:
    """Return records a second (of processor time) of both, by the number of shards."""
    found = {}
    for count in MERGED:
        by_shard = pages(min(count, records), records)
        both = list(itertools.chain.from_iterable(merged(by_shard))), heap(by_shard)
        # A contender that came to another result would prove nothing.
        for out in both:
            times = [record.arrival_ms or 0 for record in out]
            assert times == sorted(times)
            for shard_id, own in itertools.islice(by_shard.items(), 8):
                in_order = list(itertools.chain.from_iterable(own))
                assert [record for record in out if record.shard_id == shard_id] == in_order
        assert len(both[0]) == len(both[1]) == records // len(by_shard) * len(by_shard)
        seconds: dict[str, list[float]] = {"merge": [], "heap": []}
        for name in in_turn(tuple(seconds), rounds):
            gc.collect()
            began = time.process_time()
            (merged if name == "merge" else heap)(by_shard)
            seconds[name].append(time.process_time() - began)
        found[count] = {name: len(both[0]) / each for name, each in medians(seconds).items()}
    return found


async def read(count: int, records: int) -> dict[str, float]:
    """Return what a ``Stream`` over so many shards hands over: records a second, and microseconds of processor for each.

    The fake is in memory; botocore parses its answers. No shard is asked more often than AWS allows.
    """
    fake = FakeStreams(shards=count)
    for shard_id in fake.open_shards:
        for number in range(records // count):
            fake.put({"id": f"{shard_id}-{number}"}, shard_id=shard_id)
    total = records // count * count
    async with Stream(fake.table, "trim_horizon", make_client=fake.client, poll_seconds=0.2) as stream:
        began, began_cpu = time.perf_counter(), time.process_time()
        changes = [await anext(stream) for _ in range(total)]
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    assert len({change.event_id for change in changes}) == total
    return {"records_s": total / seconds, "cpu_us": cpu_seconds / total * 1e6}


def measure(records: int, rounds: int) -> dict[str, dict[int, dict[str, float]]]:
    """Merge so many records, and read a tenth as many; by the number of shards."""
    return {
        "merge": merges(records, rounds),
        "read": {count: asyncio.run(read(count, max(count, records // 10))) for count in READ},
    }
