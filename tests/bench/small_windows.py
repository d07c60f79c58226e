"""Many small windows that are ready together: how many a second, in shared Spark jobs and in a job for each.

In a local folder, and on an emulated S3 in this very process, whose own speed is a part of what is measured. The floor is one
job over a ready file that has the rows of all.

One-second windows keep up with real time when more than one a second is published. Measured from the delivery of the
first row, through flush, cut, jobs and commits, to the last published window. A catch-up brings windows in this shape;
in real time one comes a second, and is alone or with the few that were cut while a job ran.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from bench.deliveries import HOUR_MS, SHARDS, deliveries
from bench.pipelines import living
from bench.rounds import in_turn

from mldserver.base.clock import SystemClock
from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.engine_jobs import WindowJob
from mldserver.jobs.engine import Engine
from mldserver.output.manifest import current_files
from mldserver.output.store import OutputStore
from mldserver.windows import TimeWindows, Window

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
    engine: Engine, windows: int, *, s3: str, rounds: int, folder: Path, progress: Callable[[str], None]
) -> dict[str, float]:
    """Return windows a second: ``together`` in shared jobs, ``singly``, both ``on S3``, and the ``floor``; the best rounds.

    One round warms up. ``s3``: the URI of a bucket that the engine reaches.
    """
    engines: dict[str, Engine] = {"together": engine, "singly": Singly(engine)}  # type: ignore[dict-item]  # it answers for the engine
    contenders = ("floor", *engines, *(f"{name} on S3" for name in engines))
    best = dict.fromkeys(contenders, 0.0)
    bucket, query = s3.split("?")
    for number, contender in enumerate(in_turn(contenders, 1 + rounds)):
        name, _, on_s3 = contender.partition(" on ")
        home = folder / str(number)
        home.mkdir(parents=True)
        out = f"{bucket}/{number}?{query}" if on_s3 else str(home)
        if name == "floor":
            seconds = await _floor(engine, windows, home)
        else:
            seconds = await _round(engines[name], windows, out, home)
        shutil.rmtree(home)
        progress(f"{windows} small windows {contender}: {seconds:.2f} s")
        if number >= len(contenders):
            best[contender] = max(best[contender], windows / seconds)
    return best


async def _floor(engine: Engine, windows: int, home: Path) -> float:
    rows = windows * ROWS_A_WINDOW
    table = pa.concat_tables(each.outcome.effects.rows for each in deliveries(rows, closing=False))
    store = OutputStore(str(home))
    size = store.write("segment.parquet", table.append_column("_clock", pa.array(range(rows), pa.int64())))
    window, segment = Window("all", None, None), store.uri("segment.parquet")
    began = time.perf_counter()
    result = await engine.compute(WindowJob(window, 1, (segment,), store.uri("output"), rows, size))
    seconds = time.perf_counter() - began
    files = [f"{home}/output/{file}" for file in result.files]
    _check(sum(sum(pq.ParquetFile(file).read(["flights"])["flights"].to_pylist()) for file in files), rows)
    return seconds


async def _round(engine: Engine, windows: int, out: str, home: Path) -> float:
    rows = windows * ROWS_A_WINDOW
    given = deliveries(rows)
    began = time.perf_counter()
    async with living(
        out,
        home=home,
        spec=TimeWindows(HOUR_MS // windows, on="scheduled"),
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
    found = current_files(out)
    opened = [pq.ParquetFile(found.filesystem.open_input_file(path)) for path in found.paths]
    _check(sum(sum(file.read(["flights"])["flights"].to_pylist()) for file in opened), rows)
    return seconds


def _check(flights: int, rows: int) -> None:
    assert flights == rows, f"{flights:,} of {rows:,} rows are in windows"
