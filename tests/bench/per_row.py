"""What a row costs to merge and to write, against a heap of single records and pyarrow's bare write."""

from __future__ import annotations

import heapq
import itertools
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from bench.deliveries import HOUR_MS, SHARDS, Delivered, deliveries
from bench.rounds import timed

from mldserver.coordinator.core.flush import buffered, plan
from mldserver.ledger.contract import BatchProgress, SegmentKind
from mldserver.output.store import OutputStore
from mldserver.windows import TimeWindows

__all__ = ["measure"]

SPEC = TimeWindows(HOUR_MS, on="scheduled")


def merge(delivered: list[Delivered]) -> pa.Table:
    """Do what a flush does before it writes: effective times, merge, clock, windows."""
    floors: dict[str, int | None] = dict.fromkeys(SHARDS)
    batches = []
    for each in delivered:
        batch = buffered(each.shard_id, 1, each.outcome, floor_ms=floors[each.shard_id], spec=SPEC)
        floors[each.shard_id] = batch.effective_ms
        batches.append(batch)
    planned = plan(
        batches,
        spec=SPEC,
        clock=0,
        progress=BatchProgress(),
        now_ms=0,
        durable=dict.fromkeys(SHARDS),
        kind=lambda _key: SegmentKind.WINDOW,
    )
    return pa.concat_tables(file.rows for file in planned.files)


def heap(times_by_shard: list[list[int]]) -> list[tuple[int, int, int]]:
    """Merge single records by effective time: a heap with the next record of each shard."""
    heads = []
    for shard, times in enumerate(times_by_shard):
        if times:
            heads.append((times[0], shard, 0))
    heapq.heapify(heads)
    merged = []
    while heads:
        time_ms, shard, place = first = heads[0]
        merged.append(first)
        times = times_by_shard[shard]
        if place + 1 < len(times):
            following = times[place + 1]
            heapq.heapreplace(heads, (max(following, time_ms), shard, place + 1))
        else:
            heapq.heappop(heads)
    return merged


def measure(rows: int, rounds: int, folder: Path) -> dict[str, float]:
    """Return nanoseconds a row: ``merge``, ``heap``, ``write`` (synced), ``bare write`` with zstd and with its defaults."""
    folder.mkdir(parents=True)
    delivered = deliveries(rows, batch=1000, closing=False)
    by_shard = [
        list(
            itertools.chain.from_iterable(
                each.outcome.effects.rows["_time"].to_pylist() for each in delivered if each.shard_id == shard
            )
        )
        for shard in SHARDS
    ]
    table = merge(delivered)
    # A contender that came to another result would prove nothing.
    assert [time_ms for time_ms, _, _ in heap(by_shard)] == table["_time"].to_pylist()
    store = OutputStore(str(folder))
    numbers = itertools.count()

    def bare(**options: object) -> None:
        pq.write_table(table, folder / f"bare-{next(numbers)}.parquet", **options)

    seconds = timed(
        {
            "merge": lambda: merge(delivered),
            "heap": lambda: heap(by_shard),
            "write": lambda: store.write(f"segments/{next(numbers)}.parquet", table),
            "bare_write": lambda: bare(compression="zstd", compression_level=1),
            "bare_write_snappy": bare,
        },
        rounds,
    )
    return {name: each / rows * 1e9 for name, each in seconds.items()}
