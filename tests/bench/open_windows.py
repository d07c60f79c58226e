"""Windows that overlap, and windows that are computed while they are open.

*Sliding*: the twelve windows of an hour that end every five minutes, as the server computes them, each over its own twelve panes;
beside one query of the same session that groups the same rows by Spark's own ``window(at, '1 hour', '5 minutes')``.

*Early*: the job of a window that is cut, alone; right after the job of an early result that it cancels; and that job alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from bench.rounds import in_turn, medians

from handlers import departures
from mldserver.engine_jobs import WindowJob
from mldserver.handler.queries import query_of
from mldserver.spark.client import SparkEngine, make_engine
from mldserver.windows import Window

__all__ = ["measure"]

ROOT: Final = Path(__file__).parents[2]
_START: Final = datetime(2027, 1, 15, 8, tzinfo=UTC)
_PANE: Final = timedelta(minutes=5)
_PANES: Final = 12
"""Of a window."""
_BESIDE_SECONDS: Final = 0.5
"""How long the early job runs before a window is cut."""
_GROUPED: Final = (
    "SELECT window(scheduled, '1 hour', '5 minutes') AS w, carrier, count(*) AS flights, avg(delay) AS mean"
    " FROM parquet.`{folder}` GROUP BY 1, 2"
)


def measure(rows: int, rounds: int, folder: Path) -> dict[str, float]:
    """Return the seconds of each contender, medians. ``rows``: of a window of an hour."""
    folder.mkdir(parents=True)
    panes = folder / "panes"
    panes.mkdir()
    for number in range(2 * _PANES):
        pq.write_table(_rows(number, rows // _PANES), panes / f"{number:02}.parquet", compression="zstd")
    return asyncio.run(_measure(rounds, folder, sorted(panes.iterdir())))


def _rows(pane: int, count: int) -> pa.Table:
    dice = np.random.default_rng(pane)
    at = (_START + pane * _PANE).timestamp() * 1000 + np.linspace(0, 299_999, count)
    times, numbers = at.astype(np.int64), np.arange(count)
    columns = {
        "carrier": np.array([f"C{number}" for number in range(16)])[dice.integers(16, size=count)],
        "delay": dice.normal(10, 30, count),
        "scheduled": pa.array(times, pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC")),
        "_time": times,
        "_clock": numbers + pane * count,
        "_shard": ["shardId-0"] * count,
        "_sequence": numbers.astype(str),
        "_sub_sequence": np.zeros(count, np.int64),
        "_arrival": pa.array(times, pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC")),
    }
    return pa.table(columns)


async def _measure(rounds: int, folder: Path, panes: list[Path]) -> dict[str, float]:
    engine = make_engine(
        "handlers.departures",
        departures.schema,
        work_dir=folder / "work",
        python_path=(str(ROOT), str(ROOT / "tests")),
        archive_after=None,
    )
    took: dict[str, list[float]] = {}
    async with _running(engine):
        bench = _Bench(engine, folder, panes)
        contenders = {
            "12 sliding windows": bench.sliding,
            "Spark's window()": bench.grouped,
            "a window alone": bench.alone,
            "a window that cancels an early job": bench.cancelling,
            "an early result": bench.early,
        }
        for number, name in enumerate(in_turn(list(contenders), rounds + 1)):
            seconds = await contenders[name]()
            if number >= len(contenders):  # the first round warms the session up
                took.setdefault(name, []).append(seconds)
    return medians(took)


class _Bench:
    def __init__(self, engine: SparkEngine, folder: Path, panes: list[Path]) -> None:
        self._engine, self._folder, self._panes, self._attempts = engine, folder, panes, 0

    def _job(self, first: int, *, final: bool = True) -> WindowJob:
        """Return an attempt at the window that begins with a pane."""
        self._attempts += 1
        start, panes = _START + first * _PANE, self._panes[first : first + _PANES]
        window = Window(f"w{first}", start, start + _PANES * _PANE, int(final), "bench", final)
        rows = sum(pq.read_metadata(pane).num_rows for pane in panes)
        size = sum(pane.stat().st_size for pane in panes)
        staging = str(self._folder / "staging" / window.id / f"{self._attempts}")
        return WindowJob(window, self._attempts, tuple(map(str, panes)), staging, rows, size)

    async def sliding(self) -> float:
        jobs = [self._job(first) for first in range(1, _PANES + 1)]
        began = time.perf_counter()
        for job in jobs:  # windows of this size share no job
            await self._engine.compute(job)
        return time.perf_counter() - began

    async def grouped(self) -> float:
        text = _GROUPED.format(folder=self._panes[0].parent)
        began = time.perf_counter()
        await self._engine.query(query_of(text, {}, seconds=600, max_rows=100_000), (), 1 << 26)
        return time.perf_counter() - began

    async def alone(self) -> float:
        return await self._timed(self._job(0))

    async def early(self) -> float:
        return await self._timed(self._job(0, final=False))

    async def cancelling(self) -> float:
        early, job = asyncio.create_task(self._engine.compute(self._job(0, final=False))), self._job(0)
        await asyncio.wait([early], timeout=_BESIDE_SECONDS)
        early.cancel()
        seconds = await self._timed(job)
        await asyncio.gather(early, return_exceptions=True)
        return seconds

    async def _timed(self, job: WindowJob) -> float:
        began = time.perf_counter()
        await self._engine.compute(job)
        return time.perf_counter() - began


@contextlib.asynccontextmanager
async def _running(engine: SparkEngine) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        try:
            await engine.ready()
            yield
        finally:
            await engine.close()
