"""Queries of handlers: small ones, cached ones, lookups; and windows beside as many queries as run at a time.

Everything goes through the engine and the handler's side of a query, in one process: the socket of a worker adds some 0.1 ms.
The floor of a small query is the same query in a loop that only waits for Spark: what the driver's own job takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from handlers import departures
from mldserver.base.clock import SystemClock
from mldserver.engine_jobs import FunctionView, WindowJob
from mldserver.handler.queries import Lookup, Queries, batches_of
from mldserver.jobs.query_service import LOOKUP_BYTES, QueryService
from mldserver.spark.client import SparkEngine, make_engine
from mldserver.windows import Window
from mldserver.workers.worker_queries import LocalQueries

__all__ = ["MOST_WINDOWS", "measure"]

ROOT: Final = Path(__file__).parents[2]
MOST_WINDOWS: Final = 1.2
"""What windows may take beside queries, against alone."""
_OPTIONS: Final[dict[str, Any]] = {"max_rows": 1000, "cache": None, "stream": False, "timeout": None}
_SMALL: Final = (
    "SELECT carrier, count(*) AS n FROM flights WHERE delay > :least GROUP BY carrier ORDER BY n DESC"
)


def measure(rounds: int, rows: int, folder: Path) -> dict[str, float]:
    """Return the figures: seconds, and numbers a second; medians. ``rows``: of the windows and of the lookup."""
    folder.mkdir(parents=True)
    segment = folder / "segment.parquet"
    pq.write_table(_flights(rows), segment)
    return asyncio.run(_measure(rounds, rows, segment, segment.stat().st_size))


async def _measure(rounds: int, rows: int, segment: Path, size: int) -> dict[str, float]:
    folder = segment.parent
    view = FunctionView("flights", (str(segment),))
    engine = make_engine(
        "bench.bare_job",
        departures.schema,
        work_dir=folder / "work",
        python_path=(str(ROOT), str(ROOT / "tests")),
        archive_after=None,
    )
    figures: dict[str, float] = {}
    async with _running(engine, view) as queries:
        for name, ask in (("small", _SMALL), ("one row", "SELECT :least AS least")):
            took = []
            for number in range(10 + 10 * rounds):
                began = time.perf_counter()
                await queries.asql(ask, {"least": float(number)}, **_OPTIONS)
                took.append(time.perf_counter() - began)
            figures[f"{name}_seconds"] = median(took[10:])
        began = time.perf_counter()
        asked = [queries.asql(_SMALL, {"least": float(number)}, **_OPTIONS) for number in range(20 * rounds)]
        await asyncio.gather(*asked)
        figures["small_per_second"] = 20 * rounds / (time.perf_counter() - began)
        began = time.perf_counter()
        for _ in range(2000):
            await queries.asql(_SMALL, {"least": 1.0}, **_OPTIONS | {"cache": 60})
        figures["cached_per_second"] = 2000 / (time.perf_counter() - began)
        figures |= await _lookup(engine, rows)
        figures |= await _windows(
            engine, queries, rounds, WindowJob(Window("w", None, None), 1, (str(segment),), "", rows, size)
        )
    return figures


async def _lookup(engine: SparkEngine, rows: int) -> dict[str, float]:
    """Compute a lookup of many rows, and look up in it."""
    lookup = Lookup(f"SELECT id AS customer, id % 7 AS tier FROM range({rows})", key="customer")
    began = time.perf_counter()
    result = await engine.query(lookup.query, (), LOOKUP_BYTES)
    computed = time.perf_counter()
    await asyncio.to_thread(lambda: lookup.fill(pa.Table.from_batches(list(batches_of(result)))))
    filled = time.perf_counter()
    get = lookup.get
    for customer in range(rows):
        get(customer)
    return {
        "lookup_query_seconds": computed - began,
        "lookup_fill_seconds": filled - computed,
        "lookups_per_second": rows / (time.perf_counter() - filled),
    }


async def _windows(engine: SparkEngine, queries: Queries, rounds: int, job: WindowJob) -> dict[str, float]:
    """Compute a window again and again, alone and beside as many queries as run at a time, in turn."""
    took: dict[str, list[float]] = {"alone": [], "beside": []}
    number = 0

    async def compute(kind: str) -> None:
        nonlocal number
        number += 1
        began = time.perf_counter()
        await engine.compute(replace(job, staging=f"{job.segments[0]}-{number}"))
        took[kind].append(time.perf_counter() - began)

    async def ask_for_ever(first: int) -> None:
        number = first
        while True:
            number += 4
            await queries.asql(_SMALL, {"least": float(number)}, **_OPTIONS)

    for _ in range(5):
        await compute("alone")  # it warms the session up
    took["alone"].clear()
    for _ in range(rounds):
        for _ in range(5):
            await compute("alone")
        asking = [asyncio.create_task(ask_for_ever(each)) for each in range(4)]
        await asyncio.sleep(0.5)
        for _ in range(5):
            await compute("beside")
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return {f"window_{kind}_seconds": median(each) for kind, each in took.items()}


@contextlib.asynccontextmanager
async def _running(engine: SparkEngine, view: FunctionView) -> AsyncIterator[Queries]:
    """Run an engine, and what brings queries to it."""

    class Published:
        async def view(self, *, fresh: bool = False) -> FunctionView:
            return view

    clock = SystemClock()
    service = QueryService({"flights": Published()}, spill_bytes=1 << 30, clock=clock)  # type: ignore[dict-item]  # all that is used
    service.ask = engine.query
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.run())
        await engine.ready()
        serving = tasks.create_task(service.run((), lambda *_: asyncio.sleep(0)))
        await asyncio.sleep(0)
        yield Queries(LocalQueries(service), seconds=60, steady_ms=clock.steady_ms)
        serving.cancel()
        await engine.close()


def _flights(rows: int) -> pa.Table:
    meta = {name: pa.array(range(rows), pa.int64()) for name in ("_time", "_clock")}
    carriers = [f"c{number % 16}" for number in range(rows)]
    delays = [float(number % 977) for number in range(rows)]
    scheduled = pa.array(range(rows), pa.timestamp("us", tz="UTC"))
    return pa.table({"carrier": carriers, "delay": delays, "scheduled": scheduled, **meta})
