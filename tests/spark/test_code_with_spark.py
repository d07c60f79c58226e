"""A server with a real Spark whose handler's files are replaced while it runs: a fresh driver computes as the one before."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from support.serving import quick, until
from support.spark_classes import spark_cache
from workers.kit import named

from mldserver.server import Server
from mldserver.spark.client import SparkEngine
from mldserver.testing import FakeMLD, FakeStream, Habits

pytestmark = pytest.mark.slow

HANDLER = """
from pathlib import Path
from mldserver import batches
from . import functions

schema = "{schema}"
windows = batches(max_rows=60, max_age="1 hour")

def process_record(record):
    return (record.json()["id"],) * {columns}

def on_window(rows, window):
    from pyspark.sql.functions import lit
    from .later import FACTOR
    beside = (Path(__file__).parent / "beside.txt").read_text()
    return rows.withColumn("computed_by", lit(FACTOR)).withColumn("called", functions.factor()).withColumn("beside", lit(beside))
"""
FUNCTIONS = """
from pyspark.sql.functions import udf
from pyspark.sql.types import IntegerType

def called():
    return {factor}

def factor():
    return udf(called, IntegerType())()
"""


async def test_a_fresh_driver_runs_the_code_that_the_server_runs_and_not_what_lies_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    monkeypatch.chdir(tmp_path)

    def write(factor: int, schema: str, columns: int) -> None:
        folder = tmp_path / "flow"
        folder.mkdir(exist_ok=True)
        (folder / "mine.py").write_text(HANDLER.format(schema=schema, columns=columns))
        (folder / "functions.py").write_text(FUNCTIONS.format(factor=factor))
        (folder / "later.py").write_text(f"FACTOR = {factor}")
        (folder / "beside.txt").write_text("text")

    write(1, "id BIGINT NOT NULL", 1)
    conf = {
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    spark: dict[str, Any] = {
        "spark_conf": conf,
        "spark_master": "local[2]",
        "cache_dir": spark_cache(tmp_path),
    }
    settings = quick(tmp_path / "out", "flow.mine", workers=1, **spark)
    given = FakeStream(1, seed=1, start_ms=1_800_000_000_000)
    numbers = itertools.count()

    def put() -> None:
        for number in itertools.islice(numbers, 120):
            given.put(json.dumps({"id": number}).encode(), f"key-{number}")

    async def told(event: str, times: int) -> None:
        await until(lambda: len(named(logged, event)) >= times)

    server = Server(settings, seed=1)
    async with asyncio.timeout(800), asyncio.TaskGroup() as group:
        life = group.create_task(server.run())
        put()
        daemon = FakeMLD(given, await server.listening(), habits=Habits(max_records=4))
        playing = group.create_task(daemon.run())
        await told("window.done", 1)
        write(1000, "id BIGINT NOT NULL, other BIGINT", 2)
        engine = server.only.pipeline.parts.engine
        assert isinstance(engine, SparkEngine)
        assert engine.driver.life is not None
        os.kill(engine.driver.life.child.pid, signal.SIGKILL)
        await told("spark.lost", 1)
        put()
        given.end()
        await playing
        await server.finished()
        server.stop("the test is over")
        assert await life == 0
    assert len(named(logged, "spark.ready")) == 2
    rows = ds.dataset(list(map(str, (tmp_path / "out").glob("window=*/*.parquet")))).to_table().to_pylist()
    assert Counter(row["id"] for row in rows) == Counter(range(given.records))
    assert {(row["computed_by"], row["called"], row["beside"]) for row in rows} == {(1, 1, "text")}
