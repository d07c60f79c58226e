"""``functions.…`` requests to a whole server: versions, states, packages, and why the server refuses a command."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.serving import CONSTANTS, until

from mldserver.config.resolve import resolve_functions
from mldserver.config.settings import Settings
from mldserver.errors import EXIT_CLEAN
from mldserver.function_commands import Options
from mldserver.functions.lifecycle import Shown
from mldserver.functions.package import read_package
from mldserver.output.layout import LEDGER
from mldserver.server import Server
from mldserver.testing import FakeMLD, FakeStream, LocalEngine
from mldserver.testing.fake_kinesis import FakeKinesis

HANDLER = """
from mldserver import Context, batches

schema = "key STRING, {column} BIGINT, version STRING"
windows = batches(max_rows=1000, max_age="1 hour")
version = "{version}"
state_ttl = "{ttl}"


def process_record(record, ctx: Context):
    ctx.state["n"] = ctx.state.get("n", 0) + 1
    return ctx.key, ctx.state["n"], version
"""
FILE = """
flush_interval = "50 ms"

[functions.counts]
handler = "counts"
listen = "127.0.0.1:0"
out = "out/counts"
stream = "counts"
workers = 1
handler_settings = { threshold = "20", token = "battery-staple" }

[functions.calm]
handler = "calm"
listen = "127.0.0.1:0"
out = "out/calm"
"""
ONLY_CALM = (
    FILE.partition("[functions.counts]")[0] + "[functions.calm]" + FILE.partition("[functions.calm]")[2]
)


def text(version: str, *, column: str = "n", ttl: str = "2 days") -> str:
    return HANDLER.format(version=version, column=column, ttl=ttl)


def code(folder: Path, source: str) -> str:
    """Put code into a folder, as an operator does before a command names it."""
    folder.mkdir(exist_ok=True)
    (folder / "counts.py").write_text(source)
    return str(folder)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A server's working directory: its settings and the code on its Python path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("counts", None)
    (tmp_path / "counts.py").write_text(text("1"))
    (tmp_path / "calm.py").write_text("def process_record(record): ...\n")
    (tmp_path / "mldserver.toml").write_text(FILE)
    return tmp_path


@contextlib.asynccontextmanager
async def hosting(
    folder: Path, environ: Mapping[str, str] | None = None, stream: FakeStream | None = None
) -> AsyncIterator[Server]:
    """Run the server of a folder's settings, which must stop cleanly at the end of the block."""

    def read_settings(more: Mapping[str, Mapping[str, object]]) -> tuple[Settings, ...]:
        found = resolve_functions({}, environ=environ or {}, folder=folder, more=more)
        return tuple(replace(each, constants=CONSTANTS) for each in found)

    server = Server(
        read_settings({}),
        engine=LocalEngine(),
        kinesis=FakeKinesis(stream or FakeStream(1, seed=1)).make,
        seed=1,
        read_settings=read_settings,
    )
    async with asyncio.TaskGroup() as group, asyncio.timeout(100):
        life = group.create_task(server.run())
        yield server
        server.stop("the test is over")
    assert life.result() == EXIT_CLEAN


async def command(server: Server, name: str, function: str = "counts", **options: Any) -> str:
    """Carry a command out, and return what the server says."""
    done, said = await server.carry_out(f"functions.{name}", json.dumps(options), function)
    assert done, said
    return said


async def refused(server: Server, name: str, function: str = "counts", **options: Any) -> str:
    """Return why the server refuses a command."""
    done, said = await server.carry_out(f"functions.{name}", json.dumps(options), function)
    assert not done, said
    return said


async def comes_to(server: Server, state: Shown, name: str = "counts") -> None:
    function = server.functions[name]
    await until(lambda: function.shown in {state, Shown.FAILED})
    assert function.shown is state, function.report()


def versions(server: Server, name: str = "counts") -> dict[str, str]:
    """The versions of a function by their roles, as its status has them."""
    return {row.role: row.id for row in server.document().functions[name].versions}


async def deliver(server: Server, stream: FakeStream, records: int) -> None:
    """Deliver further records to the function ``counts`` until their rows are durable."""
    parts = await server.functions["counts"].pipeline.assembled()
    before = parts.coordinator.status().rows_durable
    for _ in range(records):
        stream.put(b"x", "a")
    daemon = FakeMLD(stream, await parts.source.listening())
    async with asyncio.TaskGroup() as group:
        run = group.create_task(daemon.run())
        await until(lambda: parts.coordinator.status().rows_durable >= before + records)
        run.cancel()


async def test_a_version_is_staged_deployed_and_rolled_back(home: Path, logged: list[dict[str, Any]]) -> None:
    async with hosting(home) as server:
        await comes_to(server, Shown.DEPLOYED)
        assert versions(server) == {}, "the code has always been that on the Python path"
        assert "Nothing is staged" in await command(server, "deploy")
        assert "has no previous version." in await refused(server, "rollback")
        said = await command(server, "stage", path=code(home / "two", text("2")))
        assert said == (
            "Version 2 of counts is staged. `mldserver functions deploy counts` runs it in place of the code on the Python path."
        )
        assert versions(server) == {"deployed": "Python path", "staged": "2"}
        said = await command(server, "deploy")
        assert said == (
            "The function counts runs version 2. `mldserver functions rollback counts` goes back to the code on the Python path."
        )
        assert versions(server) == {"deployed": "2", "previous": "Python path"}
        assert "runs this code already: 2." in await command(server, "stage", path=str(home / "two"))
        assert "goes back to version 2" in await command(server, "rollback")
        assert versions(server) == {"deployed": "Python path", "previous": "2"}
    swaps = [event["version"] for event in logged if event["event"] == "function.swapped"]
    assert swaps == ["2", "1"]


async def test_a_deployed_version_is_the_one_that_a_restart_runs_and_its_counts_go_on(home: Path) -> None:
    stream = FakeStream(1, seed=1)
    async with hosting(home, stream=stream) as server:
        await deliver(server, stream, 3)
        await command(server, "stage", path=code(home / "two", text("2")))
        await command(server, "deploy")
    async with hosting(home, stream=stream) as server:
        await deliver(server, stream, 2)
        assert server.document().functions["counts"].handler_version == "2"
    files = (home / "out" / "counts" / "_mldserver" / "segments").rglob("*.parquet")
    rows = [(row["n"], row["version"]) for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    assert sorted(rows) == [(1, "1"), (2, "1"), (3, "1"), (4, "2"), (5, "2")]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (text("2", column="m"), "schema"),
        (text("2", ttl="1 hour"), "Repeat the command with --yes"),
        ("def process_record(record:\n", "counts"),
    ],
)
async def test_a_version_that_does_not_fit_is_not_staged(home: Path, source: str, reason: str) -> None:
    async with hosting(home) as server:
        await comes_to(server, Shown.DEPLOYED)
        assert reason in await refused(server, "stage", path=code(home / "two", source))
        assert versions(server) == {}


async def test_a_shorter_life_of_state_is_staged_and_deployed_once_it_is_accepted(home: Path) -> None:
    async with hosting(home) as server:
        await comes_to(server, Shown.DEPLOYED)
        await command(server, "stage", path=code(home / "two", text("2", ttl="1 hour")), yes=True)
        assert "Repeat the command with --yes" in await refused(server, "deploy")
        assert versions(server) == {"deployed": "Python path", "staged": "2"}
        assert "runs version 2" in await command(server, "deploy", yes=True)


async def test_the_states_of_a_function_change_and_the_answers_say_what_follows(home: Path) -> None:
    async with hosting(home) as server:
        await comes_to(server, Shown.DEPLOYED)
        assert "its daemons wait and keep their leases" in await command(server, "pause")
        await comes_to(server, Shown.PAUSED)
        assert "nothing was to be done" in await command(server, "pause")
        assert "its shards go on" in await command(server, "resume")
        await comes_to(server, Shown.DEPLOYED)
        assert "dead letters are kept." in await command(server, "undeploy", keep=True)
        await comes_to(server, Shown.UNDEPLOYED)
        assert "pause is not possible" in await refused(server, "pause")
        await command(server, "stage", path=code(home / "two", text("2")))
        assert "starts with version 2" in await command(server, "deploy")
        await comes_to(server, Shown.DEPLOYED)
        assert versions(server)["deployed"] == "2"
        assert server.functions["calm"].shown is Shown.DEPLOYED, "the other function is as before"


async def test_a_function_moves_to_another_server_as_a_package(home: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "mldserver.toml").write_text(ONLY_CALM)
    package = tmp_path / "counts.zip"
    async with hosting(home) as server:
        await comes_to(server, Shown.DEPLOYED)
        package.write_bytes(base64.b64decode(await command(server, "export")))
        await command(server, "stage", path=code(home / "two", text("2")))
    assert b"battery-staple" not in package.read_bytes()
    assert read_package(package.read_bytes(), "It").variables() == ["COUNTS_HANDLER_SETTINGS_TOKEN"]
    async with hosting(there) as server:
        said = await refused(server, "import", "", path=str(package))
        assert "COUNTS_HANDLER_SETTINGS_TOKEN" in said
        assert not (there / "functions.d").exists()
    environ = {"COUNTS_HANDLER_SETTINGS_TOKEN": "other-staple"}
    stream = FakeStream(1, seed=1)
    async with hosting(there, environ, stream) as server:
        said = await command(server, "import", "", path=str(package))
        assert "The function counts is here, undeployed" in said
        await comes_to(server, Shown.UNDEPLOYED)
        assert "deploy counts` starts it with version 1." in said
        exported = base64.b64decode(await command(server, "export"))
        assert exported == package.read_bytes(), "identical to the byte"
        await command(server, "deploy")
        await comes_to(server, Shown.DEPLOYED)
        await deliver(server, stream, 2)
        assert "runs this code already" in await command(server, "import", "", path=str(package))
    async with hosting(there, environ, stream) as server:
        assert list(server.functions) == ["calm", "counts"], "a restart finds its file"
        await comes_to(server, Shown.DEPLOYED)
        assert base64.b64decode(await command(server, "export")) == package.read_bytes()


async def test_a_package_of_a_function_that_is_here_stages_its_code_if_the_settings_are_the_same(
    home: Path,
) -> None:
    package = home / "counts.zip"
    async with hosting(home) as server:
        await comes_to(server, Shown.DEPLOYED)
        await command(server, "stage", path=code(home / "two", text("2")))
        await command(server, "deploy")
        package.write_bytes(base64.b64decode(await command(server, "export")))
        await command(server, "rollback")
        assert "Version 2 of counts is staged" in await command(server, "import", "", path=str(package))
    settings = home / "mldserver.toml"
    settings.write_text(settings.read_text().replace('"20"', '"30"'))
    async with hosting(home) as server:
        said = await refused(server, "import", "", path=str(package))
        assert "is here with other settings: handler_settings." in said


async def test_a_package_whose_ledger_is_in_use_is_refused_and_nothing_is_written(
    home: Path, tmp_path: Path
) -> None:
    package = tmp_path / "counts.zip"
    stream = FakeStream(1, seed=1)
    async with hosting(home, stream=stream) as server:
        await deliver(server, stream, 1)
        package.write_bytes(base64.b64decode(await command(server, "export")))
    (home / "mldserver.toml").write_text(ONLY_CALM)
    before = (home / "out" / "counts" / LEDGER).read_bytes()
    async with hosting(home, {"COUNTS_HANDLER_SETTINGS_TOKEN": "x"}) as server:
        said = await refused(server, "import", "", path=str(package))
        assert "is in use: a function of that name is deployed, or was." in said
        assert list(server.functions) == ["calm"]
    assert not (home / "functions.d").exists()
    assert (home / "out" / "counts" / LEDGER).read_bytes() == before


async def test_what_cannot_be_understood_is_refused_in_a_sentence(home: Path) -> None:
    async with hosting(home) as server:
        await comes_to(server, Shown.DEPLOYED)
        assert "This server has several functions. There are counts, calm." in await refused(
            server, "pause", ""
        )
        assert "This server has no function 'x'." in await refused(server, "pause", "x")
        assert "There is no command 'jump'. Commands are stage," in await refused(server, "jump")
        assert "is no argument of functions.pause" in await refused(server, "pause", force=True)
        assert "cannot be read" in await refused(server, "stage", path=str(home / "nothing"))
        assert "cannot be read" in await refused(server, "import", "", path=str(home / "nothing"))
        (home / "calm").mkdir()
        assert "does not have the module counts" in await refused(server, "stage", path=str(home / "calm"))
        (home / "no.zip").write_bytes(b"PK")
        assert "no.zip" in await refused(server, "import", "", path=str(home / "no.zip"))


def test_options_have_defaults_that_change_nothing() -> None:
    assert Options() == Options(path="", keep=False, yes=False)
