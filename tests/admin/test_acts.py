"""Steering a running server: what its daemons notice of it, and what becomes of the rows."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
import structlog
from support.serving import quick, serving, until
from workers.kit import named

from mldserver.observe.logging import Logger, set_level
from mldserver.testing import FakeMLD, FakeStream, Habits

RECORDS = 300
HANDLER = '''
"""A row for each record."""
from mldserver import batches

schema = "id BIGINT NOT NULL"
windows = batches(max_rows=1000, max_age="1 hour")


def process_record(record):
    return (record.json()["id"],)
'''


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text(HANDLER)
    return "plain"


def stream(records: int = RECORDS) -> FakeStream:
    made = FakeStream(2, seed=1, start_ms=1_800_000_000_000)
    for number in range(records):
        made.put(json.dumps({"id": number}).encode(), f"key-{number}")
    made.end()
    return made


def ids(out: Path) -> Counter[int]:
    files = [str(path) for path in out.glob("window=*/*.parquet")]
    return Counter(ds.dataset(files, format="parquet").to_table()["id"].to_pylist() if files else [])


@pytest.mark.usefixtures("no_standby")
@pytest.mark.parametrize("workers", [None, 1])
async def test_under_load_a_pause_stops_the_daemons_and_drops_nothing(
    tmp_path: Path, handler: str, logged: list[dict[str, Any]], workers: int | None
) -> None:
    settings, many = quick(tmp_path / "out", handler, workers=workers), 10 * RECORDS
    async with serving(settings) as server, asyncio.timeout(800):
        daemon = FakeMLD(stream(many), await server.listening(), habits=Habits(max_records=3))
        playing = asyncio.create_task(daemon.run())
        await until(lambda: daemon.records_sent > many / 10)
        done, text = await server.carry_out("pause", "")
        assert (done, text.endswith("Leases stay, and no window closes past a shard that waits.")) == (
            True,
            True,
        )
        assert (await server.carry_out("drain-shard", daemon.active_shards[0]))[0]
        first = server.only.pipeline.parts.coordinator.shards.sessions.live(daemon.active_shards[0])  # type: ignore[union-attr]
        assert first is not None
        assert first.position.due() is None
        assert first.position.checkpointed == first.position.accepted, "nothing would be delivered again"
        assert (await server.carry_out("flush", ""))[0]
        sent = daemon.records_sent
        assert (await server.carry_out("flush", ""))[0]
        assert daemon.records_sent == sent < many
        assert (await server.carry_out("resume", ""))[0]
        await playing
        await server.finished()
    assert (daemon.violations, daemon.life, daemon.finished) == ([], 1, True)
    assert ids(tmp_path / "out") == Counter(range(many))
    assert named(logged, "connection.failed") == []


@pytest.fixture
def level(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The level is this process's, and is put back; no observer that a test before has left lets more pass."""
    monkeypatch.setattr(Logger, "observed", False)
    before = Logger.level
    yield before
    set_level(before)


async def test_the_log_level_changes_for_loggers_that_are_bound_already(level: int) -> None:
    lines: list[str] = []

    def keep(_logger: Any, _method: str, event: dict[str, Any]) -> Any:
        # Whatever an earlier test has left behind may log too.
        if event.get("connection") == "1":
            lines.append(event["event"])
        raise structlog.DropEvent

    structlog.configure(processors=[keep], wrapper_class=Logger, cache_logger_on_first_use=False)
    bound = structlog.get_logger("mldserver").bind(connection="1")
    for number in (logging.INFO, logging.DEBUG, logging.ERROR):
        set_level(number)
        bound.debug(f"debug at {number}")
        bound.warning(f"warning at {number}")
    assert lines == ["warning at 20", "debug at 10", "warning at 10"]
    set_level(level)


@pytest.mark.usefixtures("no_standby")
async def test_workers_log_from_the_new_level_on_and_so_do_connections_that_are_open(
    tmp_path: Path, handler: str, logged: list[dict[str, Any]], level: int
) -> None:
    text = HANDLER.replace("return (", 'log.debug("library.log", logger="mine", text="seen")\n    return (')
    (tmp_path / "plain.py").write_text(
        text.replace("from mld", "import structlog\nfrom mld").replace(
            "schema =", "log = structlog.get_logger()\nschema ="
        )
    )
    settings, many = quick(tmp_path / "out", handler, workers=1), 10 * RECORDS
    async with serving(settings) as server, asyncio.timeout(800):
        daemon = FakeMLD(stream(many), await server.listening(), habits=Habits(max_records=3))
        await server.carry_out("log-level", "warning")
        playing = asyncio.create_task(daemon.run())
        await until(lambda: daemon.records_sent > many / 10)
        await server.carry_out("pause", "")
        assert (await server.carry_out("flush", ""))[0]
        assert named(logged, "library.log") == []
        done, said = await server.carry_out("log-level", "debug")
        assert (done, said) == (
            True,
            "What is at debug or above is logged from now on (before: warning).",
        )
        assert (await server.carry_out("resume", ""))[0]
        await playing
    assert 0 < len(named(logged, "library.log")) < many


RELOADED = '''
"""{note}"""
from mldserver import batches

class Handler:
    schema = "id BIGINT NOT NULL, version BIGINT"
    windows = batches(max_rows=1000, max_age="1 hour")
    version = {version}

    def process_record(self, record):
        return record.json()["id"], {version}
'''


@pytest.mark.timeout(1800)
async def test_reloads_under_load_lose_double_and_reorder_no_row_and_drop_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]], *, long: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    reloads = 51 if long else 2  # one of them is refused
    numbers = itertools.count()

    def write(version: int, harm: str = "") -> None:
        (tmp_path / "mine.py").write_text(RELOADED.format(note="." * version, version=version) + harm)

    write(1)
    given = FakeStream(4, seed=1, start_ms=1_800_000_000_000)

    def put() -> None:
        for number in itertools.islice(numbers, 40):
            given.put(json.dumps({"id": number}).encode(), f"key-{number}")

    async def load() -> None:
        """Let there be some records, but not too many, that are not delivered yet."""
        while True:
            put()
            await until(lambda: daemon.records_sent > given.records - 40)

    async with serving(quick(tmp_path / "out", "mine:Handler", workers=2)) as server, asyncio.timeout(1700):
        daemon = FakeMLD(given, await server.listening(), habits=Habits(max_records=4))
        put()
        playing, loading = asyncio.create_task(daemon.run()), asyncio.create_task(load())
        for number in range(1, reloads + 1):
            write(number + 1, "(" if number == 2 else "")
            done, text = await server.carry_out("reload", "")
            assert done is (number != 2), text
            assert ("Nothing has changed: the old version goes on." in text) is (number == 2)
            sent = daemon.records_sent
            await until(lambda sent=sent: daemon.records_sent > sent + 100)  # type: ignore[misc]  # mypy does not infer it
        loading.cancel()
        given.end()
        await playing
        await server.finished()
    assert (daemon.violations, daemon.life, daemon.finished) == ([], 1, True)
    assert named(logged, "connection.failed", "worker.lost", "handler.dead_letter", "shard.taken_over") == []
    assert ids(tmp_path / "out") == Counter(range(given.records))
    files = sorted(str(path) for path in (tmp_path / "out").glob("window=*/*.parquet"))
    rows = ds.dataset(files, format="parquet").to_table().sort_by("_clock").to_pylist()
    versions: dict[str, list[int]] = {}
    order: dict[str, list[int]] = {}
    for row in rows:
        versions.setdefault(row["_shard"], []).append(row["version"])
        order.setdefault(row["_shard"], []).append(int(row["_sequence"]))
    assert all(numbers == sorted(numbers) for numbers in order.values())
    assert all(numbers == sorted(numbers) for numbers in versions.values()), "no version comes back"
    ran = {version for numbers in versions.values() for version in numbers}
    assert ran == set(range(1, reloads + 2)) - {3}, "each that loads has worked, and no other"


async def test_where_the_handler_runs_in_the_server_itself_a_reload_is_refused(
    tmp_path: Path, handler: str
) -> None:
    async with serving(quick(tmp_path / "out", handler)) as server:
        done, text = await server.carry_out("reload", "")
    assert not done
    assert text.startswith("The handler runs in the server's own process")
