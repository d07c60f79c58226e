"""Whatever becomes of Spark: rows go on, connections live, and each window comes out once when Spark is back."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from support.serving import quick, serving, until

from mldserver import cli
from mldserver.base.clock import SystemClock
from mldserver.engine_jobs import WindowJob, WindowResult
from mldserver.server import Server
from mldserver.spark.client import SparkEngine, make_engine
from mldserver.spark.driver_messages import LoadFunction, StartSession
from mldserver.spark.shared_driver import SharedDriver
from mldserver.testing import FakeMLD, FakeStream, Habits, LocalEngine

HANDLER = '''
"""One row for each record; ten-second windows over the record's own time."""
from mldserver import tumbling

schema = "id BIGINT NOT NULL, at TIMESTAMP"
windows = tumbling("10 seconds", on="at", lateness="1 minute")


def process_record(record):
    event = record.json()
    return event["id"], event["at"]
'''
DRIVER = Path(__file__).parent / "support" / "failing_driver.py"
WITHOUT_SPARK = """
from types import SimpleNamespace
from mldserver.spark import driver
context = SimpleNamespace(uiWebUrl=None, applicationId="local-1")
spark = SimpleNamespace(version="4.3.0", sparkContext=context, stop=lambda: None)
driver.open_session = lambda _: SimpleNamespace(
    jvm=None, spark=spark, connect=False, health_check=lambda: dict, stop=spark.stop
)
driver.main()
"""
"""The real driver, which opens a session at once: it imports the handler once there is one."""
RECORDS = 300
WINDOWS = 3
GRACE = 2.0


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "seconds_by_spark.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "seconds_by_spark"


class Engine(SparkEngine):
    """Its first job alone has a deadline: one that never ends. However slow the machine is, the others have time."""

    async def compute_group(self, jobs: tuple[WindowJob, ...]) -> tuple[WindowResult, ...]:
        try:
            return await super().compute_group(jobs)
        finally:
            self.job_deadline = None


class Impatient(SystemClock):
    """The time in which a driver may listen is over at once."""

    async def sleep(self, seconds: float) -> None:
        if seconds != GRACE:
            await super().sleep(seconds)


def engine(folder: Path, plan: str) -> SparkEngine:
    driver = SharedDriver(
        StartSession("sc://nowhere"),
        cache_dir=folder / "cache",
        command=[sys.executable, str(DRIVER), plan, str(folder / "plan")],
        cancel_grace=GRACE if plan == "deaf" else 600.0,
        clock=Impatient(),
    )
    return Engine(
        LoadFunction("", "seconds_by_spark", "id BIGINT NOT NULL, at TIMESTAMP"),
        driver,
        owns_driver=True,
        work_dir=folder / "work",
        job_deadline=0.1 if plan in {"hang", "deaf"} else None,
        group_limit=1,
    )


def filled() -> FakeStream:
    made = FakeStream(2, seed=1, start_ms=1_800_000_000_000)
    for number in range(RECORDS):
        at = f"2027-01-15T08:00:{number // 10:02d}Z"
        made.put(json.dumps({"id": number, "at": at}).encode(), f"key-{number}")
    made.end()
    return made


STREAM = filled()


async def read_all(server: Server) -> None:
    """Play the stream to its end: every row is durable then, every shard's end checkpointed, whatever Spark does."""
    daemon = FakeMLD(STREAM, await server.listening(), habits=Habits(max_records=30))
    async with asyncio.timeout(800):
        await daemon.run()
    assert (daemon.violations, daemon.life, daemon.finished) == ([], 1, True)


def ids(out: Path) -> Counter[int]:
    files = [str(path) for path in out.glob("window=*/*.parquet")]
    return Counter(ds.dataset(files, format="parquet").to_table()["id"].to_pylist() if files else [])


def told(logged: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [event for event in logged if event["event"] in names]


@pytest.mark.parametrize(
    ("plan", "failures", "lost"),
    [
        ("fail", 1, []),
        ("full", 1, []),
        ("hang", 1, []),
        ("deaf", 1, ["driver"]),  # the next window's job waits for the next driver
        ("die", 1, ["driver"]),
        ("jvm", 1, ["jvm"]),
        ("fail,die,full", 3, ["driver"]),
    ],
)
async def test_a_window_whose_job_fails_is_tried_again_and_comes_out_once(
    tmp_path: Path, handler: str, logged: list[dict[str, Any]], plan: str, failures: int, lost: list[str]
) -> None:
    settings = quick(tmp_path / "out", handler, window_attempts=5, window_concurrency=1)
    async with serving(settings, engine=engine(tmp_path, plan), stream=STREAM) as server:
        await read_all(server)
        async with asyncio.timeout(800):
            await server.finished()
        assert server.status().windows_published == WINDOWS
        async with asyncio.timeout(800):
            await until(lambda: server.is_ready)
    assert ids(tmp_path / "out") == Counter(range(RECORDS))
    assert [event["who"] for event in told(logged, "spark.lost")] == lost
    assert len(told(logged, "window.failed")) == failures
    assert told(logged, "connection.failed") == []


@pytest.mark.parametrize(
    ("plan", "reason"), [("die", "The driver's process died"), ("forget", "The master has forgotten it.")]
)
async def test_readiness_is_red_while_spark_is_away_says_why_and_is_green_again_afterwards(
    tmp_path: Path, handler: str, logged: list[dict[str, Any]], plan: str, reason: str
) -> None:
    settings = quick(tmp_path / "out", handler, window_attempts=5)
    async with serving(settings, engine=engine(tmp_path, plan), stream=STREAM) as server:
        async with asyncio.timeout(800):
            await server.ready()
        await read_all(server)
        async with asyncio.timeout(800):
            await server.finished()
            await until(lambda: server.is_ready)
    changes = [event["event"] for event in told(logged, "server.ready", "server.unready")]
    assert changes == ["server.ready", "server.unready", "server.ready"]
    assert told(logged, "server.unready")[0]["reason"].startswith(f"Spark computes no window. {reason}")


async def test_under_halt_the_server_says_so_goes_on_reading_and_goes_on_trying(
    tmp_path: Path, handler: str, logged: list[dict[str, Any]]
) -> None:
    settings = quick(tmp_path / "out", handler, window_attempts=2, window_concurrency=1)
    async with serving(settings, engine=engine(tmp_path, "fail,fail,fail,fail"), stream=STREAM) as server:
        await read_all(server)
        async with asyncio.timeout(800):
            await server.finished()
            await until(lambda: server.is_ready)
    assert ids(tmp_path / "out") == Counter(range(RECORDS))
    assert len(told(logged, "window.halted")) == 1


@pytest.mark.parametrize(("error", "code"), [("ConnectionRefusedError", 1), ("KeyError", 2)])
async def test_a_handler_that_sparks_driver_cannot_import_ends_the_server_with_2_unless_a_service_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]], error: str, code: int
) -> None:
    text = f"import os\n{HANDLER}\nif os.getpid() != {os.getpid()}:\n    raise {error}('the registry')\n"
    (tmp_path / "asks_at_its_import.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    spark = make_engine(
        "asks_at_its_import",
        "id BIGINT NOT NULL, at TIMESTAMP",
        master="sc://nowhere",
        work_dir=tmp_path / "work",
        python_path=(str(tmp_path),),
        command=[sys.executable, "-c", WITHOUT_SPARK],
    )
    server = Server(quick(tmp_path / "out", "asks_at_its_import"), engine=spark, seed=1)
    async with asyncio.timeout(800):
        assert await server.run() == code
    (failed,) = told(logged, "server.failed")
    assert failed["exit_code"] == code
    assert f"{error}: " in failed["what"]
    assert "asks_at_its_import.py" in failed["traceback"]


async def test_windows_that_were_set_aside_are_listed_and_run_again(
    tmp_path: Path, handler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    settings = quick(
        out,
        handler,
        window_attempts=2,
        window_on_failure="dead_letter",
    )
    async with serving(settings, engine=engine(tmp_path, "fail…"), stream=STREAM) as server:
        await read_all(server)
        async with asyncio.timeout(800):
            await server.finished()
    assert ids(out) == Counter()

    def windows(*arguments: str) -> str:
        place = ["--out", str(out), "--pipeline", settings.pipeline]
        assert cli.run(["windows", *arguments, *place]) == 0
        return capsys.readouterr().out

    listed = json.loads(await asyncio.to_thread(windows, "list", "--state", "set_aside", "--json"))
    assert len(listed) == WINDOWS
    assert "ValueError: no good" in await asyncio.to_thread(windows, "show", "2027-01-15T08-00-00Z")
    await asyncio.to_thread(windows, "retry", *(each["window"] for each in listed))
    async with serving(settings, engine=LocalEngine(), stream=STREAM) as server:
        async with asyncio.timeout(800):
            await until(lambda: server.status().windows_published == WINDOWS)
    assert ids(out) == Counter(range(RECORDS))
