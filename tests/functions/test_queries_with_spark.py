"""A server with two functions and a real Spark: the handler of one asks for the published windows of the other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from functions.test_functions_of_a_server import ROWS, address_of, deliver, told
from spark.test_with_spark import java_of
from support.serving import quick, until
from support.spark_classes import spark_cache

from mldserver.server import Server
from mldserver.testing import FakeMLD, FakeStream
from mldserver.testing.fake_kinesis import FakeKinesis
from mldserver.workers.runtime import WorkerRuntime

pytestmark = [pytest.mark.slow, pytest.mark.long]

ASKS = """
from mldserver import Lookup, batches

schema = "key STRING, earlier BIGINT, name STRING"
windows = batches(max_rows=1000, max_age="1 hour")
names = Lookup("SELECT 'a' AS key, concat('the ', :letter) AS name", key="key", letter="first")

def process_record(record, ctx):
    if record.json().get("slow"):
        ctx.sql("SELECT sum(id) FROM range(0, 10000000, 1, 1000000)")
    earlier = ctx.sql("SELECT count(*) AS n FROM rows WHERE window_start < :before", before=ctx.now)
    row = names.get(ctx.key)
    return ctx.key, earlier.one().n, row.name if row else None
"""


def kill_worker(server: Server) -> None:
    parts = server.functions["asks"].parts
    assert parts is not None
    assert isinstance(parts.runtime, WorkerRuntime)
    (row,) = parts.runtime.rows()
    assert row.pid is not None
    os.kill(row.pid, signal.SIGKILL)


async def test_a_handler_asks_for_windows_of_another_function_also_after_its_worker_and_its_spark_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    (tmp_path / "rows.py").write_text(ROWS)
    (tmp_path / "asks.py").write_text(ASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    stream = FakeStream(1, seed=1, start_ms=1_900_000_000_000)
    spark = {"cache_dir": spark_cache(tmp_path), "spark_master": "local[2]"}
    settings = [
        quick(tmp_path / "out" / "rows", "rows", **spark),
        quick(tmp_path / "out" / "asks", "asks", workers=1, stream="stream", **spark),
    ]
    server = Server(settings, kinesis=FakeKinesis(stream).make, seed=1)
    assert server._driver is not None
    async with asyncio.TaskGroup() as group, asyncio.timeout(600):
        life = group.create_task(server.run())
        rows, asks = server.functions.values()
        await deliver(rows)
        await until(lambda: len(told(logged, "window.done")) == 4)  # each has ten rows
        playing = group.create_task(FakeMLD(stream, await address_of(asks)).run())
        stream.put(json.dumps({}).encode(), "a")
        await until(lambda: server.functions["asks"].status(server._gatherer).totals.rows_durable == 1)
        stream.put(json.dumps({"slow": True}).encode(), "b")
        life_of_spark = server._driver.life
        assert life_of_spark is not None
        await until(lambda: any(each[0].label == "query of asks" for each in life_of_spark.waiting.values()))
        kill_worker(server)  # its query is cancelled; the next process asks again
        await until(lambda: len(told(logged, "worker.lost")) == 1)
        await until(lambda: any(each[0].label == "query of asks" for each in life_of_spark.waiting.values()))
        os.kill(
            java_of(life_of_spark.child.pid), signal.SIGKILL
        )  # the query fails with its Spark, and so does the call: it is retried
        await until(lambda: len(told(logged, "spark.lost")) == 1)
        stream.put(json.dumps({}).encode(), "c")
        stream.end()
        await playing
        await server.functions["asks"].pipeline.finished()
        server.stop("the test is over")
    assert life.result() == 0
    files = [str(path) for path in (tmp_path / "out" / "asks").glob("window=*/*.parquet")]
    table = ds.dataset(files, format="parquet").to_table(columns=["key", "earlier", "name"])
    found = {row["key"]: (row["earlier"], row["name"]) for row in table.to_pylist()}
    assert found["a"] == (40, "the first")
    assert found["c"] == (40, None)


JOINS = """
from mldserver import tumbling

schema = "id BIGINT, at TIMESTAMP"
windows = tumbling("10 seconds", on="at", lateness="1 minute")
after = "rows"

def process_record(record):
    event = record.json()
    return event["id"], event["at"]

def on_window(rows, window):
    others = rows.sparkSession.table("rows").where(f"window_end <= timestamp '{window.end}'")
    return rows.join(others.selectExpr("id", "window_end AS seen"), "id", "left").groupBy().count().crossJoin(
        others.selectExpr("count(*) AS earlier"))
"""


async def test_windows_join_the_windows_of_a_function_that_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    (tmp_path / "rows.py").write_text(ROWS)
    (tmp_path / "joins.py").write_text(JOINS)
    monkeypatch.syspath_prepend(str(tmp_path))
    spark = {"cache_dir": spark_cache(tmp_path), "spark_master": "local[2]"}
    settings = [quick(tmp_path / "out" / name, name, **spark) for name in ("rows", "joins")]
    server = Server(settings, seed=1)
    async with asyncio.TaskGroup() as group, asyncio.timeout(600):
        life = group.create_task(server.run())
        rows, joins = server.functions.values()
        await deliver(joins)
        await until(lambda: len(told(logged, "window.waiting")) == 4)
        assert told(logged, "window.done") == []
        await deliver(rows)
        await until(lambda: len(told(logged, "window.done")) == 8)
        server.stop("the test is over")
    assert life.result() == 0
    files = sorted(str(path) for path in (tmp_path / "out" / "joins").glob("window=*/*.parquet"))
    table = ds.dataset(files, format="parquet").to_table(columns=["count", "earlier"])
    assert table.to_pylist() == [{"count": 10, "earlier": earlier} for earlier in (10, 20, 30, 40)]
