"""A pipeline that is drained, and changed: every record counts once, positions are kept, late rows have their place."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.serving import quick, serving, until
from support.store import SqliteStore

from mldserver.errors import WindowFailed
from mldserver.ledger.contract import LedgerState, WindowState
from mldserver.server import EXIT_CLEAN, EXIT_OPERATOR, Server
from mldserver.testing import FakeMLD, FakeStream, Habits, LocalEngine

HANDLER = """
import threading

from mldserver import tumbling

at_work, let_go = threading.Event(), threading.Event()
let_go.set()

blocking = True
schema = "{column} BIGINT NOT NULL, at TIMESTAMP"
windows = tumbling("{size}", on="at")


def process_record(record):
    event = record.json()
    at_work.set()
    let_go.wait()
    return event["id"], event["at"]
"""
MODULES = itertools.count()


class World:
    """A stream that grows, a handler that is changed, and what came out."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.stream = FakeStream(1)
        self.put_in: list[int] = []
        self.handler = ""
        self.change()

    def change(self, column: str = "id", size: str = "10 seconds") -> None:
        """Write the handler anew, under another name: Python has the old one imported."""
        self.handler = f"drained_{next(MODULES)}"
        (self.folder / f"{self.handler}.py").write_text(HANDLER.format(column=column, size=size))

    def settings(self, **changes: Any) -> Any:
        """Windows close by their rows, or by a drain; by no silence."""
        return quick(self.out, self.handler, **({"pipeline": "p"} | changes))

    def put(self, *seconds: int) -> None:
        """Put a record for each second; its number is how many were put before."""
        for second in seconds:
            told = {"id": len(self.put_in), "at": f"2020-01-15T08:{second // 60:02d}:{second % 60:02d}Z"}
            self.stream.put(json.dumps(told).encode(), "key")
            self.put_in.append(second)

    async def drain(self, engine: LocalEngine | None = None, **changes: Any) -> int:
        async with asyncio.timeout(800):
            return await Server(self.settings(**changes), engine=engine or LocalEngine(), drain=True).run()

    async def start(self, **changes: Any) -> int:
        """Start a server that is expected to be refused."""
        async with asyncio.timeout(800):
            return await Server(self.settings(**changes), engine=LocalEngine()).run()

    @contextlib.asynccontextmanager
    async def reading(self, server: Server) -> AsyncIterator[FakeMLD]:
        """Let a daemon read, which is started again whenever its server ends."""
        daemon = FakeMLD(self.stream, "", habits=Habits(max_records=5), supervised=True, backoff_seconds=0.02)
        daemon.address = await server.listening()
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(daemon.run())
            yield daemon
            playing.cancel()

    def values(self, pattern: str) -> list[int]:
        """The numbers of all rows in files, whatever their column is called."""
        files = sorted(self.out.glob(pattern))
        return sorted(row for file in files for row in pq.ParquetFile(file).read().column(0).to_pylist())

    def windows(self) -> dict[str, list[int]]:
        names = [folder.name for folder in sorted(self.out.glob("window=*"))]
        return {name.removeprefix("window=2020-01-15T"): self.values(f"{name}/*.parquet") for name in names}

    def state(self, pipeline: str = "p") -> LedgerState:
        store = SqliteStore(self.out / "_mldserver" / "ledger.sqlite", pipeline=pipeline, server_id="tool")
        try:
            return store.peek()
        finally:
            store.close()

    def open_windows(self) -> list[str]:
        entries = self.state().windows.values()
        return [each.window_id for each in entries if each.state is not WindowState.PUBLISHED or each.pending]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.syspath_prepend(str(tmp_path))
    return World(tmp_path)


async def fill(world: World, *seconds: int) -> None:
    """Let a server read these records, and stop it."""
    world.put(*seconds)
    async with serving(world.settings()) as server, world.reading(server):
        await until(lambda: server.status().rows_durable == len(seconds))


async def test_a_running_server_drains_and_the_changed_handler_goes_on_where_it_was(world: World) -> None:
    world.put(0, 1, 12, 14)
    server = Server(world.settings(), engine=LocalEngine())
    async with asyncio.timeout(800), asyncio.TaskGroup() as group:
        life = group.create_task(server.run())
        async with world.reading(server) as daemon:
            await until(lambda: server.status().rows_durable == 4)
            assert await world.drain() == EXIT_CLEAN
            assert await life == EXIT_CLEAN
            assert world.windows() == {"08-00-00Z": [0, 1], "08-00-10Z": [2, 3]}
            assert world.open_windows() == []
            world.change(column="number", size="15 seconds")
            # Behind what is published, in what began beside it, and after both.
            world.put(13, 25, 31, 47)
            async with serving(world.settings()) as changed:
                daemon.address = await changed.listening()
                await until(lambda: changed.status().rows_durable == 4)
                await until(lambda: len(world.windows()) == 3)
    # Windows of the new size begin at their first border behind the old ones' last end.
    assert world.windows() == {"08-00-00Z": [0, 1], "08-00-10Z": [2, 3], "08-00-30Z": [6]}
    assert world.values("_late/window=*/*.parquet") == [4, 5]
    assert world.open_windows() == ["2020-01-15T08-00-45Z"]


async def test_a_changed_handler_that_starts_without_a_drain_is_refused_and_told_of_it(
    world: World, logged: list[dict[str, Any]]
) -> None:
    await fill(world, 0, 1, 12)
    world.change(column="number")
    assert await world.start() == EXIT_OPERATOR
    (failed,) = (event for event in logged if event["event"] == "server.failed")
    assert "column id BIGINT NOT NULL is gone; column number BIGINT NOT NULL is new" in failed["what"]
    assert "`mldserver drain`" in failed["advice"]
    # Nor can it end windows whose rows it cannot read.
    assert await world.drain() == EXIT_OPERATOR


async def test_all_servers_on_a_ledger_drain(world: World) -> None:
    world.put(0, 12)
    one, other = (Server(world.settings(), engine=LocalEngine()) for _ in range(2))
    async with asyncio.timeout(800), asyncio.TaskGroup() as group:
        lives = [group.create_task(server.run()) for server in (one, other)]
        await other.listening()
        async with world.reading(one):
            await until(lambda: one.status().rows_durable == 2)
            assert await world.drain() == EXIT_CLEAN
        assert [await life for life in lives] == [EXIT_CLEAN, EXIT_CLEAN]
    assert world.windows() == {"08-00-00Z": [0], "08-00-10Z": [1]}
    assert (world.open_windows(), world.state().servers) == ([], {})


async def test_rows_that_a_server_still_works_on_are_in_time_though_another_has_left(world: World) -> None:
    await fill(world, 0, 1)
    world.put(3)
    settings = world.settings(late="separate")
    leaving, busy = (Server(settings, engine=LocalEngine()) for _ in range(2))
    async with asyncio.timeout(800), asyncio.TaskGroup() as group:
        lives = [group.create_task(server.run()) for server in (leaving, busy)]
        await leaving.listening()
        handler = sys.modules[world.handler]
        handler.at_work.clear()
        handler.let_go.clear()
        async with world.reading(busy):
            await until(handler.at_work.is_set)
            drain = group.create_task(world.drain())
            assert await lives[0] == EXIT_CLEAN
            handler.let_go.set()
            assert (await lives[1], await drain) == (EXIT_CLEAN, EXIT_CLEAN)
    assert world.windows() == {"08-00-00Z": [0, 1, 2]}
    assert not (world.out / "_late").exists()


async def test_two_drains_at_once_both_end_when_everything_is_published(
    world: World, logged: list[dict[str, Any]]
) -> None:
    """Under names of their own, though they have a server's settings."""
    await fill(world, 0, 1)

    async def drain() -> int:
        code = await world.drain(server_id="one")
        # Of the two only one publishes it, and may still tell so when the other has seen it and ended.
        assert world.windows() == {"08-00-00Z": [0, 1, 2]}
        return code

    server = Server(world.settings(server_id="one"), engine=LocalEngine())
    async with asyncio.timeout(800), asyncio.TaskGroup() as group:
        life = group.create_task(server.run())
        await server.listening()
        world.put(3)
        handler = sys.modules[world.handler]
        handler.at_work.clear()
        handler.let_go.clear()
        async with world.reading(server):
            await until(handler.at_work.is_set)
            drains = [group.create_task(drain()) for _ in range(2)]
            await until(lambda: len(world.state().servers) == 3)
            handler.let_go.set()
            assert [await each for each in (life, *drains)] == [EXIT_CLEAN] * 3
    assert (world.open_windows(), world.state().servers) == ([], {})
    told = sorted(each["event"] for each in logged if each["event"] in {"window.done", "pipeline.drained"})
    assert told == ["pipeline.drained", "pipeline.drained", "window.done"]


async def test_where_no_server_runs_the_drain_ends_what_they_left(world: World) -> None:
    await fill(world, 0, 12)
    assert world.open_windows() != []
    assert await world.drain() == EXIT_CLEAN
    assert world.windows() == {"08-00-00Z": [0], "08-00-10Z": [1]}
    # Once more there is nothing to do, and no Spark is started for it.
    engine = LocalEngine(start_seconds=3600)
    assert await world.drain(engine) == EXIT_CLEAN


async def test_a_drain_waits_for_a_window_that_fails_and_names_those_that_were_set_aside(
    world: World, logged: list[dict[str, Any]]
) -> None:
    await fill(world, 0, 12)
    settings = world.settings(window_attempts=1, window_on_failure="dead_letter")

    def fail(job: Any) -> Exception | None:
        return WindowFailed("it cannot") if job.window.id.endswith("08-00-10Z") else None

    async with asyncio.timeout(800):
        assert await Server(settings, engine=LocalEngine(fail=fail), drain=True).run() == EXIT_CLEAN
    (drained,) = (event for event in logged if event["event"] == "pipeline.drained")
    assert drained["set_aside"] == ["2020-01-15T08-00-10Z"]
    world.change(column="number")
    assert await world.start() == EXIT_OPERATOR
    failed = [event for event in logged if event["event"] == "server.failed"]
    assert "mldserver windows retry 2020-01-15T08-00-10Z" in failed[-1]["advice"]


async def test_without_a_change_late_rows_still_make_the_next_revision_after_a_drain(world: World) -> None:
    await fill(world, 0, 12)
    assert await world.drain() == EXIT_CLEAN
    world.put(13)
    async with asyncio.timeout(800), serving(world.settings()) as server, world.reading(server):
        await until(lambda: world.windows().get("08-00-10Z") == [1, 2])
    assert not (world.out / "_late").exists()
    # It serves again: the drain is over.
    assert not world.state().draining


async def test_rows_that_come_for_windows_of_the_old_schema_go_to_the_late_dataset(world: World) -> None:
    await fill(world, 0, 12)
    assert await world.drain() == EXIT_CLEAN
    world.change(column="number")
    world.put(13, 31)
    async with asyncio.timeout(800), serving(world.settings()) as server, world.reading(server):
        await until(lambda: world.values("_late/window=*/*.parquet") == [2])
    assert world.windows() == {"08-00-00Z": [0], "08-00-10Z": [1]}
    assert world.open_windows() == ["2020-01-15T08-00-30Z"]


async def test_a_drained_pipeline_gets_another_name_and_goes_on_at_its_positions(world: World) -> None:
    await fill(world, 0, 12)
    assert await world.start(pipeline="q") == EXIT_OPERATOR
    # Its windows are the old name's, also in tables that they were published into.
    assert await world.start(pipeline="q", rename_from="p") == EXIT_OPERATOR
    assert await world.drain() == EXIT_CLEAN
    world.put(13, 31)
    settings = world.settings(pipeline="q", rename_from="p")
    async with asyncio.timeout(800), serving(settings) as server, world.reading(server):
        await until(lambda: server.status().rows_durable == 2)
        await until(lambda: world.values("_late/window=*/*.parquet") == [2])
    assert world.windows() == {"08-00-00Z": [0], "08-00-10Z": [1]}
    assert len(world.state("q").shards) == 1
    assert await world.start() == EXIT_OPERATOR
