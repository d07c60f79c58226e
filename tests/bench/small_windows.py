"""Many small windows that are ready together: how many a second, in shared Spark jobs and in a job for each.

One-second windows keep up with real time when more than one a second is published. Measured from the delivery of the
first row, through flush, cut, jobs and commits, to the last published window. A catch-up brings windows in this shape;
in real time one comes a second, and is alone or with the few that were cut while a job ran.
"""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from bench.deliveries import HOUR_MS, SHARDS, deliveries
from bench.pipelines import living
from bench.rounds import in_turn

from mldserver.base.clock import SystemClock
from mldserver.coordinator.core.windows import CoordinatorRules
from mldserver.windows import Tumbling

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mldserver.jobs.engine import Engine

__all__ = ["ROWS_A_WINDOW", "measure"]

ROWS_A_WINDOW = 200
_RULES = CoordinatorRules(on_arrival=False, settle_time_ms=0)


class Singly:
    """An engine that takes one window at a time."""

    group_limit = 1

    def __init__(self, engine: Engine) -> None:
        """Pass all else on."""
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


async def measure(
    engine: Engine, windows: int, *, rounds: int, folder: Path, progress: Callable[[str], None]
) -> dict[str, float]:
    """Return windows a second: ``together`` in shared jobs, and ``singly``; the best rounds. One round warms up."""
    engines: dict[str, Engine] = {"together": engine, "singly": Singly(engine)}  # type: ignore[dict-item]  # it answers for the engine
    best = dict.fromkeys(engines, 0.0)
    for number, contender in enumerate(in_turn(tuple(engines), 1 + rounds)):
        seconds = await _round(engines[contender], windows, folder / str(number))
        progress(f"{windows} small windows {contender}: {seconds:.2f} s")
        if number >= len(engines):
            best[contender] = max(best[contender], windows / seconds)
    return best


async def _round(engine: Engine, windows: int, out: Path) -> float:
    rows = windows * ROWS_A_WINDOW
    given = deliveries(rows)
    began = time.perf_counter()
    async with living(
        out,
        spec=Tumbling(HOUR_MS // windows, on="scheduled"),
        rules=_RULES,
        engine=engine,
        clock=SystemClock(),
        shards=SHARDS,
    ) as running:
        for each in given:
            await running.give(each)
        await running.coordinator.flush("bench")
        await running.runner.idle()
        seconds = time.perf_counter() - began
    _check(out, rows)
    shutil.rmtree(out)
    return seconds


def _check(out: Path, rows: int) -> None:
    files = out.glob("window=*/*.parquet")
    flights = sum(sum(pq.ParquetFile(file).read(["flights"])["flights"].to_pylist()) for file in files)
    assert flights == rows, f"{flights:,} of {rows:,} rows are in windows"
