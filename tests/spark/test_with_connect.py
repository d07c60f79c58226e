"""The engine on a Spark Connect server, where the packages for it are (``mldserver[connect]``)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.cluster import NOT_BLINDED, can_blind, spark_parts

from mldserver.engine_jobs import FunctionView, WindowJob
from mldserver.errors import NotThereYet, OperatorError, WindowFailed
from mldserver.handler.queries import Rows, batches_of, query_of
from mldserver.spark.client import make_engine
from mldserver.spark.shared_driver import SharedDriver
from mldserver.windows import Window

pytest.importorskip("grpc", reason="Spark Connect's packages are not installed")

pytestmark = [pytest.mark.services, pytest.mark.slow]

HERE = Path(__file__).parent


def segment(folder: Path) -> str:
    columns: dict[str, Any] = {"carrier": ["AA", "UA", "AA"], "delay": [1.0, 2.0, 4.0]}
    meta = {"_time": pa.array([1, 2, 3], pa.int64()), "_clock": pa.array([1, 2, 3], pa.int64())}
    path = folder / "0.parquet"
    pq.write_table(pa.table({**columns, **meta}), path)
    return str(path)


async def test_windows_are_computed_failed_and_cancelled_over_connect(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    """The server wants a token, which nobody else sees."""
    rows, token = segment(tmp_path), "hush-hush/="

    def job(name: str, size: int = 1000) -> WindowJob:
        window = Window(name, None, None)
        return WindowJob(window, 1, (rows,), str(tmp_path / "staging" / name), 3, size)

    async with spark_parts(tmp_path) as parts:
        _, address = await parts.connect_server(conf={"spark.connect.authenticate.token": token})
        # A token goes over TLS, or to this very host by its name.
        address = f"{address.replace('127.0.0.1', 'localhost')}/;user_id=tests;token={quote(token, safe='')}"
        engine = make_engine(
            "window_handlers:Windows",
            "carrier STRING, delay DOUBLE",
            master=address,
            work_dir=tmp_path / "work",
            python_path=(str(HERE),),
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.run())
            try:
                await engine.ready()
                result = await engine.compute(job("grouped"))
                with pytest.raises(WindowFailed, match="with name `carier` cannot be resolved"):
                    await engine.compute(job("unknown_column"))
                call = asyncio.ensure_future(engine.compute(job("endless")))
                await asyncio.wait({call}, timeout=2)
                call.cancel()
                assert (
                    await engine.compute(job("identity", 64 << 20))
                ).rows == 3  # shared out to several tasks
                view = FunctionView("flights", (rows,), ("window_start", "window_end"), 60_000)
                text = "SELECT carrier, delay FROM flights WHERE delay > :least ORDER BY delay"
                query = query_of(text, {"least": 1.5}, seconds=60, max_rows=10)
                batches = list(batches_of(await engine.query(query, (view,), 1 << 20)))
                assert [tuple(row) for row in Rows(pa.Table.from_batches(batches))] == [
                    ("UA", 2.0),
                    ("AA", 4.0),
                ]
                jobs = tuple(job(name) for name in ("by_view", "by_the_same_view", "empty_view"))
                together = await engine.compute_group(jobs)
            finally:
                await engine.close()
        elsewhere = address.replace(quote(token, safe=""), "another")
        wrong = replace(
            engine,
            driver=SharedDriver(msgspec.structs.replace(engine.driver.setup, master=elsewhere)),
        )
        with pytest.raises(OperatorError, match=r"(?s)refuses the token.*;token=TOKEN") as refused:
            await wrong.run()
    assert not isinstance(refused.value, NotThereYet)
    assert "another" not in str(refused.value)
    (file,) = result.files
    output = pq.ParquetFile(tmp_path / "staging" / "grouped" / file).read().select(["carrier", "flights"])
    assert sorted(map(tuple, (row.values() for row in output.to_pylist()))) == [("AA", 2), ("UA", 1)]
    for name, one in zip(("by_view", "by_the_same_view", "empty_view"), together, strict=True):
        (file,) = one.files
        rows_of = pq.ParquetFile(tmp_path / "staging" / name / file).read().to_pylist()
        assert {row["window"] for row in rows_of} == ({name} if one.rows else set())
        assert (one.rows, len(rows_of)) == ((0, 0) if name == "empty_view" else (3, 3))
    masters = [event["master"] for event in logged if event["event"] == "spark.starting"]
    assert [master.endswith("/;user_id=tests;token=…") for master in masters] == [True, True]
    assert "hush" not in repr(logged)


async def test_a_connect_server_that_does_not_see_the_output_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if not can_blind(out):
        pytest.skip(NOT_BLINDED)
    async with spark_parts(tmp_path) as parts:
        _, address = await parts.connect_server(blind=out)
        engine = make_engine("", "carrier STRING", master=address, work_dir=out / "work")
        with pytest.raises(OperatorError, match=r"(?s)PATH_NOT_FOUND.*Set out to shared storage") as refused:
            await engine.run()
    assert not isinstance(refused.value, NotThereYet)
