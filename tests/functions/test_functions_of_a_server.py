"""Several functions in one server: each has its own folder, ledger, listener and life."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.serving import quick, until
from support.store import SqliteStore

from mldserver.config.kinds import TcpAddress
from mldserver.config.settings import Settings
from mldserver.errors import EXIT_CLEAN
from mldserver.function import Function
from mldserver.output.layout import LEDGER
from mldserver.server import Server
from mldserver.testing import FakeMLD, FakeStream, LocalEngine

ROWS = """
from mldserver import tumbling

schema = "id BIGINT NOT NULL, at TIMESTAMP"
windows = tumbling("10 seconds", on="at", lateness="1 minute")


def process_record(record):
    event = record.json()
    return event["id"], event["at"]
"""
NO_ROWS = "def process_record(record): ...\n"
RECORDS = 40


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Settings, Settings]:
    """Settings of the functions ``counts``, whose handler gives no rows, and ``rows``."""
    (tmp_path / "rows.py").write_text(ROWS)
    (tmp_path / "counts.py").write_text(NO_ROWS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return quick(tmp_path / "out" / "counts", "counts"), quick(tmp_path / "out" / "rows", "rows")


def stream() -> FakeStream:
    filled = FakeStream(1, seed=1)
    for number in range(RECORDS):
        event = {"id": number, "at": f"2027-01-15T08:00:{number:02d}Z"}
        filled.put(json.dumps(event).encode(), f"key-{number}")
    filled.end()
    return filled


@contextlib.asynccontextmanager
async def hosting(*functions: Settings) -> AsyncIterator[Server]:
    """Run a server with these functions, which must stop cleanly at the end of the block."""
    server = Server(functions, engine=LocalEngine(), seed=1)
    async with asyncio.TaskGroup() as group, asyncio.timeout(60):
        life = group.create_task(server.run())
        yield server
        server.stop("the test is over")
    assert life.result() == EXIT_CLEAN


async def address_of(function: Function) -> str:
    return await (await function.pipeline.assembled()).source.listening()


async def deliver(function: Function) -> None:
    """Deliver a whole stream to a function, and wait for the checkpoint of its end."""
    daemon = FakeMLD(stream(), await address_of(function))
    await daemon.run()
    assert daemon.violations == []


def reasons(server: Server) -> tuple[str, ...]:
    return server.document().reasons


def told(logged: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in logged if event["event"] == name]


async def test_functions_have_their_own_folders_ledgers_and_listeners(
    both: tuple[Settings, Settings], logged: list[dict[str, Any]]
) -> None:
    async with hosting(*both) as server:
        async with asyncio.TaskGroup() as group:
            for function in server.functions.values():
                group.create_task(deliver(function))
        await server.finished()
    for settings in both:
        assert isinstance(settings.out, Path)
        store = SqliteStore(settings.out / LEDGER, pipeline=settings.pipeline, server_id="tool")
        (shard,) = store.peek().shards.values()
        store.close()
        assert shard.ended
    assert len(list((both[1].out).glob("window=*"))) == 4  # type: ignore[union-attr]  # a local folder
    assert {event["pipeline"] for event in told(logged, "server.listening")} == {"counts", "rows"}


async def test_a_function_that_cannot_start_is_failed_and_the_others_go_on(
    both: tuple[Settings, Settings], tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    (tmp_path / "broken.py").write_text("def process_record(record):\n")
    async with hosting(quick(tmp_path / "out" / "broken", "broken"), *both) as server:
        await deliver(server.functions["rows"])
        await server.functions["rows"].pipeline.finished()
        await until(lambda: server.functions["counts"].is_ready)
        status = server.document()
        assert status.functions["broken"].lifecycle == "failed"
        assert "broken.py" in status.functions["broken"].reasons[0]
        assert [reason.partition(":")[0] for reason in status.reasons] == ["broken"]
        assert not server.is_ready
        done, text = await server.carry_out("flush", "", "broken")
        assert (done, text) == (
            False,
            "The function broken is starting or stopping and cannot be steered now.",
        )
        assert (await server.carry_out("flush", "", "rows"))[0]
    (failed,) = told(logged, "function.failed")
    assert (failed["pipeline"], failed["lasting"]) == ("broken", True)


async def test_the_status_shows_a_pause_of_one_function_until_it_is_resumed(
    both: tuple[Settings, Settings],
) -> None:
    def lives() -> tuple[str, str]:
        functions = server.document().functions
        return functions["counts"].lifecycle, functions["rows"].lifecycle

    async with hosting(*both) as server:
        await until(lambda: lives() == ("deployed", "deployed"))
        assert (await server.carry_out("pause", "", "rows"))[0]
        assert lives() == ("deployed", "paused")
        assert (await server.carry_out("resume", "", "rows"))[0]
        assert lives() == ("deployed", "deployed")


async def test_a_function_is_tried_again_after_an_error_that_may_pass(
    both: tuple[Settings, Settings], logged: list[dict[str, Any]]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = TcpAddress("127.0.0.1", taken.getsockname()[1])
        running = hosting(replace(both[0], listen=address), both[1])
        server = await running.__aenter__()
        await until(lambda: bool(told(logged, "function.failed")))
        await until(lambda: server.functions["rows"].is_ready)
        assert str(address.port) in reasons(server)[0]
        assert server.functions["counts"].parts is None, "those of the run that failed are closed"
    await until(lambda: server.functions["counts"].is_ready)
    assert reasons(server) == ()
    assert server.is_ready
    await deliver(server.functions["counts"])
    await running.__aexit__(None, None, None)
    assert not any(event["lasting"] for event in told(logged, "function.failed"))


async def test_a_function_that_was_drained_does_not_start_again_by_itself(
    both: tuple[Settings, Settings], logged: list[dict[str, Any]]
) -> None:
    async with hosting(*both) as server:
        await server.ready()
        drain = Server(both[1], engine=LocalEngine(), drain=True, seed=1)
        assert await drain.run() == EXIT_CLEAN
        await until(lambda: server.functions["rows"].parts is None)
        status = server.document()
        assert status.functions["rows"].lifecycle == "undeployed"
        assert status.functions["rows"].reasons == (
            "the pipeline was drained: deploy it, or restart the server, to serve it again",
        )
        assert status.ready, "the other function works"
        await deliver(server.functions["counts"])
    assert told(logged, "function.failed") == []
    assert len([event for event in told(logged, "recovery.done") if event["pipeline"] == "rows"]) == 2
