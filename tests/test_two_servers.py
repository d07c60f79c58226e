"""Two whole servers on one ledger, over real sockets: wherever leases go and whoever dies, each row comes out once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from support.serving import quick, serving, until
from support.store import SqliteStore
from support.workers import NAMES, Application

from mldserver.server import EXIT_FAULT, Server
from mldserver.testing import FakeStream, Habits, LocalEngine

HANDLER = '''
"""One row for each record; ten-second windows over the record's own time."""
from mldserver import tumbling

schema = "id BIGINT NOT NULL, at TIMESTAMP"
windows = tumbling("10 seconds", on="at", lateness="1 minute")


def process_record(record):
    event = record.json()
    return event["id"], event["at"]
'''


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "ids_by_second.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "ids_by_second"


def filled(records: int, *, seed: int) -> FakeStream:
    stream = FakeStream(4, seed=seed, start_ms=1_800_000_000_000)
    for number in range(records):
        if number == records // 3:
            stream.split(stream.open_shards[0])
        if number == 2 * records // 3:
            stream.merge(*stream.adjacent_pairs()[0])
        at = f"2027-01-15T08:{number // 600 % 60:02d}:{number // 10 % 60:02d}Z"
        stream.put(json.dumps({"id": number, "at": at}).encode(), f"key-{number}")
    stream.end()
    return stream


def ids(folder: Path) -> list[int]:
    while True:
        if not (files := [str(path) for path in folder.glob("window=*/*.parquet")]):
            return []
        try:
            found: list[int] = ds.dataset(files, format="parquet").to_table(columns=["id"])["id"].to_pylist()
        except FileNotFoundError:  # a revision took a file's place: a reader lists again
            continue
        return found


def exactly_once(out: Path, records: int) -> None:
    assert Counter(ids(out)) + Counter(ids(out / "_late")) == Counter(range(records))


@contextlib.asynccontextmanager
async def playing(application: Application) -> AsyncIterator[list[asyncio.Task[int]]]:
    async with asyncio.TaskGroup() as group:
        yield [group.create_task(daemon.run()) for daemon in application.daemons.values()]


@pytest.mark.parametrize("seed", range(3))
async def test_leases_that_move_between_servers_neither_lose_nor_double_a_row(
    seed: int, tmp_path: Path, handler: str
) -> None:
    records, out = 1500, tmp_path / "out"
    application = Application(filled(records, seed=seed), seed=seed, habits=Habits(seed=seed, max_records=20))
    settings = quick(out, handler)
    stream = application.stream
    async with serving(settings, stream=stream) as one, serving(settings, stream=stream) as two:
        for daemon, server in zip(application.daemons.values(), (one, two), strict=True):
            daemon.address = await server.listening()
        async with asyncio.timeout(800), playing(application) as daemons:
            while not all(daemon.done() for daemon in daemons):
                application.move_any()
                if application.random.random() < 0.02:
                    application.daemons[application.random.choice(NAMES)].kill()
                await asyncio.sleep(0.02)
        async with asyncio.timeout(800):
            await one.finished()
            await two.finished()
            await until(lambda: windows_waiting(out) == [])
        assert one.status().rows_accepted
        assert two.status().rows_accepted
    assert application.moves > 10
    assert application.violations() == []
    exactly_once(out, records)


def windows_waiting(out: Path) -> list[str]:
    """Return the windows that are not published, or have late rows that wait."""
    store = SqliteStore(out / "_mldserver" / "ledger.sqlite", pipeline="ids_by_second", server_id="tool")
    store.peek()
    try:
        entries = store.peek().windows.values()
        return [each.window_id for each in entries if each.state != "published" or each.pending]
    finally:
        store.close()


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
        assert store.bury({"one": seen.beat_ms}) == {"one"}
        store.close()
    assert life.result() == EXIT_FAULT
    failed = next(entry for entry in logged if entry["event"] == "server.failed")
    assert (failed["error"], failed["exit_code"]) == ("ServerBuried", EXIT_FAULT)
    assert "exception" not in failed
