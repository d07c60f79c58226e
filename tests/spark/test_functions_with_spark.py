"""Several functions on one real Spark: their code, their jobs side by side, and a driver that is replaced or killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from spark.test_with_spark import java_of, until_gone
from support.spark_classes import spark_cache

from mldserver.engine_jobs import WindowJob
from mldserver.errors import DriverLost, HandlerInvalid
from mldserver.spark.client import SparkEngine, make_engine
from mldserver.spark.driver_messages import StartSession
from mldserver.spark.shared_driver import SharedDriver
from mldserver.windows import Window

pytestmark = [pytest.mark.slow, pytest.mark.long]

HANDLER = """
import time

from pyspark.sql.functions import udf

import {helper}

@udf("int")
def version(n: int) -> int:
    return {helper}.VERSION

@udf("int")
def slowly(n: int) -> int:
    time.sleep(0.2)
    return n

def on_window(rows, window):
    if window.id.startswith("slow"):
        rows = rows.repartition(20).withColumn("slowly", slowly("n"))
    if window.id.startswith("sleeping"):
        time.sleep(600)
    return rows.withColumn("version", version("n"))
"""


class FunctionsOnSpark:
    """A driver, the functions on it, and their windows."""

    def __init__(self, root: Path, master: str = "local[2]", conf: dict[str, str] | None = None) -> None:
        self.root = root
        session = StartSession(
            master,
            conf={"spark.sql.shuffle.partitions": "2", **(conf or {})},
            python_path=(str(root),),
            quick=True,
            concurrency=2,
        )
        self.driver = SharedDriver(session, cache_dir=spark_cache(root), archive_after=None, cancel_grace=1)
        self.segment = str(root / "segment.parquet")
        meta = {"_time": 0, "_clock": 0, "_shard": "s", "_sequence": "1", "_sub_sequence": 0}
        rows = {"n": list(range(40)), **{name: [value] * 40 for name, value in meta.items()}}
        table = pa.table(rows).append_column("_arrival", pa.nulls(40, pa.timestamp("ms", tz="UTC")))
        pq.write_table(table, self.segment)

    def code(self, name: str, version: int, text: str = HANDLER) -> dict[str, tuple[str, bytes]]:
        """Return a handler and a module that it imports; neither lies on the disk."""
        helper = f"{name}_helper"
        return {
            f"{name}_handler": (f"{self.root}/{name}_handler.py", text.format(helper=helper).encode()),
            helper: (f"{self.root}/{helper}.py", f"VERSION = {version}\n".encode()),
        }

    def engine(self, name: str, code: dict[str, tuple[str, bytes]]) -> SparkEngine:
        return make_engine(
            f"{name}_handler",
            "n BIGINT",
            driver=self.driver,
            pipeline=name,
            work_dir=self.root / "work" / name,
            code=code,
        )

    async def compute(self, engine: SparkEngine, window: str) -> set[int]:
        """Compute a window once, and return the versions that its rows show."""
        staging = self.root / engine.setup.name / window
        job = WindowJob(Window(window, None, None), 1, (self.segment,), str(staging), 40, 1000)
        result = await engine.compute(job)
        assert result.rows == 40
        tables = [pq.ParquetFile(staging / file).read() for file in result.files]
        return set(pa.concat_tables(tables)["version"].to_pylist())

    @asynccontextmanager
    async def running(self, *engines: SparkEngine) -> AsyncIterator[None]:
        async with asyncio.timeout(400), asyncio.TaskGroup() as tasks:
            driving = tasks.create_task(self.driver.run())
            for engine in engines:
                tasks.create_task(engine.run())
            try:
                await asyncio.gather(*(engine.ready() for engine in engines))
                yield
            finally:
                for engine in engines:
                    await engine.close()
                driving.cancel()


def named(logged: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [each for each in logged if each["event"] == event]


async def test_functions_run_their_own_code_side_by_side_and_go_on_when_one_hangs_is_replaced_or_kills(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    """One test for all of it, since each driver costs many seconds."""
    it = FunctionsOnSpark(tmp_path)
    a, b = it.engine("a", it.code("a", 1)), it.engine("b", it.code("b", 10))
    broken = it.engine("broken", it.code("broken", 0, "import no_such_module\n"))
    async with it.running(a, b):
        assert await it.compute(a, "w") == {1}
        assert await it.compute(b, "w") == {10}
        with pytest.raises(HandlerInvalid, match="no_such_module"):
            await broken.run()

        # A job of many tasks leaves cores to the job of another function, and to another job of its own.
        await asyncio.gather(it.compute(a, "warm"), it.compute(b, "warm"))
        slow = asyncio.ensure_future(it.compute(a, "slow"))
        await asyncio.sleep(0.5)
        assert await it.compute(b, "beside") == {10}
        assert not slow.done()
        assert await slow == {1}
        slow = asyncio.ensure_future(it.compute(a, "slow too"))
        await asyncio.sleep(0.5)
        assert await it.compute(a, "beside") == {1}
        assert not slow.done()
        await slow

        # A hook that hangs cannot be ended: another driver follows, and the jobs of the other function go on meanwhile.
        first = it.driver.life
        assert first is not None
        hangs = asyncio.ensure_future(it.compute(a, "sleeping"))
        await asyncio.sleep(1)
        hangs.cancel()
        longest, number = 0.0, 0
        while it.driver.life is first or not a.is_ready:
            began = time.monotonic()
            assert await it.compute(b, f"meanwhile-{number}") == {10}
            longest, number = max(longest, time.monotonic() - began), number + 1
        assert number > 3
        print(f"{number} windows meanwhile, the longest took {longest:.2f} s")
        await until_gone(first.child.pid)

        # New code of one function.
        second = it.driver.life
        a.renew(it.code("a", 2))
        later = asyncio.ensure_future(it.compute(a, "later"))
        while not later.done():
            assert await it.compute(b, f"meanwhile-{number}") == {10}
            number += 1
        assert await later == {2}
        assert it.driver.life is not second
        assert named(logged, "spark.lost") == []

        # The JVM is killed: both lose their jobs, and both come back with the code that they had.
        third = it.driver.life
        assert third is not None
        jobs = [asyncio.ensure_future(it.compute(each, "slow last")) for each in (a, b)]
        await asyncio.sleep(0.5)
        os.kill(java_of(third.child.pid), signal.SIGKILL)
        lost = await asyncio.gather(*jobs, return_exceptions=True)
        assert [type(each) for each in lost] == [DriverLost, DriverLost]
        assert await it.compute(a, "again") == {2}
        assert await it.compute(b, "again") == {10}
    assert len(named(logged, "spark.lost")) == 1
    loggers = {event.get("logger", "") for event in named(logged, "spark.log")}
    assert not any("FairSchedulableBuilder" in logger for logger in loggers)
    assert len(named(logged, "spark.ready")) == 4
