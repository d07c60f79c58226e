"""A whole server whose output lies on an object store, killed and started again: S3 is moto's, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.cluster import CONF, SMALL_JVM, spark_parts
from support.s3 import bucket, s3a_conf
from support.serving import serving, until
from support.spark_classes import spark_cache

from mldserver import assembly
from mldserver.cli.ledger import create_ledger
from mldserver.cli.ledger_tool import LedgerOptions
from mldserver.config.locations import RemoteOut
from mldserver.config.resolve import resolve
from mldserver.config.settings import Settings
from mldserver.engine_jobs import WindowJob
from mldserver.handler.inspection import load_spec
from mldserver.jobs.engine import Engine
from mldserver.ledger.contract import Commit
from mldserver.output.layout import OUTPUTS, SEGMENTS, attempt_path
from mldserver.output.manifest import MANIFESTS, current_files
from mldserver.output.publish import Publisher
from mldserver.output.store import OutputStore
from mldserver.server import EXIT_OPERATOR, Server
from mldserver.testing import FakeMLD, FakeStream, Habits, LocalEngine
from mldserver.windows import Window
from tests.ledger.dynamodb_emulator import Emulator

HANDLER = '''
"""One row for each record; ten-second windows over the record's own time."""
from mldserver import tumbling

schema = "id BIGINT NOT NULL, at TIMESTAMP"
windows = tumbling("10 seconds", on="at", lateness="1 second")


def process_record(record):
    event = record.json()
    return event["id"], event["at"]
'''

CHILD = """
import asyncio, json, sys
from dataclasses import replace
from pathlib import Path
from mldserver.config.resolve import resolve
from mldserver.observe.logging import logging_to
from mldserver.server import Server
from mldserver.testing import FakeStream, LocalEngine
from mldserver.testing.fake_kinesis import FakeKinesis
sys.path.insert(0, sys.argv[1])
given = json.loads(sys.argv[2])
settings = replace(resolve(given, environ={}, folder=Path(sys.argv[1])), constants={"settle_time_ms": 0})
engine = None if "spark_master" in given else LocalEngine()
with logging_to(settings):
    sys.exit(asyncio.run(Server(settings, engine=engine, kinesis=FakeKinesis(FakeStream(2)).make).run()))
"""
ON_SPARK = """

def on_window(rows, window):
    rows.createOrReplaceTempView("rows")
    return rows.sparkSession.sql("SELECT id, at FROM rows WHERE id >= 0")
"""
START_MS = 1_800_000_000_000
RECORDS = 500
LATE = RECORDS
REQUESTS: list[str] = []
"""What S3 was asked."""


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with bucket("lake", REQUESTS) as query:
        yield query


@pytest.fixture
def told(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings of a server, as text."""
    (tmp_path / "ids_by_time.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return {
        "handler": "ids_by_time",
        "out": f"s3://key:secret@lake/{tmp_path.name}/my%20rows?{s3}",
        "ledger": f"sqlite:{tmp_path / 'ledger.sqlite'}",
        "cache_dir": str(tmp_path / "cache"),
        "listen": "127.0.0.1:0",
        "flush_interval": "50 ms",
        # Windows close by their rows alone, of all the shards that are listed: however slow the machine is.
        "stream": "flights",
        "idle_time": "10 min",
        "quiet_time": "10 min",
        "recompute_delay": "100 ms",
    }


@pytest.fixture(params=["sqlite", pytest.param("dynamodb", marks=pytest.mark.long)])
def given(
    request: pytest.FixtureRequest, told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """The same, with one of the ledgers."""
    if request.param == "sqlite":
        yield told
        return
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "emulated")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "emulated")
    emulator = Emulator()
    with emulator.running():
        told["ledger"] = f"dynamodb://positions?region=us-east-1&endpoint_url={emulator.url}"
        create_ledger(where=LedgerOptions(ledger=told["ledger"], pipeline="ids_by_time"))
        yield told


def event(number: int) -> bytes:
    """A record of which ten fall into a second; the late one into the first."""
    second = 0 if number == LATE else number // 10
    return json.dumps({"id": number, "at": f"2027-01-15T08:00:{second:02d}Z"}).encode()


def settings_of(given: dict[str, Any], folder: Path) -> Settings:
    return replace(resolve(given, environ={}, folder=folder), constants={"settle_time_ms": 0})


def shown(out: str) -> dict[str, list[int]]:
    """The ids of each window that readers see."""
    found = current_files(out)
    told: dict[str, list[int]] = {}
    for path in found.paths:
        with found.filesystem.open_input_file(path) as source:
            ids = pq.ParquetFile(source).read(columns=["id"])["id"].to_pylist()
        window = path.rpartition("/")[0].rpartition("/")[0].rpartition("/")[2]
        told.setdefault(window, []).extend(ids)
    return told


def wanted(*, late: bool) -> dict[str, Counter[int]]:
    told: dict[str, Counter[int]] = {}
    for number in range(RECORDS + late):
        second = 0 if number == LATE else number // 10
        told.setdefault(f"2027-01-15T08-00-{second // 10 * 10:02d}Z", Counter())[number] += 1
    return told


async def killed_at(step: str, given: dict[str, Any], folder: Path, daemon: FakeMLD) -> None:
    """Let a server process live until it comes to a step."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CHILD,
        *(str(folder), json.dumps(given)),
        stdout=asyncio.subprocess.PIPE,
        # Nobody reads on; and a process whose pipe is full does not count as ended.
        limit=1 << 30,
        cwd=folder,
        env={
            **os.environ,
            "MLDSERVER_KILL_AT": step,
            "PYTHONPATH": str(Path(__file__).parent),
            "PYTHONWARNINGS": "ignore",
        },
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(800):
            async for line in process.stdout:
                told = json.loads(line)
                assert b"secret" not in line
                if told["event"] == "server.listening":
                    daemon.address = told["address"]
            assert await process.wait() == -signal.SIGKILL, told
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_every_row_is_shown_once_on_an_object_store_after_kills_and_with_a_late_row(
    given: dict[str, Any], tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    kills = {"segment.written:2": given, "attempt.staged": given}
    await story(kills, given, tmp_path, logged, LocalEngine())


@pytest.mark.slow
@pytest.mark.services
@pytest.mark.parametrize(
    ("first", "then"), [("cluster", "local[2]"), pytest.param("local[2]", "cluster", marks=pytest.mark.long)]
)
async def test_spark_shows_every_row_once_on_s3_on_a_cluster_and_locally_and_windows_share_a_job_there(
    first: str, then: str, told: dict[str, Any], tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    conf = {**CONF, **s3a_conf(), "spark.driver.extraJavaOptions": SMALL_JVM}
    (tmp_path / "ids_by_time.py").write_text(HANDLER + ON_SPARK)
    cache = spark_cache(tmp_path)
    async with spark_parts(tmp_path) as parts:
        await parts.cluster(workers=1)
        one, other = (
            {
                **told,
                "cache_dir": str(cache),
                "spark_master": parts.url if master == "cluster" else master,
                "spark_conf": [f"{name}={value}" for name, value in conf.items()],
            }
            for master in (first, then)
        )
        settings = settings_of(other, tmp_path)
        engine = assembly.spark_of(
            settings, load_spec(settings.handler), python_path=(str(tmp_path),), archive_after=None
        )
        # On a cluster most are S3A's own, for each window's files; sixty are for the job.
        most = 60 + 45 * 4 if then == "cluster" else 10 + 6 * 4
        await story(
            {"attempt.staged": one}, other, tmp_path, logged, engine, lambda: group(other, engine, most)
        )


async def group(given: dict[str, Any], engine: Engine, most: int) -> None:
    """Four windows as one job, by so many requests at most; one of them has no rows to show."""
    assert not [line for line in command_lines() if b"java" in line and b"secret.key" in line]
    store, jobs = OutputStore(given["out"]), []
    for number in range(4):
        ids = range(-10 if number == 2 else 10 * number, 0 if number == 2 else 10 * number + 10)
        path = f"{SEGMENTS}/group-{number}/0.parquet"
        size = store.write(
            path, pa.table({"id": pa.array(ids, pa.int64()), "_clock": pa.array(ids, pa.int64())})
        )
        window, staging = Window(f"group-{number}", None, None), store.uri(f"{OUTPUTS}/group-{number}/0001-x")
        jobs.append(WindowJob(window, 1, (store.uri(path),), staging, 10, size, given["out"]))
    REQUESTS.clear()
    results = await engine.compute_group(tuple(jobs))
    assert len(REQUESTS) <= most, REQUESTS
    shown = [
        pq.ParquetFile(store._fs.open_input_file(f"{store._base}/{OUTPUTS}/group-{number}/0001-x/{file}"))
        for number, result in enumerate(results)
        for file in result.files
    ]
    expected = [[] if number == 2 else list(range(10 * number, 10 * number + 10)) for number in range(4)]
    assert [file.read()["id"].to_pylist() for file in shown] == expected
    for number in range(4):
        store.delete(f"{OUTPUTS}/group-{number}")
        store.delete(f"{SEGMENTS}/group-{number}")


def command_lines() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            found.append(path.read_bytes())
    return found


async def story(
    kills: dict[str, dict[str, Any]],
    given: dict[str, Any],
    tmp_path: Path,
    logged: list[dict[str, Any]],
    engine: Engine,
    at_last: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Servers with these settings are killed, each at its step; one with ``engine`` sees the stream through."""
    stream = FakeStream(2, start_ms=START_MS)
    for number in range(RECORDS):
        stream.put(event(number), f"key-{number}")
    daemon = FakeMLD(
        stream, "127.0.0.1:1", habits=Habits(max_records=40), supervised=True, backoff_seconds=0.05
    )
    store = OutputStore(given["out"])
    async with asyncio.TaskGroup() as group:
        playing = group.create_task(daemon.run())
        for step, of_killed in kills.items():
            await killed_at(step, of_killed, tmp_path, daemon)
        orphans = {path.rpartition("/")[0] for path, _ in store.files(OUTPUTS)}
        assert orphans
        async with serving(settings_of(given, tmp_path), engine=engine, stream=stream) as server:
            daemon.address = await server.listening()
            async with asyncio.timeout(800):
                await until(lambda: len(list(store.files(MANIFESTS))) == 4)
                # The last one is open until the stream's end.
                closed = dict(sorted(wanted(late=False).items())[:4])
                assert {k: Counter(v) for k, v in shown(given["out"]).items()} == closed
                stream.put(event(LATE), "key")
                await until(lambda: sum(map(len, shown(given["out"]).values())) == 400 + 1)
                stream.end()
                await playing
                await server.finished()
                if at_last is not None:
                    await at_last()
    assert {k: Counter(v) for k, v in shown(given["out"]).items()} == wanted(late=True)
    assert [path for path, _ in store.files(MANIFESTS) if path.endswith("/000002.json")] == [
        f"{MANIFESTS}/2027-01-15T08-00-00Z/000002.json"
    ]
    assert not list(store.files("_late"))
    async with serving(settings_of(given, tmp_path), stream=stream):
        pass  # a revision that was replaced is deleted later, or by a start
    left = {path.rpartition("/")[0] for path, _ in store.files(OUTPUTS)}
    assert len(left) == 5, "an attempt that counts for nothing was left behind"
    assert not orphans & left
    assert next(each for each in logged if each["event"] == "recovery.done")["files_deleted"] > 0
    # Retained for late rows; whatever the kills left beside them is gone.
    assert sum(rows_in(store, path) for path, _ in store.files(SEGMENTS)) == RECORDS + 1


def test_what_is_asked_of_s3_for_a_window_does_not_grow_with_windows_and_revisions(
    told: dict[str, Any],
) -> None:
    store = OutputStore(told["out"])
    publisher, asked = Publisher(store), []
    for number in range(30):
        staging = attempt_path(publisher.root, "w", number + 1, "x" * 16)
        REQUESTS.clear()
        store.delete(staging)  # what an earlier life may have left
        begun = len(REQUESTS)
        store.write(f"{staging}/{number}.parquet", pa.table({"a": [1]}))
        REQUESTS.clear()
        output = Commit("w", number + 1, staging, (f"{number}.parquet",), 1, revision=number + 1)
        publisher.publish([output])
        named = len(REQUESTS)
        publisher.clean(output)
        asked.append((begun, named, len(REQUESTS) - named))
        store.write(f"{staging.replace('/w/', f'/w{number}/')}/0.parquet", pa.table({"a": [1]}))
    assert asked[0] == (2, 1, 1)
    assert set(asked[1:]) == {(2, 1, 13)}


def rows_in(store: OutputStore, path: str) -> int:
    with store._fs.open_input_file(store._absolute(path)) as source:
        return int(pq.ParquetFile(source).metadata.num_rows)


async def test_what_is_wrong_with_an_output_on_another_file_system_is_said_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    (tmp_path / "ids_by_time.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {
        "handler": "ids_by_time",
        "out": "s3://key:secret@lake/x?region=us-east-1&colour=blue",
        "ledger": f"sqlite:{tmp_path / 'ledger.sqlite'}",
    }
    settings = settings_of(given, tmp_path)
    assert isinstance(settings.out, RemoteOut)
    assert await Server(settings, engine=LocalEngine()).run() == EXIT_OPERATOR
    failed = next(entry for entry in logged if entry["event"] == "server.failed")
    assert failed["what"].startswith(
        "The output folder s3://…@lake/x?region=us-east-1&colour=blue cannot be reached: "
    )
    assert "secret" not in str(logged)
