"""Signals in every stage of a server's life, to real processes; and what a start that takes long says meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop
from support.processes import has_ended
from support.serving import connect, quick, until

from mldserver.errors import InternalError
from mldserver.server import EXIT_CLEAN, EXIT_FAULT, EXIT_FORCED, Server
from mldserver.testing import LocalEngine, VirtualClock

HANGS_AT_IMPORT = """
import os, pathlib, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path("pids").write_text(f"{os.getpid()} {grandchild.pid}")
time.sleep(600)
def process_record(record): ...
"""
HOLDS_ON = """
import asyncio, pathlib
async def process_record(record):
    pathlib.Path("called").touch()
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pathlib.Path("refused").touch()
"""
WITHOUT_ROWS = "def process_record(record):\n    pass\n"
KEEPS_STATE = """
def process_record(record, ctx):
    ctx.state["n"] = ctx.state.get("n", 0) + 1
"""
INITIALIZE = b'{"action":"initialize","shardId":"s","sequenceNumber":"TRIM_HORIZON","subSequenceNumber":0}\n'
BATCH = (
    b'{"action":"processRecords","records":[{"data":"","partitionKey":"k","sequenceNumber":"1",'
    b'"approximateArrivalTimestamp":1}],"millisBehindLatest":0}\n'
)


@contextlib.asynccontextmanager
async def serving(
    folder: Path, handler: str, *options: str, errors: str = "stderr"
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Path]]:
    """Run ``mldserver serve``; its log is a file."""
    (folder / "watched.py").write_text(handler)
    log_file = folder / "log"
    with (folder / errors).open("wb") as stderr:  # a pipe would live as long as whatever the handler starts
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "mldserver",
                "serve",
                "watched",
                "--listen",
                "127.0.0.1:0",
                "--out",
                "out",
            ),
            *("--log-file", str(log_file), *options),
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            stderr=stderr,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(800):
            yield process, log_file
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def entries(log_file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log_file.read_text().splitlines()] if log_file.exists() else []


def told(log_file: Path) -> list[str]:
    return [entry["event"] for entry in entries(log_file)]


@pytest.mark.parametrize(
    ("stream", "what", "advice"),
    [
        ([], "keeps state for each partition key, but no stream is named", "--stream NAME"),
        (
            [
                *("--region", "eu-west-1"),
                *("--stream", "arn:aws:dynamodb:eu-west-1:123456789012:table/orders/stream/2026"),
            ],
            "is a DynamoDB stream that daemons read",
            "--source dynamodb:TABLE",
        ),
    ],
    ids=["no stream", "a DynamoDB stream through daemons"],
)
async def test_a_handler_that_keeps_state_needs_the_ranges_of_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: list[str], what: str, advice: str
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    async with serving(tmp_path, KEEPS_STATE, "--workers", "inline", *stream) as (process, log_file):
        assert await process.wait() == 2
    (failed,) = [entry for entry in entries(log_file) if entry["event"] == "server.failed"]
    assert what in failed["what"]
    assert advice in failed["advice"]


async def test_a_handler_without_rows_has_no_table_of_dead_letters(tmp_path: Path) -> None:
    letters = ("--workers", "inline", "--dead-letters", "delta:letters")
    async with serving(tmp_path, WITHOUT_ROWS, *letters) as (process, log_file):
        assert await process.wait() == 2
    (failed,) = [entry for entry in entries(log_file) if entry["event"] == "server.failed"]
    assert "is a table, and a handler without rows has no Spark that writes it" in failed["what"]


@pytest.mark.parametrize(
    ("workers", "number"),
    [
        ("1", signal.SIGINT),
        ("inline", signal.SIGTERM),
        pytest.param("1", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("inline", signal.SIGINT, marks=pytest.mark.long),
    ],
)
async def test_a_signal_ends_a_start_that_hangs_in_the_handlers_import_in_order(
    workers: str, number: signal.Signals, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    async with serving(tmp_path, HANGS_AT_IMPORT, "--workers", workers) as (process, log_file):
        await until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        process.send_signal(number)
        await until(lambda: "server.stopped" in told(log_file))
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)  # a wrapper passes on what the terminal has sent to all
        assert await process.wait() == EXIT_CLEAN
    # A slow machine comes to the import late, which is told.
    begun, *waiting, stopping, stopped = entries(log_file)
    assert {entry["event"] for entry in waiting} <= {"server.waiting"}
    assert (begun["event"], stopping["event"], stopped["event"]) == (
        "server.starting",
        "server.stopping",
        "server.stopped",
    )
    assert stopping["reason"] == number.name
    importing, started = map(int, pids.read_text().split())
    if workers == "1":  # what the handler starts in the server's own process is the handler's affair
        assert has_ended(importing)
        await until(lambda: has_ended(started))
    else:
        os.kill(started, signal.SIGKILL)


async def test_ps_names_each_process_and_systemd_is_told_of_start_reload_and_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    systemd.bind(str(tmp_path / "notify"))
    systemd.setblocking(False)
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.getsockname())
    words: list[str] = []

    async def tells(word: str) -> None:
        while word not in words:
            words.extend((await asyncio.get_running_loop().sock_recv(systemd, 4096)).decode().splitlines())

    handler = "def process_record(record): ..."
    with systemd:
        async with serving(tmp_path, handler, "--workers", "2", "--admin", "127.0.0.1:0") as (server, _):
            await tells("READY=1")
            assert "STATUS=ready" in words
            roles = ("server", "standby worker", "worker 0", "worker 1")
            await until(lambda: titles(server.pid) == [f"mldserver: watched {role}" for role in roles])
            words.clear()
            server.send_signal(signal.SIGHUP)
            await tells("RELOADING=1")
            await tells("READY=1")
            await tells("WATCHDOG=1")
            server.send_signal(signal.SIGTERM)
            await tells("STOPPING=1")
            assert "STATUS=stops (SIGTERM)" in words
            assert await server.wait() == EXIT_CLEAN


async def test_sigusr1_opens_the_log_file_again_and_ends_no_process(tmp_path: Path) -> None:
    handler = "def process_record(record): ..."
    async with serving(tmp_path, handler, "--workers", "1", "--admin", "127.0.0.1:0") as (server, log_file):
        await until(lambda: "server.starting" in told(log_file))
        server.send_signal(signal.SIGUSR1)
        await until(lambda: "log.reopened" in told(log_file))
        await until(lambda: "server.ready" in told(log_file))
        await until(lambda: len(titles(server.pid)) == 3)
        before = children(server.pid)
        for pid in before:
            os.kill(pid, signal.SIGUSR1)
        log_file.rename(tmp_path / "log.1")
        server.send_signal(signal.SIGUSR1)
        await until(log_file.exists)
        await until(lambda: "log.reopened" in told(log_file))
        assert children(server.pid) == before
        server.send_signal(signal.SIGTERM)
        assert await server.wait() == EXIT_CLEAN
    assert [
        each for each in entries(tmp_path / "log.1") + entries(log_file) if each["level"] == "warning"
    ] == []


async def test_what_the_watchdog_ends_says_where_it_stood(tmp_path: Path) -> None:
    async with serving(tmp_path, HANGS_AT_IMPORT, "--workers", "inline") as (server, _):
        await until((tmp_path / "pids").exists)
        server.send_signal(signal.SIGABRT)  # systemd's, where no word has come for WatchdogSec
        assert await server.wait() == -signal.SIGABRT
    assert "watched.py" in (tmp_path / "stderr").read_text()
    os.kill(int((tmp_path / "pids").read_text().split()[1]), signal.SIGKILL)


def children(server: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]


def titles(server: int) -> list[str]:
    """Return what ``ps`` calls a server and its children, once none is called as it was started."""
    found = []
    for pid in (server, *children(server)):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_text().strip("\0"))
    return sorted(title for title in found if title.startswith("mldserver: "))


@pytest.mark.parametrize(
    ("grace", "errors"),
    [
        # By day the same with a standard error that takes nothing.
        pytest.param(None, "stderr", marks=pytest.mark.long),
        ("1s", "stderr"),
        (None, "/dev/full"),
    ],
    ids=["a second signal", "the end of the grace", "its standard error takes nothing"],
)
async def test_what_forces_the_stop_ends_the_process_though_the_handler_refuses_to_be_cancelled(
    grace: str | None, errors: str, tmp_path: Path
) -> None:
    options = () if grace is None else ("--grace", grace)
    async with serving(tmp_path, HOLDS_ON, "--workers", "inline", *options, errors=errors) as (
        process,
        log_file,
    ):
        await until(lambda: "server.listening" in told(log_file))
        address = next(each["address"] for each in entries(log_file) if each["event"] == "server.listening")
        reader, writer = await connect(address)
        writer.write(INITIALIZE)
        await reader.readline()
        writer.write(BATCH)
        await until((tmp_path / "called").exists)
        process.send_signal(signal.SIGTERM)
        await until(lambda: "server.stopping" in told(log_file))
        if grace is None:
            process.send_signal(signal.SIGTERM)
        assert await process.wait() == EXIT_FORCED
        writer.close()
    assert (tmp_path / "refused").exists()
    (failed,) = [entry for entry in entries(log_file) if entry["event"] == "server.failed"]
    assert (failed["level"], failed["exit_code"]) == ("critical", EXIT_FORCED)
    if errors == "stderr":
        assert "stopped with exit code 3" in (tmp_path / errors).read_text()


@pytest.fixture
def slow(logged: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A handler whose import waits for a file, ``go``, which is there at the end at the latest.

    A start that is given up leaves its import behind, which puts the log's configuration back at its end: that may not
    come upon the next test.
    """
    go = tmp_path / "go"
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        f"while not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.01)\n"
        "def process_record(record): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "slow"
    go.touch()
    for thread in threading.enumerate():
        if thread.name.startswith("mldserver-"):
            thread.join()


async def test_a_start_that_takes_long_says_what_it_waits_for(
    slow: str, tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    clock, go = VirtualClock(), tmp_path / "go"
    server = Server(quick(tmp_path / "out", slow), engine=LocalEngine(), clock=clock)
    async with asyncio.TaskGroup() as group, asyncio.timeout(800):
        life = group.create_task(server.run())
        await until(lambda: server.only.report() == "starts (handler)")
        await until(lambda: clock.sleepers > 0)
        await clock.advance(11)
        waiting = [entry for entry in logged if entry["event"] == "server.waiting"]
        assert [entry["waiting_for"] for entry in waiting] == [{"start": "handler"}] * 2
        assert [entry["seconds"] for entry in waiting] == [5, 10]
        go.touch()
        await server.listening()
        server.stop("the test is over")
        await until(lambda: "server.stopping" in {entry["event"] for entry in logged})
        while not life.done():
            await clock.advance(0.1)
            await asyncio.sleep(0.01)
    assert life.result() == EXIT_CLEAN


async def test_a_second_stop_during_the_start_is_told_by_the_exit_code(
    slow: str, tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    server = Server(quick(tmp_path / "out", slow), engine=LocalEngine())
    async with asyncio.TaskGroup() as group, asyncio.timeout(800):
        life = group.create_task(server.run())
        await asyncio.sleep(0)
        server.stop("first")
        server.stop("second")
    assert life.result() == EXIT_FORCED


class Unclosable(LocalEngine):
    """An engine that does not end, or whose end fails."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__()
        self.failure = failure
        self.closing = asyncio.Event()

    async def close(self) -> None:
        self.closing.set()
        if self.failure is not None:
            raise self.failure
        await asyncio.Event().wait()


ROWS = "schema = 'id BIGINT'\ndef process_record(record): ...\n"


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "with_rows.py").write_text(ROWS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "with_rows"


async def test_a_part_that_does_not_end_is_told_and_a_second_stop_ends_the_others_without_it(
    rows: str, tmp_path: Path, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mldserver.pipeline._REPORT_SECONDS", 0.05)
    engine = Unclosable()
    server = Server(quick(tmp_path / "out", rows, server_id="one"), engine=engine)
    async with asyncio.TaskGroup() as group, asyncio.timeout(800):
        life = group.create_task(server.run())
        await server.listening()
        server.stop("first")
        await engine.closing.wait()
        await until(lambda: {"end": "engine"} in [entry.get("waiting_for") for entry in logged])
        assert not life.done()
        server.stop("second")
    assert life.result() == EXIT_FORCED
    async with asyncio.TaskGroup() as group, asyncio.timeout(800):
        again = Server(quick(tmp_path / "out", rows, server_id="one"), engine=LocalEngine())
        life = group.create_task(again.run())
        await again.listening()  # it has left the ledger: its name is free
        again.stop("the test is over")
    assert life.result() == EXIT_CLEAN


async def test_a_part_whose_end_fails_does_not_keep_the_others_from_theirs(
    rows: str, tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    failing = Unclosable(InternalError("the engine is stuck"))
    for engine, code in ((failing, EXIT_FAULT), (LocalEngine(), EXIT_CLEAN)):
        server = Server(quick(tmp_path / "out", rows, server_id="one"), engine=engine)
        async with asyncio.TaskGroup() as group, asyncio.timeout(800):
            life = group.create_task(server.run())
            await server.listening()
            server.stop("the test is over")
        assert life.result() == code


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_server_inside_somebodys_thread_lives_and_ends_without_signals(
    tmp_path: Path, run: Callable[[Coroutine[Any, Any, int]], int]
) -> None:
    async def life() -> int:
        server = Server(quick(tmp_path / "out", "handlers.departures"), engine=LocalEngine())
        living = asyncio.create_task(server.run())
        await asyncio.sleep(0)
        server.stop("its owner has enough of it")
        return await living

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run, life()).result(800) == EXIT_CLEAN


@pytest.mark.parametrize(
    ("limits", "raised", "told_of"),
    [
        ((256, 65536), [(1472, 65536)], False),
        ((65536, 65536), [], False),
        ((256, resource.RLIM_INFINITY), [(1472, resource.RLIM_INFINITY)], False),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), [], False),
        ((256, 1024), [(1024, 1024)], True),
    ],
)
async def test_too_few_files_are_raised_or_named_at_the_start(
    limits: tuple[int, int],
    raised: list[tuple[int, int]],
    told_of: bool,
    tmp_path: Path,
    logged: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: done.append(wanted))
    Server(quick(tmp_path / "out", "plain"), engine=LocalEngine())._raise_open_files()
    assert done == raised
    assert ["Raise LimitNOFILE" in each["advice"] for each in logged] == [True] * told_of
