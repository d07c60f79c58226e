"""A month in the life of a pipeline: shards split and merge every day, rows come late, and nothing piles up."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from coordinator.pipeline import RULES, Pipeline

from mldserver.coordinator.coordinator import Coordinator
from mldserver.coordinator.shards import IntakeSession
from mldserver.output.layout import LEDGER, PRIVATE, SERVERS
from mldserver.windows import TimeWindows

HOUR_MS = 3_600_000
DAYS_OF_A_LIFE = 4
TABLES = ("servers", "shards", "windows", "segments", "late_segments")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is killed here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Month:
    """A stream of two shards, which a day later are one, and the day after two again."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.number = 0
        self.sessions: list[IntakeSession] = []

    async def come_back(self) -> None:
        """Connect the shards again that were connected when the server died."""
        self.sessions = [await self.pipeline.open(session.shard_id) for session in self.sessions]

    async def begin_day(self, day: int) -> None:
        """End the shards and open their children: two for one, or one for two."""
        ended = [session.shard_id for session in self.sessions]
        for session in self.sessions:
            await session.end()
        children = [f"shard-{day:03d}-{n}" for n in range(2 - day % 2)]
        self.sessions = [await self.pipeline.open(child, parents=tuple(ended)) for child in children]

    async def hour(self) -> None:
        now_ms = self.pipeline.clock.now_ms()
        for session in self.sessions:
            await self.give(session, now_ms)
        await self.pipeline.clock.sleep(1800)
        for session in self.sessions:
            await self.give(session, now_ms + 1_800_000)
        await self.pipeline.clock.sleep(1800)

    async def give(self, session: IntakeSession, ms: int) -> None:
        """Give rows of now, and one in three times one of three hours (or of two days) ago."""
        self.number += 10
        behind = {0: 3 * HOUR_MS, 3: 50 * HOUR_MS}.get(self.number // 10 % 6, 0)
        times = [ms, ms - behind]
        await self.pipeline.give(
            session,
            [(self.number + n, ms) for n in range(2)],
            columns={"value": [self.number, self.number + 1], "at": _timestamps(times)},
        )

    async def day(self, day: int) -> None:
        await self.begin_day(day)
        for _ in range(24):
            await self.hour()


def _timestamps(times: list[int]) -> object:
    return pa.array(times, pa.timestamp("ms", tz="UTC"))


def ledger_size(out: Path) -> dict[str, int]:
    """Count rows by table, and the pages that the file needs."""
    with closing(sqlite3.connect(out / LEDGER)) as db:
        rows = {table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES}
        pages, free = (
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count")
        )
    return rows | {"pages": pages, "used_pages": pages - free}


def names_below(out: Path) -> dict[str, int]:
    """Count the private files and folders."""
    return {
        "names": sum(1 for _ in (out / PRIVATE).rglob("*")),
        "locks": sum(1 for _ in (out / SERVERS).iterdir()),
    }


def memory(coordinator: Coordinator) -> dict[str, int]:
    """Count what the process remembers."""
    return {
        "lineage": len(coordinator.lineage.nodes),
        "sessions": len(coordinator._sessions._sessions),
    }


async def test_over_a_month_the_ledger_and_the_private_folders_stay_as_large_as_after_the_first_days(
    tmp_path: Path, long: bool
) -> None:
    days = 32 if long else 12
    rules = replace(
        RULES, flush_interval_ms=900_000, shard_retention_ms=3 * 24 * HOUR_MS, server_timeout_ms=2 * HOUR_MS
    )
    spec = TimeWindows(HOUR_MS, on="at")
    pipeline = Pipeline(tmp_path, spec=spec, rules=rules, recompute=True, delay_ms=HOUR_MS // 2, locks=True)
    month = Month(pipeline)
    sizes: list[dict[str, int]] = []
    revisions = 0
    for first in range(0, days, DAYS_OF_A_LIFE):
        # Each life is another server's: what the killed one left is found by the next.
        pipeline.server_id = f"server-{first}"
        async with pipeline.life() as coordinator:
            await month.come_back()
            for day in range(first, first + DAYS_OF_A_LIFE):
                await pipeline.clock.drive(month.day(day), step=900)
                sizes.append(ledger_size(tmp_path) | names_below(tmp_path) | memory(coordinator))
            revisions += sum(job.window.revision > 1 for job in pipeline.engine.jobs)
            await pipeline.clock.drive(coordinator.flush("killed"), step=900)
    for what in sizes[0]:
        # Two days: of the one shards split, of the other they merge.
        early, late = (max(size[what] for size in some) for some in (sizes[4:8], sizes[-4:]))
        assert late <= early * 1.05 + 1, what
    # It is a month that was played: windows of every hour, revisions, and rows too late for that.
    assert len(pipeline.published()) >= 24 * (days - 2)
    assert pipeline.late()
    assert revisions > 100
    assert sizes[-1]["shards"] <= 3 * 3
    assert sizes[-1]["windows"] <= 24 * 3
    assert (sizes[-1]["servers"], sizes[-1]["locks"]) == (1, 1)
