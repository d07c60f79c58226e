"""A server that is stopped while Spark works: it ends in order, with the exit code it should, and leaves nothing."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import group_members
from support.serving import quick, serving, until

from mldserver.base.clock import SystemClock
from mldserver.server import EXIT_CLEAN, EXIT_FORCED, Server
from mldserver.spark.client import SparkEngine, make_engine
from mldserver.testing import FakeMLD, FakeStream

HANDLER = '''
"""Every record as it is; a window for each."""
from mldserver import batches

schema = "data BINARY"
windows = batches(max_rows=1, max_age="1 hour")


def process_record(record):
    return (record.data,)
'''
DRIVER = Path(__file__).parent / "support" / "failing_driver.py"


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "each_alone.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "each_alone"


def engine(folder: Path, plan: str, *, stop_grace: float) -> SparkEngine:
    return make_engine(
        "each_alone",
        "data BINARY",
        master="sc://nowhere",
        work_dir=folder / "work",
        cache_dir=folder / "cache",
        command=[sys.executable, str(DRIVER), plan, str(folder / "plan")],
        stop_grace=stop_grace,
    )


async def computing(server: Server, spark: SparkEngine) -> int:
    """Return the driver's process id while it runs a job that never ends."""
    stream = FakeStream(1, seed=1)
    stream.put(b"one", "key")
    stream.end()
    async with asyncio.timeout(800):
        await FakeMLD(stream, await server.listening()).run()
        await until(lambda: server.status().windows_waiting == 1 and server.is_ready)
        assert spark.driver.life is not None
        await until(lambda: bool(spark.driver.life.waiting))
    assert group_members(spark.driver.life.child.pid) == [spark.driver.life.child.pid]
    return spark.driver.life.child.pid


class Ahead(SystemClock):
    """Is set forward when all rows are durable: then nothing is left of the grace, however long that took here."""

    ahead_ms = 0

    def steady_ms(self) -> int:
        return super().steady_ms() + self.ahead_ms


@pytest.mark.parametrize(
    ("plan", "said"), [("hang", ["stopping in order"]), ("deaf", ["stopping in order"]), ("stay", [])]
)
async def test_a_stop_while_a_job_runs_is_a_clean_end(
    tmp_path: Path,
    handler: str,
    logged: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    plan: str,
    said: list[str],
) -> None:
    clock = Ahead()
    settings = quick(tmp_path / "out", handler, grace=600.0)
    spark = engine(tmp_path, plan, stop_grace=0.5 if plan == "stay" else 600)
    async with serving(settings, engine=spark, exit_code=EXIT_CLEAN, clock=clock) as server:
        driver = await computing(server, spark)
        assert server.only.pipeline.parts is not None
        flush = server.only.pipeline.parts.coordinator.flush

        async def last_flush(reason: str) -> None:
            await flush(reason)
            clock.ahead_ms = 600_000

        monkeypatch.setattr(server.only.pipeline.parts.coordinator, "flush", last_flush)
    assert group_members(driver) == []
    assert list((tmp_path / "work").iterdir()) == []
    assert [event["text"] for event in logged if event["event"] == "handler.output"] == said
    assert [event for event in logged if event["event"] == "server.failed"] == []


async def test_a_stop_that_is_forced_while_a_job_runs_waits_for_no_driver(
    tmp_path: Path, handler: str, logged: list[dict[str, Any]]
) -> None:
    spark = engine(tmp_path, "stay", stop_grace=600)
    settings = quick(tmp_path / "out", handler, grace=600.0)
    async with asyncio.timeout(800), serving(settings, engine=spark, exit_code=EXIT_FORCED) as server:
        driver = await computing(server, spark)
        server.stop("SIGTERM")
        server.force()
    assert group_members(driver) == []
    assert list((tmp_path / "work").iterdir()) == []
    assert [event for event in logged if event["event"] == "server.failed"] == []
