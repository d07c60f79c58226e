"""Functions of the handler's own modules on executors that do not see its folder."""

from __future__ import annotations

import asyncio
import itertools
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.cluster import CONF, spark_parts

from mldserver.engine_jobs import WindowJob
from mldserver.errors import HandlerInvalid, WindowFailed, leaves
from mldserver.spark.client import SparkEngine, make_engine
from mldserver.windows import Window

pytestmark = [pytest.mark.services, pytest.mark.slow]

TOOLS = "def add(one, other): return one + other\n"
"""A module of ``spark_py_files``."""

FUNCTIONS = """
import pandas as pd
from pyspark.sql import functions as F
from pyspark.sql.functions import pandas_udf, udf
from tools import add

DELAY = F.coalesce("delay", F.lit(0.0))

def mark():
    return "first"

@udf("string")
def version(_):
    return mark()

@udf("int")
def twice(delay):
    return int(add(delay, delay))

@pandas_udf("double")
def half(delays: pd.Series) -> pd.Series:
    return delays / 2
"""

HANDLER = """
from flow.functions import DELAY, half, twice, version

def on_window(rows, window):
    return rows.select("carrier", twice(DELAY).alias("twice"), half(DELAY).alias("half"), version("carrier").alias("version"))
"""

OWN_SESSION = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()

def on_window(rows, window): return rows
"""


class Pipeline:
    """The user's folder, and a window's rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "user"
        (self.home / "flow").mkdir(parents=True)
        for name, text in (("functions", FUNCTIONS), ("flights", HANDLER), ("own", OWN_SESSION)):
            (self.home / "flow" / f"{name}.py").write_text(text)
        self.tools = folder / "tools.zip"
        with zipfile.ZipFile(self.tools, "w") as archive:
            archive.writestr("tools.py", TOOLS)
        self.numbers = itertools.count()
        self.rows = folder / "0.parquet"
        columns: dict[str, Any] = {"carrier": ["AA", "UA"], "delay": [1.0, 5.0]}
        pq.write_table(pa.table({**columns, "_time": pa.array([1, 2], pa.int64())}), self.rows)

    def engine(self, master: str, handler: str = "flow.flights", **changes: Any) -> SparkEngine:
        given: dict[str, Any] = {
            "master": master,
            "conf": {} if master.startswith("sc://") else CONF,
            "work_dir": self.folder / "work",
            "python_path": (str(self.home),),
            "py_files": (str(self.tools),),
            "quick": True,
            **changes,
        }
        return make_engine(handler, "carrier STRING, delay DOUBLE", **given)

    async def computed(self, engine: SparkEngine) -> list[dict[str, Any]]:
        """Return the rows of a window that a driver of its own computes."""
        async with running(engine):
            place = self.folder / "staging" / str(next(self.numbers))
            job = WindowJob(Window("w", None, None), 1, (str(self.rows),), str(place), 2, 1000)
            result = await engine.compute(job)
        rows = [row for file in result.files for row in pq.ParquetFile(place / file).read().to_pylist()]
        return sorted(rows, key=lambda row: str(row["carrier"]))


@asynccontextmanager
async def running(engine: SparkEngine) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.run())
        try:
            await engine.ready()
            yield
        finally:
            await engine.close()


def expected(version: str) -> list[dict[str, Any]]:
    return [
        {"carrier": "AA", "twice": 2, "half": 0.5, "version": version},
        {"carrier": "UA", "twice": 10, "half": 2.5, "version": version},
    ]


@pytest.mark.long
async def test_a_module_of_functions_beside_the_handler_runs_on_a_cluster(tmp_path: Path) -> None:
    user = Pipeline(tmp_path)
    async with spark_parts(tmp_path) as parts:
        await parts.cluster(workers=1)
        assert await user.computed(user.engine(parts.url, python=sys.executable)) == expected("first")


async def test_over_connect_too_and_after_a_restart_the_changed_module_is_the_one_that_runs(
    tmp_path: Path,
) -> None:
    pytest.importorskip("grpc", reason="Spark Connect's packages are not installed")
    user = Pipeline(tmp_path)
    async with spark_parts(tmp_path) as parts:
        await parts.cluster(workers=1)
        _, address = await parts.connect_server(parts.url)
        assert await user.computed(user.engine(address)) == expected("first")
        (user.home / "flow/functions.py").write_text(FUNCTIONS.replace("first", "second"))
        assert await user.computed(user.engine(address)) == expected("second")
        with pytest.raises(
            HandlerInvalid, match=r"own\.py:3: SessionAtImport: the module makes a Spark session"
        ):
            await user.engine(address, "flow.own").run()


@pytest.mark.long
async def test_on_a_cluster_without_the_drivers_python_windows_fail_with_the_setting_to_change(
    tmp_path: Path,
) -> None:
    user = Pipeline(tmp_path)
    async with spark_parts(tmp_path) as parts:
        await parts.cluster(workers=1)
        with pytest.raises(ExceptionGroup) as group:
            await user.computed(user.engine(parts.url, python="/no/python"))
    (failed,) = leaves(group.value)
    assert isinstance(failed, WindowFailed)
    assert 'Cannot run program "/no/python"' in str(failed)
    assert "Set spark_python to one that is there." in failed.advice
