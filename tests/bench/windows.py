"""From the last record to the published window, against the Spark job over one Parquet file that is ready.

The window's rows come on three shards at the pace of a stream that is read from its beginning, and are flushed under
the default settings meanwhile. What the flushes have left in memory when the last record comes is part of what is
measured; how much that is depends on when the last flush was, so each round begins at another place in the interval.
So is everything after it: the flush, the cut, the job, the commit, the publication. Left out is the wait for the next
flush, which is a setting (``flush_interval``). There are two floors. The bare job (``bare_job.py``) is what one writes without
a server: read, hook, write. The ready file is the server's own job, which counts rows too, over that one file. Both run in the
same place: when all but the last record have come. A JVM that has rested is slower by a tenth: right after another job a floor
would be too low.

And the job alone, by the number of segments that its window has: an hour with the default flush interval has 720 for each
server. One segment is the floor.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from bench.bare_job import BARE, go
from bench.deliveries import HOUR_MS, SHARDS, START_MS, Delivered, deliveries
from bench.pipelines import Pipeline, living
from bench.rounds import against, in_turn, medians

from mldserver.base.clock import SystemClock
from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.engine_jobs import WindowJob
from mldserver.jobs.engine import Engine
from mldserver.ledger.contract import Segment, SegmentKind
from mldserver.output import joined
from mldserver.output.layout import segment_path
from mldserver.output.store import OutputStore
from mldserver.windows import TimeWindows, as_window, time_window_id

__all__ = ["Measured", "measure", "measure_segments"]

SPEC = TimeWindows(HOUR_MS, on="scheduled")
RULES = CoordinatorRules(on_arrival=False, settle_time_ms=0)
ID = time_window_id(START_MS)


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians for one size, in seconds."""

    rows: int
    seconds: float
    """From the last record to the published window."""
    flush_seconds: float
    """Of these, until the last rows were durable and the window cut."""
    job_seconds: float
    """Of these, the engine's."""
    floor_seconds: float
    """The bare job's over one file."""
    ratio: float
    """How many times the floor it takes, all rounds together."""
    error: float | None
    """The standard error of ``ratio``: on some machines one and the same job takes a third longer or shorter."""
    ready_seconds: float
    """The server's own job's over one file."""
    ready_ratio: float
    """As ``ratio``, of that floor."""
    ready_error: float | None

    @property
    def rows_per_second(self) -> float:
        """Rows a second from the last record on."""
        return self.rows / self.seconds


class Bench:
    """One size: its rows, its floor, and the pipeline over them."""

    def __init__(self, rows: int, folder: Path, engine: Engine) -> None:
        """Make the rows and the one file; ``folder`` is new."""
        self.rows = rows
        self._folder = folder
        self._engine = engine
        self._deliveries = deliveries(rows)
        self._attempts = 0
        folder.mkdir(parents=True)
        self.file, self._out = folder / "ready.parquet", folder / "out"
        """The window's rows, ready."""
        self._write_file([each for each in self._deliveries if each.outcome.outline.records])

    def _write_file(self, delivered: Sequence[Delivered]) -> None:
        """Write the window's rows in order as the store would, all in one file."""
        rows = pa.concat_tables([each.outcome.effects.rows for each in delivered])
        end = pa.scalar((START_MS + HOUR_MS) * 1000, pa.timestamp("us", tz="UTC"))
        rows = rows.filter(pa.compute.less(rows["scheduled"], end)).sort_by("_time")
        rows = rows.append_column("_clock", pa.array(range(len(rows)), pa.int64()))
        pq.write_table(rows, self.file, compression="zstd", compression_level=1)

    async def floor(self, pace: int, phase: float) -> float:
        """Return the seconds that the bare job takes, where ``pipeline`` would have the engine compute a window."""
        async with asyncio.TaskGroup() as group:
            bare = group.create_task(self.job([self.file], BARE))
            async with self._fed(pace, phase):
                go(self.file).touch()
                return await bare

    async def ready(self, pace: int, phase: float) -> float:
        """Return the seconds that the server's own job takes over the one file, at the same place."""
        async with self._fed(pace, phase):
            return await self.job([self.file])

    def cut(self, segments: int) -> list[Path]:
        """Write the one file's rows as so many segments, as flushes do, and return what an attempt reads."""
        rows, window = pq.read_table(self.file), f"segments-{segments}"
        store, written = OutputStore(str(self._folder)), []
        for number in range(segments):
            first, last = (self.rows * place // segments for place in (number, number + 1))
            path = segment_path(window, first, "0", kind=SegmentKind.WINDOW, tag="0" * 16, shape="0" * 12)
            size = store.write(path, rows.slice(first, last - first))
            written.append(Segment(path, window, last - first, size))
        small = [segment.path for segment in written if segment.bytes <= joined.SMALL_BYTES]
        for place in range(0, len(small) - joined.SEGMENTS_PER_FILE + 1, joined.SEGMENTS_PER_FILE):
            joined.join(store, small[place : place + joined.SEGMENTS_PER_FILE])
        return [self._folder / path for path in joined.to_read(store, written)]

    async def job(self, segments: Sequence[Path], window_id: str = ID) -> float:
        """Return the seconds that the engine takes for segments that are ready; for BARE those of the bare job, on Spark."""
        self._attempts += 1
        staging = self._folder / f"job-{self._attempts}"
        size = sum(segment.stat().st_size for segment in segments)
        paths = tuple(map(str, segments))
        # With the pipeline's bounds: their columns are a part of its job.
        window = as_window(window_id, START_MS, START_MS + HOUR_MS, revision=1, pipeline="bench")
        job = WindowJob(window, 1, paths, str(staging), self.rows, size)
        began = time.perf_counter()
        await self._engine.compute(job)
        seconds = time.perf_counter() - began
        told = pq.read_table(staging).to_pydict().get("seconds", [seconds])
        shutil.rmtree(staging)
        return float(told[0])

    async def pipeline(self, pace: int, phase: float) -> tuple[float, float]:
        """Return the seconds from the last record to the cut, and to the published window.

        ``pace``: rows a second; 0: as fast as they are taken. ``phase``: the share of a flush interval that has
        passed when the first row comes.
        """
        async with self._fed(pace, phase) as running:
            began = time.perf_counter()
            await running.give(self._deliveries[-1])
            await running.coordinator.flush("bench")
            cut = time.perf_counter() - began
            await running.runner.idle()
            seconds = time.perf_counter() - began
            self._check()
        return cut, seconds

    @contextlib.asynccontextmanager
    async def _fed(self, pace: int, phase: float) -> AsyncIterator[Pipeline]:
        """Run a pipeline that has been given all but the last batch."""
        clock = SystemClock()
        async with living(
            self._out, spec=SPEC, rules=RULES, engine=self._engine, clock=clock, shards=SHARDS
        ) as running:
            if pace:
                await asyncio.sleep(phase * RULES.flush_interval_ms / 1000)
            await self._feed(running, pace)
            yield running
        shutil.rmtree(self._out)

    async def _feed(self, running: Pipeline, pace: int) -> None:
        """Deliver all but the last batch."""
        began, given = time.perf_counter(), 0
        for each in self._deliveries[:-1]:
            await running.give(each)
            given += each.outcome.outline.records
            ahead = given / pace - (time.perf_counter() - began) if pace else 0.0
            await asyncio.sleep(max(0.0, ahead))

    def _check(self) -> None:
        files = sorted((self._out / f"window={ID}").glob("*.parquet"))
        flights = sum(sum(pq.ParquetFile(file).read(["flights"])["flights"].to_pylist()) for file in files)
        assert flights == self.rows, f"{flights:,} of {self.rows:,} rows are in the window"


class Stopwatch:
    """An engine that remembers what its last job took."""

    group_limit = 1
    """There is one window at a time."""

    def __init__(self, engine: Engine) -> None:
        """Time another engine."""
        self._engine = engine
        self.seconds = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def compute(self, job: WindowJob) -> object:
        """Compute, and note the seconds."""
        began = time.perf_counter()
        done = await self._engine.compute(job)
        self.seconds = time.perf_counter() - began
        return done


async def measure(
    engine: Engine,
    sizes: Sequence[int],
    *,
    rounds: int,
    warm_up: int,
    pace: int,
    folder: Path,
    progress: Callable[[str], None],
) -> list[Measured]:
    """Measure every size; pipeline and floors take turns on one engine.

    ``warm_up``: jobs before the first round, which does not count. At first the JVM's compiler takes more of the
    machine than the tasks do, and for a hundred jobs a share that differs from one to the next.
    """
    found = []
    for rows in sizes:
        watch = Stopwatch(engine)
        bench = Bench(rows, folder / str(rows), watch)  # type: ignore[arg-type]  # it answers for the engine
        seconds: dict[str, list[float]] = {"all": [], "flush": [], "job": [], "floor": [], "ready": []}
        # Other encodings than the one file's, which compiled code is not made for before it has met them.
        segments = bench.cut(8)
        for _ in range(warm_up):
            await bench.job(segments)
            go(bench.file).touch()
            await bench.job([bench.file], BARE)
        floors = {"floor": bench.floor, "ready": bench.ready}
        contenders = ("pipeline", *floors)
        for number, contender in enumerate(in_turn(contenders, 1 + rounds)):
            counts = number >= len(contenders)
            phase = (number // len(contenders) % rounds + 0.5) / rounds
            if contender in floors:
                took = await floors[contender](pace, phase)
                seconds[contender] += [took] * counts
            else:
                cut, took = await bench.pipeline(pace, phase)
                seconds["all"] += [took] * counts
                seconds["flush"] += [cut] * counts
                seconds["job"] += [watch.seconds] * counts
            progress(f"{rows:>9,} rows, {contender}: {took:.3f} s{'' if counts else ' (warming up)'}")
        middle = medians(seconds)
        found.append(
            Measured(
                rows,
                middle["all"],
                middle["flush"],
                middle["job"],
                middle["floor"],
                *against(seconds["all"], seconds["floor"]),
                middle["ready"],
                *against(seconds["all"], seconds["ready"]),
            )
        )
        shutil.rmtree(folder / str(rows))
    return found


async def measure_segments(
    engine: Engine,
    counts: Sequence[int],
    *,
    rows: int,
    rounds: int,
    folder: Path,
    progress: Callable[[str], None],
) -> dict[int, float]:
    """Return the seconds of the job over the same rows by the number of segments; the best rounds. One warms up."""
    bench = Bench(rows, folder, engine)
    segments = {count: bench.cut(count) for count in counts}
    best = dict.fromkeys(counts, math.inf)
    for number, count in enumerate(in_turn(tuple(counts), 1 + rounds)):
        seconds = await bench.job(segments[count])
        progress(f"{rows:>9,} rows in {count:,} segments: {seconds:.3f} s")
        if number >= len(counts):
            best[count] = min(best[count], seconds)
    shutil.rmtree(folder)
    return best
