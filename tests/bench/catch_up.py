"""What a catch-up holds: shards of very different speeds are read from the stream's beginning, far beyond the budgets.

The rows do not compress, so that bytes in memory, bytes of segments and bytes of the stream are about the same. A task
beside it looks at the process all the time; the most that it saw is what counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from bench.memory import resident_bytes
from bench.pipelines import Pipeline, living
from support.shards import accept

from mldserver.base.clock import SystemClock
from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.effects import Effects
from mldserver.output.layout import SEGMENTS
from mldserver.records import Sequence
from mldserver.runtime.interface import BatchOutcome, BatchOutline
from mldserver.testing import LocalEngine
from mldserver.windows import Tumbling

__all__ = ["measure"]

_SHARDS = {"fast": (0.0, 20_000), "even": (0.005, 5_000), "slow": (0.02, 2_000), "crawling": (0.05, 1_500)}
"""For each shard the seconds from one batch to the next, and the stretch of arrival times that a batch covers (ms)."""
_BATCH = 256 << 10
_ROWS = 64
_WINDOW_MS = 10_000
_TIMES = 10
"""The stream's bytes, as a multiple of the disk's budget."""


@dataclass
class _Most:
    grown: int = 0
    buffered: int = 0
    counted: int = 0
    on_disk: int = 0


def measure(disk_bytes: int, folder: Path) -> dict[str, float]:
    """Return the budgets, the most that was held of each, and the seconds that it took."""
    return asyncio.run(_measure(disk_bytes, folder))


async def _measure(disk: int, out: Path) -> dict[str, float]:
    buffer = disk // 4
    rules = CoordinatorRules(
        flush_interval_ms=500,
        flush_bytes=buffer // 4,
        buffer_bytes=buffer,
        segment_disk_bytes=disk,
        settle_time_ms=100,
    )
    engine, most, before = LocalEngine(), _Most(), resident_bytes()
    batches = _TIMES * disk // (_BATCH * len(_SHARDS))
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        living_engine = group.create_task(engine.run())
        async with living(
            out,
            spec=Tumbling(_WINDOW_MS),
            rules=rules,
            engine=engine,
            clock=SystemClock(),
            shards=tuple(_SHARDS),
        ) as running:
            looking = group.create_task(_look(running, most, before, out))
            async with asyncio.TaskGroup() as reading:
                for shard in _SHARDS:
                    reading.create_task(_read(running, shard, batches))
            await running.coordinator.over()
            await running.runner.idle()
            looking.cancel()
        living_engine.cancel()
    return {
        "stream_bytes": batches * _BATCH * len(_SHARDS),
        "buffer_bytes": buffer,
        "buffered_bytes": most.buffered,
        "disk_bytes": disk,
        "segment_bytes": most.counted,
        "files_bytes": most.on_disk,
        "grown_bytes": most.grown,
        "windows": running.runner.published,
        "seconds": time.perf_counter() - began,
    }


async def _look(running: Pipeline, most: _Most, before: int, out: Path) -> None:
    while True:
        status = running.coordinator.status()
        most.grown = max(most.grown, resident_bytes() - before)
        most.buffered = max(most.buffered, status.buffered_bytes)
        most.counted = max(most.counted, status.segment_bytes)
        most.on_disk = max(most.on_disk, await asyncio.to_thread(_files_bytes, out))
        await asyncio.sleep(0.02)


def _files_bytes(out: Path) -> int:
    total = 0
    # Folders that go meanwhile are passed over by the walk, files here.
    for folder, _, names in os.walk(out / SEGMENTS):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(folder, name).stat().st_size
    return total


async def _read(running: Pipeline, shard: str, batches: int) -> None:
    dice, session = random.Random(shard), running.sessions[shard]
    pause, span = _SHARDS[shard]
    for number in range(batches):
        session.began()
        await accept(session, _batch(shard, number, span, dice))
        await asyncio.sleep(pause)
    await session.end()


def _batch(shard: str, number: int, span: int, dice: random.Random) -> BatchOutcome:
    times = number * span + np.arange(_ROWS) * span // _ROWS
    first = number * _ROWS + 1
    table = pa.table(
        {
            "load": pa.array([dice.randbytes(_BATCH // _ROWS) for _ in range(_ROWS)], pa.binary()),
            "_time": pa.array(times, pa.int64()),
            "_shard": pa.array([shard] * _ROWS, pa.string()),
            "_sequence": pa.array([str(first + row) for row in range(_ROWS)], pa.string()),
            "_sub_sequence": pa.array([0] * _ROWS, pa.int64()),
            "_arrival": pa.array(times, pa.timestamp("ms", tz="UTC")),
        }
    )
    last = Sequence(first + _ROWS - 1)
    outline = BatchOutline(_ROWS, 0, Sequence(first), last, int(times[-1]), 60_000)
    return BatchOutcome(outline, Effects(table))
