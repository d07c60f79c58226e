"""A window goes through the real driver's process into a database."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mldserver.errors import OperatorError, WindowFailed
from mldserver.jobs.engine import PublishJob, WindowJob
from mldserver.spark.client import SparkEngine
from mldserver.spark.sinks.sink import SinkSpec
from mldserver.windows import Window

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def engine(root: Path, sink: SinkSpec) -> SparkEngine:
    settings: dict[str, Any] = {"work_dir": root / "work", "cache_dir": root / "cache", "quick": True}
    settings["conf"] = {"spark.driver.extraJavaOptions": f"-Dderby.stream.error.file={root}/derby.log"}
    return SparkEngine("", "name STRING", archive_after=None, sink=sink, python_path=(), **settings)


def segment(root: Path) -> str:
    meta = {"_time": pa.int64(), "_clock": pa.int64(), "_shard": pa.string(), "_sequence": pa.string()}
    columns = {"name": pa.array(["a", "b"])} | {name: pa.nulls(2, kind) for name, kind in meta.items()}
    columns |= {"_sub_sequence": pa.nulls(2, pa.int64()), "_arrival": pa.nulls(2, pa.timestamp("ms", "UTC"))}
    pq.write_table(pa.table(columns), root / "segment.parquet")
    return str(root / "segment.parquet")


async def test_the_driver_publishes_what_it_computed_and_says_why_it_cannot(tmp_path: Path) -> None:
    it = engine(tmp_path, SinkSpec("jdbc", f"derby:{tmp_path}/db;create=true", "events"))
    window = Window("w1", None, None, 1, "flights")
    staging = str(tmp_path / "staging")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(it.run())
        try:
            job = WindowJob(window, 1, (segment(tmp_path),), staging, 2, 100)
            done = await it.compute(job)
            for _ in range(2):
                await it.publish(PublishJob(window, staging, done.files, done.rows))
            gone = PublishJob(Window("w2", None, None, 1, "flights"), staging, ("gone.parquet",), 1)
            with pytest.raises(WindowFailed, match=r"PATH_NOT_FOUND.*gone\.parquet"):
                await it.publish(gone)
        finally:
            await it.close()
    assert done.rows == 2
    assert list((tmp_path / "db").glob("seg0/*.dat"))


@pytest.mark.long
async def test_a_server_whose_spark_lacks_the_format_does_not_start(tmp_path: Path) -> None:
    it = engine(tmp_path, SinkSpec("delta", str(tmp_path / "table")))
    with pytest.raises(
        OperatorError, match=r"^This Spark session knows no format delta\..*spark\.jars\.pack"
    ):
        await it.run()
