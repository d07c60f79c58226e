"""A catch-up from the stream's beginning, over shards of very different speeds, stays within memory and disk."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from coordinator.pipeline import RULES, Pipeline

from mldserver.config.settings import WindowSettings
from mldserver.coordinator.shards import IntakeSession
from mldserver.errors import WindowFailed
from mldserver.output.layout import SEGMENTS
from mldserver.testing import LocalEngine
from mldserver.windows import TimeWindows

BUFFER = 512 << 10
DISK = 2 << 20
BATCH = 64 << 10
"""Bytes of rows in a batch, before the few of its own columns."""
IN_BATCH = BATCH * 5 // 4
WINDOW_MS = 5_000
SHARDS = {"fast": (0.01, 9_000), "even": (0.05, 3_000), "slow": (0.2, 1_500), "crawling": (0.7, 900)}
"""For each shard the seconds from one batch to the next, and the stretch of arrival times that a batch covers (ms)."""


@dataclass
class Catching:
    """A pipeline under a stream's backlog, and the most that it ever held."""

    pipeline: Pipeline
    batches: int
    buffered: int = 0
    on_disk: int = 0

    def look(self) -> None:
        self.buffered = max(self.buffered, self.pipeline.coordinator.buffer.bytes)
        segments = self.pipeline.out / SEGMENTS
        # Thousands of looks: pathlib would take most of the test.
        folders = os.scandir(segments) if segments.exists() else ()
        files = (file for folder in folders for file in os.scandir(folder) if file.name.endswith(".parquet"))
        self.on_disk = max(self.on_disk, sum(file.stat().st_size for file in files))

    def backlog(self, shard: str) -> Iterator[list[tuple[int, int]]]:
        span = SHARDS[shard][1]
        for number in range(self.batches):
            yield [(number * 10 + row + 1, number * span + row * span // 10) for row in range(10)]

    async def read(self, shard: str) -> None:
        dice = random.Random(shard)
        session = await self.pipeline.open(shard)
        for batch in self.backlog(shard):
            columns = {
                "value": pa.array([number for number, _ in batch], pa.int64()),
                "load": pa.array([dice.randbytes(BATCH // len(batch)) for _ in batch], pa.binary()),
            }
            await self.give(session, batch, columns)
            await self.pipeline.clock.sleep(SHARDS[shard][0])
        assert await session.end()

    async def give(self, session: IntakeSession, batch: Any, columns: Any) -> None:
        giving = asyncio.ensure_future(self.pipeline.give(session, batch, columns=columns, lag_ms=5000))
        await asyncio.sleep(0)
        self.look()
        await giving

    async def all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for shard in SHARDS:
                group.create_task(self.read(shard))

    def assert_bounded(self) -> None:
        assert BUFFER < self.buffered <= BUFFER + len(SHARDS) * IN_BATCH
        assert DISK < self.on_disk <= self.most_on_disk()

    def most_on_disk(self) -> int:
        """The budget, what was in flight when it was reached, and what it takes to close the next window."""
        window = sum(WINDOW_MS // span + 2 for _, span in SHARDS.values()) * IN_BATCH
        return DISK + self.buffered + window

    def assert_whole(self) -> None:
        found = Counter(
            (row["_shard"], int(row["_sequence"])) for row in self.pipeline.rows("window=*/*.parquet")
        )
        assert found == Counter((s, number) for s in SHARDS for each in self.backlog(s) for number, _ in each)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is killed here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def catching(out: Path, *, batches: int, **fields: Any) -> Catching:
    rules = replace(RULES, flush_bytes=4 * BUFFER, buffer_bytes=BUFFER, segment_disk_bytes=DISK)
    pipeline = Pipeline(out, spec=TimeWindows(WINDOW_MS), rules=rules, **fields)
    caught = Catching(pipeline, batches)
    deleted, written = pipeline.faults.before, pipeline.faults.done

    def before(name: str) -> None:
        caught.look()
        deleted(name)

    def done(name: str) -> None:
        caught.look()
        written(name)

    pipeline.faults.before, pipeline.faults.done = before, done  # type: ignore[method-assign]  # listens in
    return caught


@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param(False, id="freed when published", marks=pytest.mark.long),
        pytest.param(True, id="retained"),
    ],
)
async def test_a_catch_up_of_many_times_the_budgets_ends_within_them(
    tmp_path: Path, recompute: bool, long: bool
) -> None:
    batches = 80 if long else 40
    caught = catching(tmp_path, batches=batches, recompute=recompute)
    assert batches * len(SHARDS) * BATCH >= (10 if long else 5) * DISK
    async with caught.pipeline.life() as coordinator:
        await caught.pipeline.clock.drive(caught.all(), step=1)
        await caught.pipeline.clock.advance(120)
        assert coordinator.status().stream_ended
    caught.assert_bounded()
    caught.assert_whole()


async def test_while_windows_fail_the_disk_fills_no_further_and_later_all_is_read(tmp_path: Path) -> None:
    engine = LocalEngine(fail=lambda _: WindowFailed("Spark is away.") if away else None)
    away = True
    policy = WindowSettings(window_attempts=2)
    caught = catching(tmp_path, batches=40, engine=lambda: engine, policy=policy, retry_seconds=(1.0, 5.0))
    async with caught.pipeline.life() as coordinator, asyncio.TaskGroup() as group:
        reading = group.create_task(caught.all())
        await caught.pipeline.clock.advance(120)
        assert not reading.done()
        held = coordinator.status().segment_bytes
        await caught.pipeline.clock.advance(60)
        assert coordinator.status().segment_bytes == held <= caught.most_on_disk()
        away = False
        while not reading.done():
            await caught.pipeline.clock.advance(10)
        await caught.pipeline.clock.advance(120)
        assert coordinator.status().stream_ended
    caught.assert_bounded()
    caught.assert_whole()
