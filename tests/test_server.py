"""A whole server over real sockets, against the fake daemon. tests/testing/test_simulation.py plays splits and faults to it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from support.serving import connect, no_aws, quick, serving, until
from support.store import SqliteStore

from mldserver.assembly import exposed
from mldserver.base.disk import others_can_read
from mldserver.config.kinds import TcpAddress, UnixAddress
from mldserver.config.resolve import ledger_file, resolve
from mldserver.errors import WindowFailed
from mldserver.server import EXIT_FAULT, EXIT_FORCED, EXIT_OPERATOR, Server
from mldserver.testing import FakeMLD, FakeStream, Habits, LocalEngine

HANDLER = '''
"""One row for each record; ten-second windows over the record's own time."""
from mldserver import tumbling

schema = "id BIGINT NOT NULL, at TIMESTAMP"
windows = tumbling("10 seconds", on="at", lateness="1 minute")


def process_record(record):
    event = record.json()
    if event.get("poison"):
        raise ValueError("poison")
    return event["id"], event["at"]
'''
START_MS = 1_800_000_000_000


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "ids_by_time.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "ids_by_time"


def event(number: int, **more: Any) -> bytes:
    second = number // 10
    at = f"2027-01-15T08:{second // 60 % 60:02d}:{second % 60:02d}Z"
    return json.dumps({"id": number, "at": at, **more}).encode()


def filled(shards: int, records: int, *, seed: int = 0) -> FakeStream:
    stream = FakeStream(shards, seed=seed, start_ms=START_MS)
    for number in range(records):
        stream.put(event(number), f"key-{number}")
    stream.end()
    return stream


def ids(folder: Path) -> list[int]:
    # Not the folder itself: Arrow would list the server's private files too, which come and go meanwhile.
    while True:
        if not (files := [str(path) for path in folder.glob("window=*/*.parquet")]):
            return []
        try:
            found: list[int] = ds.dataset(files, format="parquet").to_table(columns=["id"])["id"].to_pylist()
        except FileNotFoundError:  # a revision took a file's place: a reader lists again
            continue
        return found


def exactly_once(out: Path, records: int) -> None:
    told = Counter(ids(out)) + Counter(ids(out / "_late"))
    assert told == Counter(range(records))


async def play(server: Server, daemon_of: Callable[[str], FakeMLD]) -> FakeMLD:
    daemon = daemon_of(await server.listening())
    async with asyncio.timeout(800):
        await daemon.run()
    assert daemon.violations == []
    return daemon


def beside_ends(daemon: FakeMLD) -> list[str]:
    """Return the server's mistakes but its ends, each of which ends the daemon too; here they are meant."""
    return [told for told in daemon.violations if "EOF" not in told and "reset" not in told]


async def test_a_server_that_was_stopped_in_the_middle_goes_on_where_it_was(
    tmp_path: Path, handler: str
) -> None:
    stream = filled(3, 900, seed=5)
    settings = quick(tmp_path / "out", handler)
    daemon = FakeMLD(stream, "", habits=Habits(seed=5, max_records=30), supervised=True, backoff_seconds=0.02)
    async with asyncio.TaskGroup() as group:
        async with serving(settings, stream=stream) as first:
            daemon.address = await first.listening()
            playing = group.create_task(daemon.run())
            async with asyncio.timeout(800):
                await until(lambda: daemon.records_sent >= 300)
        async with serving(settings, stream=stream) as second:
            daemon.address = await second.listening()
            async with asyncio.timeout(800):
                await playing
                await second.finished()
    assert beside_ends(daemon) == []
    exactly_once(tmp_path / "out", 900)


async def test_a_record_that_keeps_failing_becomes_a_dead_letter_and_the_rest_goes_on(
    tmp_path: Path, handler: str
) -> None:
    stream = FakeStream(1, start_ms=START_MS)
    for number in range(50):
        stream.put(event(number, poison=number == 7), "key")
    stream.end()
    async with serving(quick(tmp_path / "out", handler)) as server:
        await play(server, lambda address: FakeMLD(stream, address))
        async with asyncio.timeout(800):
            await server.finished()
        assert server.status().dead_letters == 1
    assert sorted(ids(tmp_path / "out")) == [number for number in range(50) if number != 7]


async def test_a_window_that_keeps_failing_turns_readiness_red_and_rows_go_on_being_stored(
    tmp_path: Path, handler: str, logged: list[dict[str, Any]]
) -> None:
    broken = True

    def fail(_job: object) -> Exception | None:
        return WindowFailed("the disk is full") if broken else None

    stream = filled(2, 200)
    settings = quick(tmp_path / "out", handler, window_attempts=2)
    async with serving(settings, engine=LocalEngine(fail=fail), stream=stream) as server:
        await server.ready()
        await play(server, lambda address: FakeMLD(stream, address))
        async with asyncio.timeout(800):
            await until(lambda: not server.is_ready)
            assert server.status().rows_durable == 200
            broken = False
            await server.finished()
            await server.ready()
    exactly_once(tmp_path / "out", 200)
    events = [entry["event"] for entry in logged]
    assert "window.halted" in events
    assert events.index("server.ready") < events.index("server.unready")


async def test_silence_without_an_end_still_closes_the_last_windows(tmp_path: Path, handler: str) -> None:
    stream = FakeStream(2, start_ms=START_MS)
    for number in range(100):
        stream.put(event(number), f"key-{number}")
    settings = quick(tmp_path / "out", handler, idle_time=0.2, quiet_time=0.4)
    async with serving(settings, stream=stream) as server:
        daemon = FakeMLD(stream, await server.listening(), stop_at_end=False)
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(daemon.run())
            async with asyncio.timeout(800):
                # On a slow machine also what is not over looks silent, and its rows come late.
                await until(lambda: len(ids(tmp_path / "out")) == 100)
                await until(lambda: server.status().windows_published >= 1)
            daemon.terminate()
            await playing
    exactly_once(tmp_path / "out", 100)


async def stopped(settings: Any) -> int:
    async with asyncio.timeout(800):
        return await Server(settings, engine=LocalEngine()).run()


async def test_what_only_a_person_can_mend_is_said_in_one_event_and_exits_2(
    tmp_path: Path, handler: str, logged: list[dict[str, Any]]
) -> None:
    out = tmp_path / "out"
    assert await stopped(quick(out, "no_such_module")) == EXIT_OPERATOR
    assert await stopped(quick(out, f"{handler}:NoSuchName")) == EXIT_OPERATOR
    async with serving(quick(out, handler)):
        pass
    assert await stopped(quick(out, handler, pipeline="another")) == EXIT_OPERATOR
    (tmp_path / "file").write_text("no folder")
    assert await stopped(quick(tmp_path / "file", handler)) == EXIT_OPERATOR
    nameless = UnixAddress(tmp_path / ("long" * 100))
    assert await stopped(quick(tmp_path / "other", handler, listen=nameless)) == EXIT_OPERATOR
    told = [entry for entry in logged if entry["event"] == "server.failed"]
    assert [entry["exit_code"] for entry in told] == [EXIT_OPERATOR] * 5
    assert all(entry["what"] and "exception" not in entry for entry in told)


async def test_what_may_yet_come_by_itself_is_said_in_one_event_and_exits_1_for_another_start(
    tmp_path: Path, handler: str, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    async with serving(quick(out, handler, server_id="one")) as server:
        host, _, port = (await server.listening()).rpartition(":")
        assert await stopped(quick(out, handler, server_id="one")) == EXIT_FAULT
        taken = TcpAddress(host, int(port))
        assert await stopped(quick(tmp_path / "other", handler, listen=taken)) == EXIT_FAULT
    unmade = UnixAddress(tmp_path / "not mounted" / "socket")
    assert await stopped(quick(tmp_path / "other", handler, listen=unmade)) == EXIT_FAULT

    async def unreachable(*_: object) -> None:
        raise OSError(errno.EHOSTDOWN, "Host is down")

    monkeypatch.setattr("mldserver.coordinator.coordinator.Coordinator.start", unreachable)
    assert await stopped(quick(out, handler)) == EXIT_FAULT
    told = [entry for entry in logged if entry["event"] == "server.failed"]
    assert [entry["exit_code"] for entry in told] == [EXIT_FAULT] * 4
    assert all(entry["what"] and "exception" not in entry for entry in told)


async def test_a_ledger_that_another_program_holds_exits_1(
    tmp_path: Path, handler: str, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = quick(tmp_path / "out", handler)
    async with serving(settings):
        pass
    monkeypatch.setattr("mldserver.ledger.sqlite_file.BUSY_TIMEOUT_MS", 1)
    with contextlib.closing(sqlite3.connect(ledger_file(settings), isolation_level=None)) as held:
        held.execute("BEGIN EXCLUSIVE")
        assert await stopped(settings) == EXIT_FAULT
    (failed,) = [entry for entry in logged if entry["event"] == "server.failed"]
    assert "holds the ledger's write lock" in failed["what"]


async def test_a_named_stream_without_region_or_credentials_exits_2_before_anything_is_started(
    tmp_path: Path, handler: str, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_aws(monkeypatch, tmp_path)
    assert await stopped(quick(tmp_path / "out", handler, stream="orders")) == EXIT_OPERATOR
    given = quick(tmp_path / "out", handler, stream="orders", region="eu-central-1")
    assert await stopped(given) == EXIT_OPERATOR
    told = [entry["what"] for entry in logged if entry["event"] == "server.failed"]
    assert told == [
        "The stream orders is named, but no AWS region was given.",
        "The stream orders is named, but there are no AWS credentials.",
    ]
    assert not (tmp_path / "out").exists()


def newer_format(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE meta SET format = format + 1")


def one_page_overwritten(path: Path) -> None:
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[16:18], "big")
    data[2 * size : 3 * size] = b"\xa5" * size
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "said"),
    [(newer_format, "The ledger has format"), (one_page_overwritten, "The ledger is damaged")],
)
async def test_a_ledger_that_cannot_be_used_is_said_in_one_sentence_and_left_as_it_is(
    harm: Callable[[Path], None], said: str, tmp_path: Path, handler: str, logged: list[dict[str, Any]]
) -> None:
    settings = quick(tmp_path / "out", handler)
    async with serving(settings):
        pass
    path = ledger_file(settings)
    harm(path)
    before = path.read_bytes()
    assert await stopped(settings) == EXIT_OPERATOR
    (failed,) = [entry for entry in logged if entry["event"] == "server.failed"]
    assert failed["what"].startswith(said)
    assert "\n" not in failed["what"]
    assert failed["advice"]
    assert path.read_bytes() == before


async def test_a_second_stop_forces_and_the_exit_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    called = tmp_path / "called"
    (tmp_path / "stuck.py").write_text(
        "import asyncio, pathlib\nschema = 'id BIGINT'\n"
        "async def process_record(record):\n"
        f"    pathlib.Path({str(called)!r}).touch()\n    await asyncio.sleep(3600)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    server = Server(quick(tmp_path / "out", "stuck", handler_timeout=3600.0), engine=LocalEngine())
    async with asyncio.TaskGroup() as group, asyncio.timeout(800):
        life = group.create_task(server.run())
        reader, writer = await connect(await server.listening())
        writer.write(
            b'{"action":"initialize","shardId":"s","sequenceNumber":"TRIM_HORIZON","subSequenceNumber":0}\n'
        )
        await reader.readline()
        record = b'{"data":"","partitionKey":"k","sequenceNumber":"1","approximateArrivalTimestamp":1}'
        writer.write(b'{"action":"processRecords","records":[' + record + b'],"millisBehindLatest":0}\n')
        await writer.drain()
        await until(called.exists)
        server.stop("first")
        await asyncio.sleep(0.4)  # longer than between two looks at readiness
        assert not life.done(), "the shard's request is still waited for"
        server.stop("second")
        await life
        writer.close()
    assert life.result() == EXIT_FORCED
    assert not server.is_ready
    assert "server.unready" not in {entry["event"] for entry in logged}, "an orderly stop alarms nobody"


@pytest.fixture
def public(handler: str) -> Iterator[Path]:
    """A folder that every user of the host can read, under the usual umask."""
    before = os.umask(0o022)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
    os.umask(before)


async def test_other_users_read_published_windows_and_nothing_else_of_the_folder(
    public: Path, handler: str, logged: list[dict[str, Any]]
) -> None:
    out, stream = public / "out", FakeStream(1, start_ms=START_MS)
    for number in range(60):
        stream.put(event(number, poison=True) if number == 7 else event(number), "key")
    stream.end()
    given = quick(out, handler, dead_letters="jsonl", log_file=None)
    async with serving(given, stream=stream) as server:
        await play(server, lambda address: FakeMLD(stream, address))
        async with asyncio.timeout(800):
            await server.finished()
    readable = {path.relative_to(out) for path in out.rglob("*") if others_can_read(path)}
    assert {path.parts[0].partition("=")[0] for path in readable} == {"window"}
    assert {path.suffix for path in readable} == {"", ".parquet"}
    assert list((out / "_dead_letters").rglob("*.jsonl"))
    ledger = out / "_mldserver" / "ledger.sqlite"
    assert {file.stat().st_mode & 0o777 for file in ledger.parent.glob("ledger.sqlite*")} == {0o600}
    assert not [entry for entry in logged if entry["event"] == "file.exposed"]
    # An operator who opens it to others, executors under another user, say, keeps what was chosen, and is told of it.
    ledger.parent.chmod(0o755)
    async with serving(given, stream=stream) as server:
        await server.listening()
    assert ledger.parent.stat().st_mode & 0o777 == 0o755
    (told,) = (entry for entry in logged if entry["event"] == "file.exposed")
    assert told["advice"] == f"Run `chmod o= {ledger.parent}`."


def test_a_settings_file_with_passwords_that_others_can_read_is_told(public: Path) -> None:
    file = public / "mldserver.toml"
    file.write_text(
        "handler = 'h'\nsink = 'jdbc:postgresql://h/d'\nsink_table = 't'\nsink_options = { password = 'x' }\n"
    )

    def told(**environ: str) -> dict[Path, str]:
        return exposed(resolve({}, environ=environ, folder=public))

    assert told() == {file: "passwords"}
    file.chmod(0o640)
    assert told() == {}
    file.write_text("handler = 'h'\nsink = 'jdbc:postgresql://h/d'\nsink_table = 't'\n")
    file.chmod(0o644)
    assert told(MLDSERVER_SINK_OPTIONS="password=x") == {}
    kept = public / "kept" / "ledger.sqlite"
    kept.parent.mkdir()
    kept.touch()
    assert told(MLDSERVER_LEDGER=f"sqlite:{kept}") == {kept: "the ledger, with dead letters"}
    kept.parent.chmod(0o700)
    assert told(MLDSERVER_LEDGER=f"sqlite:{kept}") == {}


async def test_a_server_that_was_taken_for_dead_exits_with_a_fault_and_its_daemon_with_it(
    tmp_path: Path, handler: str, logged: list[dict[str, Any]]
) -> None:
    out = tmp_path / "out"
    server = Server(quick(out, handler, server_id="one"), engine=LocalEngine())
    async with asyncio.TaskGroup() as group, asyncio.timeout(800):
        life = group.create_task(server.run())
        await server.listening()
        store = SqliteStore(out / "_mldserver" / "ledger.sqlite", pipeline=handler, server_id="two")
        seen = store.open(now_ms=0).servers["one"]
        assert store.expire_servers({"one": seen.beat_ms}) == {"one"}
        store.close()
    assert life.result() == EXIT_FAULT
    failed = next(entry for entry in logged if entry["event"] == "server.failed")
    assert (failed["error"], failed["exit_code"]) == ("ServerExpired", EXIT_FAULT)
    assert "exception" not in failed
