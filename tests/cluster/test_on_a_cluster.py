"""The engine on a real standalone cluster: a master and two workers, each with an executor of one core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.cluster import CONF, NOT_BLINDED, can_blind, spark_parts
from support.serving import until
from support.spark_classes import spark_cache

from mldserver.engine_jobs import WindowJob
from mldserver.errors import WindowFailed
from mldserver.handler.queries import Rows, batches_of, query_of
from mldserver.spark.client import SparkEngine, make_engine
from mldserver.windows import Window

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(900)]

HANDLERS = Path(__file__).parents[1] / "spark"
ROWS = 500
MIB = 1024 * 1024


@asynccontextmanager
async def running(engine: SparkEngine) -> AsyncIterator[SparkEngine]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.run())
        try:
            await engine.ready()
            yield engine
        finally:
            await engine.close()


def engine(master: str, work: Path, **changes: Any) -> SparkEngine:
    given: dict[str, Any] = {
        "master": master,
        "conf": CONF,
        "work_dir": work,
        "cache_dir": spark_cache(work.parent),
        "archive_after": None,
        "python_path": (str(HANDLERS),),
        "quick": True,
        **changes,
    }
    return make_engine("window_handlers:Windows", "carrier STRING, delay DOUBLE", **given)


def segments(folder: Path, count: int) -> tuple[str, ...]:
    """Write segments, each with ROWS rows of its own."""
    folder.mkdir()
    for number in range(count):
        delays = [float(number * ROWS + i) for i in range(ROWS)]
        rows = {"carrier": ["AA" if i % 3 else "UA" for i in range(ROWS)], "delay": delays}
        pq.write_table(
            pa.table({**rows, "_time": pa.array(range(ROWS), pa.int64())}), folder / f"{number}.parquet"
        )
    return tuple(map(str, sorted(folder.glob("*.parquet"))))


async def numbers_until_failed(spark: SparkEngine, folder: Path, paths: tuple[str, ...]) -> str:
    """Compute windows of three tasks until one fails; return what it says. All before are exact."""
    for number in range(10_000):
        window, staging = Window("numbers", None, None), str(folder / str(number))
        try:
            result = await spark.compute(WindowJob(window, 1, paths, staging, 4 * ROWS, 64 * MIB))
        except WindowFailed as failed:
            return failed.what
        assert result.rows == 300
    return "none failed"


async def test_windows_are_computed_on_all_executors_exactly_until_one_comes_that_is_blind(
    tmp_path: Path,
) -> None:
    paths = segments(tmp_path / "segments", 4)
    async with spark_parts(tmp_path) as parts:
        _, workers = await parts.cluster(workers=2)
        async with running(engine(parts.url, tmp_path / "work")) as spark:
            for name in ("identity", "grouped", "functions"):
                window = Window(name, None, None)
                job = WindowJob(window, 1, paths, str(tmp_path / "staging" / name), 4 * ROWS, 64 * MIB)
                result = await spark.compute(job)
                files = [tmp_path / "staging" / name / file for file in result.files]
                table = pa.concat_tables(pq.ParquetFile(file).read() for file in files)
                if name == "identity":
                    assert len(files) > 1
                    assert sorted(table["delay"].to_pylist()) == [float(i) for i in range(4 * ROWS)]
                elif name == "functions":
                    # No executor sees the folder of the handler's module.
                    rows = {(2 * delay, delay / 2) for delay in map(float, range(16, 4 * ROWS))}
                    assert (
                        set(zip(table["twice"].to_pylist(), table["half"].to_pylist(), strict=True)) == rows
                    )
                else:
                    counts = dict(zip(*(table[c].to_pylist() for c in ("carrier", "flights")), strict=True))
                    assert counts == {"UA": 4 * 167, "AA": 4 * 333}
            text = "SELECT carrier, count(*) AS n FROM parquet.`{}` GROUP BY carrier ORDER BY n"
            query = query_of(text.format(tmp_path / "segments"), {}, seconds=60)
            batches = list(batches_of(await spark.query(query, (), MIB)))
            assert [tuple(row) for row in Rows(pa.Table.from_batches(batches))] == [("UA", 668), ("AA", 1332)]
            assert [len(worker.executors()) for worker in workers] == [1, 1]
            if blinds := can_blind(tmp_path / "staging"):
                workers.append(await parts.worker(blind=tmp_path / "staging"))
                told = await numbers_until_failed(spark, tmp_path / "staging", paths)
                assert "Spark wrote 300 rows, but 2 files in" in told
                assert "hold 200. Those that failed are on 127.0.0.3 (executor " in told
    assert [worker.executors() for worker in workers] == [[]] * len(workers)
    if not blinds:
        pytest.skip(f"All but what a blind worker does: {NOT_BLINDED}")


async def test_executors_come_with_the_work_and_when_they_go_that_is_no_trouble(
    tmp_path: Path, long: bool
) -> None:
    """By day: no executor is left of the first window's, and the second has others. That a cluster without any is no trouble
    shows after 20 s only: in the long lane, and by the signs that the judge gets in tests/spark/test_health.py.
    """
    paths = segments(tmp_path / "segments", 4)
    dynamic = {
        "enabled": "true",
        "shuffleTracking.enabled": "true",
        "shuffleTracking.timeout": "1s",
        "executorIdleTimeout": "1s",
    }
    conf = {**CONF, **{f"spark.dynamicAllocation.{name}": value for name, value in dynamic.items()}}
    async with spark_parts(tmp_path) as parts:
        _, workers = await parts.cluster(workers=2)
        async with running(engine(parts.url, tmp_path / "work", conf=conf)) as spark:
            for number in range(2):
                staging = tmp_path / "staging" / str(number)
                job = WindowJob(
                    Window("grouped", None, None), number, paths, str(staging), 4 * ROWS, 64 * MIB
                )
                result = await spark.compute(job)
                files = [pq.ParquetFile(staging / file).read() for file in result.files]
                assert sum(pa.concat_tables(files)["flights"].to_pylist()) == 4 * ROWS
                async with asyncio.timeout(800):
                    await until(lambda: not any(worker.executors() for worker in workers))
                if long:
                    # Beyond the time after which a cluster without executors is told of.
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(30):
                            await until(lambda: spark.trouble is not None)
                    assert spark.is_ready
