"""The engine on a Spark Connect server, where the packages for it are (``mldserver[connect]``)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest

from mldserver.errors import WindowFailed
from mldserver.jobs.engine import WindowJob
from mldserver.spark.client import SparkEngine
from mldserver.windows import Window

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytest.importorskip("grpc", reason="Spark Connect's packages are not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

HERE = Path(__file__).parent
HOME = Path(pyspark.__file__).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def connect_server() -> AsyncIterator[str]:
    """Run a Spark Connect server of our own and yield its address."""
    port = free_port()
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.master": "local[1]",
        "spark.ui.enabled": "false",
        "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    options = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    name = "org.apache.spark.sql.connect.service.SparkConnectServer"
    process = await asyncio.create_subprocess_exec(
        str(HOME / "bin" / "spark-submit"),
        *("--class", name, *options, "spark-internal"),
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None
    try:
        while line := await process.stderr.readline():
            if b"Spark Connect server started" in line:
                break
        async with asyncio.TaskGroup() as tasks:
            drain = tasks.create_task(process.stderr.read())
            yield f"sc://127.0.0.1:{port}"
            drain.cancel()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def segment(folder: Path) -> str:
    columns: dict[str, Any] = {"carrier": ["AA", "UA", "AA"], "delay": [1.0, 2.0, 4.0]}
    meta = {"_time": pa.array([1, 2, 3], pa.int64()), "_clock": pa.array([1, 2, 3], pa.int64())}
    path = folder / "0.parquet"
    pq.write_table(pa.table({**columns, **meta}), path)
    return str(path)


async def test_windows_are_computed_failed_and_cancelled_over_connect(tmp_path: Path) -> None:
    rows = segment(tmp_path)

    def job(name: str) -> WindowJob:
        window = Window(name, None, None)
        return WindowJob(window, 1, (rows,), str(tmp_path / "staging" / name), 3, 1000)

    async with connect_server() as address:
        engine = SparkEngine(
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
                assert (await engine.compute(job("identity"))).rows == 3
            finally:
                await engine.close()
    (file,) = result.files
    output = pq.ParquetFile(tmp_path / "staging" / "grouped" / file).read().select(["carrier", "flights"])
    assert sorted(map(tuple, (row.values() for row in output.to_pylist()))) == [("AA", 2), ("UA", 1)]
