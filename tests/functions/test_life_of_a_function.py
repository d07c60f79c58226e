"""A function follows what its ledger wants: undeploy, deploy, and restarts in every state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.serving import quick, until
from support.store import SqliteStore

import mldserver.pipeline
from mldserver.assembly import Dependencies, Parts, assemble
from mldserver.config.settings import Settings
from mldserver.errors import EXIT_CLEAN, InternalError, OperatorError
from mldserver.functions.lifecycle import Command, Shown
from mldserver.ledger.contract import LedgerState, Wanted
from mldserver.output.layout import LEDGER
from mldserver.server import Server
from mldserver.testing import FakeMLD, FakeStream, LocalEngine

ROWS = """
from mldserver import tumbling

schema = "id BIGINT NOT NULL{more}"
windows = tumbling("1 hour", on="at")


def process_record(record):
    return (record.json()["id"], "2027-01-15T08:00:00Z"{value})
"""
PLAIN = ROWS.format(more=", at TIMESTAMP", value="")
WRONG = "def process_record(record):\n"
OTHER = ROWS.format(more=" , at TIMESTAMP, name STRING NOT NULL", value=', "x"')


def rewrite(folder: Path, text: str) -> None:
    """Give the handler's module another text, which the next server of this process loads."""
    (folder / "rows.py").write_text(text)
    sys.modules.pop("rows", None)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of the function ``rows``, whose windows stay open for an hour."""
    rewrite(tmp_path, PLAIN)
    (tmp_path / "calm.py").write_text("def process_record(record): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return quick(tmp_path / "out" / "rows", "rows")


@pytest.fixture
def calm(rows: Settings, tmp_path: Path) -> Settings:
    """Settings of another function, beside which ``rows`` is one of several."""
    return quick(tmp_path / "out" / "calm", "calm")


@contextlib.asynccontextmanager
async def hosting(*functions: Settings) -> AsyncIterator[Server]:
    """Run a server with these functions, which must stop cleanly at the end of the block."""
    server = Server(functions, engine=LocalEngine(), seed=1)
    async with asyncio.TaskGroup() as group, asyncio.timeout(60):
        life = group.create_task(server.run())
        yield server
        server.stop("the test is over")
    assert life.result() == EXIT_CLEAN


async def command(server: Server, what: Command, **more: bool) -> bool:
    return await server.functions["rows"].command(what, **more)


def is_shown(server: Server, state: Shown) -> bool:
    return server.functions["rows"].shown is state


async def comes_to(server: Server, state: Shown) -> None:
    await until(lambda: is_shown(server, state))


def stream_of(records: int) -> FakeStream:
    filled = FakeStream(1, seed=1)
    for number in range(records):
        filled.put(json.dumps({"id": number}).encode(), f"key-{number}")
    return filled


async def deliver(server: Server, records: int, *, new: int | None = None) -> None:
    """Let a daemon deliver so many records, of which ``new`` (or all) are new, until their rows are durable."""
    parts = await server.functions["rows"].pipeline.assembled()
    daemon = FakeMLD(stream_of(records), await parts.source.listening())
    async with asyncio.TaskGroup() as group:
        run = group.create_task(daemon.run())
        await until(lambda: parts.coordinator.status().rows_durable == (records if new is None else new))
        run.cancel()


def held(settings: Settings) -> LedgerState:
    assert isinstance(settings.out, Path)
    store = SqliteStore(settings.out / LEDGER, pipeline=settings.pipeline, server_id="tool")
    try:
        return store.peek()
    finally:
        store.close()


def published(settings: Settings) -> list[str]:
    assert isinstance(settings.out, Path)
    return sorted(path.name for path in settings.out.glob("window=*"))


@pytest.mark.parametrize("several", [False, True])
async def test_an_undeploy_publishes_open_windows_and_forgets_and_a_deploy_starts_again(
    rows: Settings, calm: Settings, *, several: bool
) -> None:
    async with hosting(rows, *((calm,) if several else ())) as server:
        await deliver(server, 5)
        assert published(rows) == []
        assert await command(server, Command.UNDEPLOY)
        assert not is_shown(server, Shown.DEPLOYED)
        await comes_to(server, Shown.UNDEPLOYED)
        assert len(published(rows)) == 1
        (shard,) = held(rows).shards.values()
        assert shard.gap_accepted, "what follows the position may be read, or not"
        assert not await command(server, Command.UNDEPLOY), "it is undeployed"
        document = server.document()
        assert (document.functions["rows"].lifecycle, document.ready) == ("undeployed", True)
        with pytest.raises(OperatorError, match="The function rows is undeployed: pause is not possible"):
            await command(server, Command.PAUSE)
        assert await command(server, Command.DEPLOY)
        await comes_to(server, Shown.DEPLOYED)
        await deliver(server, 8, new=3)


async def test_a_restart_keeps_an_undeployed_function_undeployed_and_it_can_be_steered(
    rows: Settings,
) -> None:
    async with hosting(rows) as server:
        await deliver(server, 3)
        await command(server, Command.UNDEPLOY)
        await comes_to(server, Shown.UNDEPLOYED)
    lives = held(rows)
    async with hosting(rows) as server:
        await comes_to(server, Shown.UNDEPLOYED)
        assert server.is_ready
        done, text = await server.carry_out("flush", "")
        assert (done, text) == (False, "The server is starting or stopping and cannot be steered now.")
        assert held(rows) == lives, "nothing runs"
        await command(server, Command.DEPLOY)
        await comes_to(server, Shown.DEPLOYED)


async def test_an_undeploy_that_keeps_goes_on_where_it_was(rows: Settings) -> None:
    async with hosting(rows) as server:
        await deliver(server, 3)
        await command(server, Command.UNDEPLOY, keep=True)
        await comes_to(server, Shown.UNDEPLOYED)
        (shard,) = held(rows).shards.values()
        assert not shard.gap_accepted
        await command(server, Command.DEPLOY)
        await comes_to(server, Shown.DEPLOYED)
        assert not held(rows).life.keep


async def test_after_an_undeploy_the_schema_may_change(
    rows: Settings, tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    async with hosting(rows) as server:
        await deliver(server, 3)
        await command(server, Command.UNDEPLOY)
        await comes_to(server, Shown.UNDEPLOYED)
    rewrite(tmp_path, OTHER)
    async with hosting(rows) as server:
        await comes_to(server, Shown.UNDEPLOYED)
        await command(server, Command.DEPLOY)
        await comes_to(server, Shown.DEPLOYED)
        assert not held(rows).draining
    assert not [event for event in logged if event["event"] == "server.failed"]


async def test_every_server_of_the_function_follows(rows: Settings, tmp_path: Path) -> None:
    async with hosting(rows) as one, hosting(rows) as two:
        await one.ready()
        await two.ready()
        await deliver(one, 3)
        await command(two, Command.UNDEPLOY)
        await comes_to(one, Shown.UNDEPLOYED)
        await comes_to(two, Shown.UNDEPLOYED)
        assert len(published(rows)) == 1
        await command(one, Command.DEPLOY)
        await comes_to(one, Shown.DEPLOYED)
        await comes_to(two, Shown.DEPLOYED)
        assert not held(rows).draining


async def test_a_server_that_drains_late_does_not_drain_a_function_that_is_deployed_again(
    rows: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    drains, go_on = 0, asyncio.Event()

    async def hold_the_second_drain(settings: Settings, around: Dependencies, **more: Any) -> Parts:
        nonlocal drains
        drains += around.drain
        if around.drain and drains == 2:
            await go_on.wait()
        return await assemble(settings, around, **more)

    monkeypatch.setattr(mldserver.pipeline, "assemble", hold_the_second_drain)
    async with hosting(rows) as one, hosting(rows) as two:
        await one.ready()
        await two.ready()
        await deliver(one, 3)
        await command(two, Command.UNDEPLOY)
        await until(lambda: any(is_shown(each, Shown.UNDEPLOYED) for each in (one, two)))
        early, late = (one, two) if is_shown(one, Shown.UNDEPLOYED) else (two, one)
        await command(early, Command.DEPLOY)
        await comes_to(early, Shown.DEPLOYED)
        go_on.set()
        await comes_to(late, Shown.DEPLOYED)
        assert is_shown(early, Shown.DEPLOYED)
        assert not held(rows).draining


async def test_a_failed_function_is_deployed_again_once_its_code_is_right(
    rows: Settings, calm: Settings, tmp_path: Path
) -> None:
    rewrite(tmp_path, WRONG)
    async with hosting(rows, calm) as server:
        await comes_to(server, Shown.FAILED)
        rewrite(tmp_path, PLAIN)
        with pytest.raises(OperatorError, match="Correct what ended it"):
            await command(server, Command.RESUME)
        assert await command(server, Command.DEPLOY)
        await comes_to(server, Shown.DEPLOYED)


async def test_a_failed_function_does_not_hold_up_the_start_for_systemd(
    rows: Settings, calm: Settings, tmp_path: Path
) -> None:
    rewrite(tmp_path, WRONG)
    async with hosting(rows, calm) as server:
        assert not server.report().ready
        await comes_to(server, Shown.FAILED)
        await until(lambda: server.functions["calm"].is_ready)
        assert server.report().ready
        assert not server.is_ready


async def test_a_function_that_never_ran_can_be_undeployed(
    rows: Settings, calm: Settings, tmp_path: Path
) -> None:
    rewrite(tmp_path, WRONG)
    async with hosting(rows, calm) as server:
        await comes_to(server, Shown.FAILED)
        assert await command(server, Command.UNDEPLOY)
        await comes_to(server, Shown.UNDEPLOYED)
        assert held(rows).life.wanted is Wanted.UNDEPLOYED
        rewrite(tmp_path, PLAIN)
        assert await command(server, Command.DEPLOY)
        await comes_to(server, Shown.DEPLOYED)


async def test_an_undeploy_whose_handler_cannot_be_loaded_is_tried_again(
    rows: Settings, calm: Settings, tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    async with hosting(rows, calm) as server:
        await deliver(server, 3)
    rewrite(tmp_path, WRONG)
    async with hosting(rows, calm) as server:
        await comes_to(server, Shown.FAILED)
        await command(server, Command.UNDEPLOY)
        await until(lambda: len([each for each in logged if each["event"] == "function.failed"]) > 1)
        assert is_shown(server, Shown.UNDEPLOYING), "its windows are not published yet"
        assert published(rows) == []
        rewrite(tmp_path, PLAIN)
        await comes_to(server, Shown.UNDEPLOYED)
        assert len(published(rows)) == 1


async def test_a_pause_of_a_failed_function_holds_it_once_it_runs(
    rows: Settings, calm: Settings, tmp_path: Path
) -> None:
    rewrite(tmp_path, WRONG)
    async with hosting(rows, calm) as server:
        await comes_to(server, Shown.FAILED)
        rewrite(tmp_path, PLAIN)
        assert await command(server, Command.PAUSE)
        await comes_to(server, Shown.PAUSED)
        assert await command(server, Command.RESUME)
        await comes_to(server, Shown.DEPLOYED)


async def test_a_paused_function_can_be_undeployed(rows: Settings) -> None:
    async with hosting(rows) as server:
        await deliver(server, 3)
        await command(server, Command.PAUSE)
        await comes_to(server, Shown.PAUSED)
        await command(server, Command.UNDEPLOY)
        await comes_to(server, Shown.UNDEPLOYED)
        assert len(published(rows)) == 1


async def test_of_two_commands_at_once_one_changes_nothing(
    rows: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosting(rows) as server:
        await comes_to(server, Shown.DEPLOYED)
        results = await asyncio.gather(
            command(server, Command.PAUSE), command(server, Command.UNDEPLOY), return_exceptions=True
        )
        (error,) = [each for each in results if isinstance(each, OperatorError)]
        assert "came at the same time" in str(error)
        assert True in results


async def test_a_server_that_stops_during_an_undeploy_continues_it_at_the_next_start(rows: Settings) -> None:
    async with hosting(rows) as server:
        await deliver(server, 3)
        await command(server, Command.UNDEPLOY)
    assert held(rows).life.wanted is Wanted.UNDEPLOYED
    async with hosting(rows) as server:
        await comes_to(server, Shown.UNDEPLOYED)
        assert len(published(rows)) == 1


async def test_a_command_that_comes_when_the_ledger_was_closed_opens_it_for_itself(
    rows: Settings, calm: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosting(rows, calm) as server:
        await comes_to(server, Shown.DEPLOYED)
        function, found = server.functions["rows"], []
        assert function.parts is not None
        ledger = function.parts.ledger
        close = ledger.close

        async def close_and_ask() -> None:
            await close()
            found.append((await function.read_state()).life.wanted)

        monkeypatch.setattr(ledger, "close", close_and_ask)
        assert await command(server, Command.UNDEPLOY)
        await comes_to(server, Shown.UNDEPLOYED)
        assert found == [Wanted.UNDEPLOYED]


async def test_a_command_whose_function_stops_meanwhile_is_refused_in_a_sentence(
    rows: Settings, calm: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosting(rows, calm) as server:
        await comes_to(server, Shown.DEPLOYED)
        function = server.functions["rows"]
        assert function.parts is not None
        ledger = function.parts.ledger

        async def peek() -> LedgerState:
            function.pipeline.has_closed_ledger = stops
            raise InternalError("The ledger is closed.")

        monkeypatch.setattr(ledger, "peek", peek)
        for stops, error in ((True, OperatorError), (False, InternalError)):
            with pytest.raises(error, match="stopped before" if stops else "is closed"):
                await command(server, Command.PAUSE)
            function.pipeline.has_closed_ledger = False
