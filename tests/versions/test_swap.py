"""A running server changes to another version of the code that the ledger names, or keeps the old one and says why."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.serving import quick, serving, until
from workers.kit import named
from workers.test_keyed_server import rows_of

from mldserver.errors import HandlerError, MldserverError, OperatorError
from mldserver.ledger.contract import CodeVersion
from mldserver.output.store import OutputStore
from mldserver.server import Server
from mldserver.testing import FakeMLD, FakeStream, Habits
from mldserver.versions.code import pack, store_code
from mldserver.versions.swap import Swap

HANDLER = """
from datetime import timedelta
from mldserver import Context, batches, timer

schema = "key STRING, n BIGINT, id BIGINT"
windows = batches(max_rows=1000, max_age="1 hour")
version = "{version}"
state_ttl = "2 days"

def process_record(record, ctx: Context):
    ctx.state["n"] = ctx.state.get("n", 0) + 1
    if ctx.state["n"] == 1:
        ctx.timers.set({timer}, after="1 hour")
    return ctx.key, ctx.state["n"], int(record.text())

@timer
def {timer}(due, ctx):
    return None
"""
KEYS = 10


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counts.py").write_text(text(1))
    return tmp_path / "out"


def text(version: int, *, callback: str = "alarm", **changes: str) -> str:
    found = HANDLER.format(version=version, timer=callback)
    for old, new in changes.items():
        found = found.replace({"id": "id BIGINT", "ttl": "2 days", "load": "from datetime"}[old], new)
    return found


def stored(out: Path, source: str, version: int = 2) -> CodeVersion:
    """Store code as ``stage`` does."""
    code = {"counts": ("/elsewhere/counts.py", source.encode())}
    return CodeVersion(f"{version}", store_code(OutputStore(str(out)), pack(code)), 1)


def swap_of(server: Server) -> Swap:
    assert server.only.parts is not None
    return server.only.parts.swap


def wants(server: Server, version: CodeVersion) -> None:
    """Let the ledger's state name a version, as if another server had written it."""
    swap_of(server).wanted = lambda: version


async def deploy(server: Server, version: CodeVersion) -> None:
    """Let the ledger name a version, and bring the workers to it."""
    wants(server, version)
    await swap_of(server).reach(version)


async def test_versions_change_under_load_and_counts_of_keys_go_on(
    out: Path, logged: list[dict[str, Any]], long: bool
) -> None:
    stream = FakeStream(4, seed=1, start_ms=1_800_000_000_000)
    swaps, expected = 20 if long else 2, Counter[str]()

    def put() -> None:
        for number in range(len(list(expected.elements())), len(list(expected.elements())) + 40):
            key = f"key-{number % KEYS}"
            stream.put(str(number).encode(), key)
            expected[key] += 1

    async with serving(quick(out, "counts", workers=2), stream=stream) as server, asyncio.timeout(1700):
        daemon = FakeMLD(stream, await server.listening(), habits=Habits(max_records=4))
        put()
        playing = asyncio.create_task(daemon.run())
        versions = [stored(out, text(2)), CodeVersion()]
        for number in range(swaps):
            put()
            sent = daemon.records_sent
            await deploy(server, versions[number % 2])
            await until(lambda sent=sent: daemon.records_sent > sent)  # type: ignore[misc]  # a lambda's default
        stream.end()
        await playing
        await server.finished()
    assert (daemon.violations, daemon.life, daemon.finished) == ([], 1, True)
    assert named(logged, "worker.lost", "handler.dead_letter", "connection.failed") == []
    assert [event["version"] for event in named(logged, "function.swapped")] == ["2", "1"] * (swaps // 2)
    rows = rows_of(out)
    assert {key: [n for _, n in sorted(pairs)] for key, pairs in rows.items()} == {
        key: list(range(1, count + 1)) for key, count in expected.items()
    }


async def test_a_server_follows_the_version_that_another_one_has_written(
    out: Path, logged: list[dict[str, Any]]
) -> None:
    async with serving(quick(out, "counts", workers=1), stream=FakeStream(1, seed=1)) as server:
        await server.listening()
        wants(server, stored(out, text(2)))
        await until(lambda: bool(named(logged, "function.swapped")))
        assert swap_of(server).trouble is None


REFUSED: dict[str, tuple[dict[str, str], type[MldserverError], str]] = {
    "another schema": ({"id": "id INT"}, OperatorError, "has another shape: the schema was"),
    "a callback is missing": ({"callback": "other"}, OperatorError, "Timers are pending that call alarm"),
    "it does not load": ({"load": "from (datetime"}, HandlerError, "SyntaxError"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_version_that_is_refused_keeps_the_old_code_and_the_server_red_until_another_one(
    case: str, out: Path, logged: list[dict[str, Any]]
) -> None:
    changes, error, says = REFUSED[case]
    stream = FakeStream(1, seed=1, start_ms=1_800_000_000_000)
    stream.put(b"0", "key")
    async with serving(quick(out, "counts", workers=1), stream=stream) as server:
        daemon = FakeMLD(stream, await server.listening())
        playing = asyncio.create_task(daemon.run())
        await until(lambda: bool(named(logged, "batch.done")))
        swap = swap_of(server)
        wants(server, version := stored(out, text(2, **changes)))
        await until(lambda: bool(named(logged, "function.refused")))
        refused = named(logged, "function.refused")[0]
        assert says in refused["what"]
        assert refused["did"] == "Nothing has changed: the old version goes on."
        assert swap.trouble is not None
        assert "the deployed version 2 does not run here, 1 does: " in swap.trouble
        await until(lambda: any(swap.trouble == reason for reason in server.document().reasons))
        with pytest.raises(error, match=says):
            await swap.reach(version)
        await asyncio.sleep(0.2)
        assert len(named(logged, "function.refused")) == 1, "it is tried once"
        wants(server, CodeVersion())
        await until(lambda: swap.trouble is None)
        stream.put(b"1", "key")
        stream.end()
        await playing
        await server.finished()
    assert rows_of(out) == {"key": [(0, 1), (1, 2)]}


@pytest.mark.usefixtures("logged")
async def test_a_shorter_time_to_live_needs_a_yes(out: Path) -> None:
    async with serving(quick(out, "counts", workers=1), stream=FakeStream(1, seed=1)) as server:
        await server.listening()
        swap, spec = swap_of(server), swap_of(server)._workers().spec
        for ttl_ms, says in ((86_400_000, "86400 s after its last write, which is shorter than 172800 s"),):
            with pytest.raises(OperatorError, match=says):
                swap.require_fit(replace(spec, state_ttl_ms=ttl_ms), accept_shorter_ttl=False)
            swap.require_fit(replace(spec, state_ttl_ms=ttl_ms), accept_shorter_ttl=True)
        for ttl_ms in (172_800_000, 172_800_001, None):
            swap.require_fit(replace(spec, state_ttl_ms=ttl_ms), accept_shorter_ttl=False)
        swap._workers().spec = replace(spec, state_ttl_ms=None)
        with pytest.raises(OperatorError, match="which is shorter than for ever"):
            swap.require_fit(spec, accept_shorter_ttl=False)


@pytest.mark.usefixtures("logged")
async def test_code_of_the_path_is_not_reloaded_over_a_staged_version(out: Path) -> None:
    async with serving(quick(out, "counts", workers=1), stream=FakeStream(1, seed=1)) as server:
        await server.listening()
        await deploy(server, stored(out, text(2)))
        done, said = await server.carry_out("reload", "")
        assert not done
        assert said.startswith(
            "The function runs a staged version, 2, and not the code on the Python path. Stage the"
        )
        await deploy(server, CodeVersion())
        assert (await server.carry_out("reload", ""))[0]


@pytest.mark.usefixtures("logged")
async def test_in_the_servers_own_process_no_version_takes_over(out: Path) -> None:
    async with serving(quick(out, "counts"), stream=FakeStream(1, seed=1)) as server:
        await server.listening()
        with pytest.raises(OperatorError, match="The handler runs in the server's own process"):
            await swap_of(server).reach(stored(out, text(2)))
        assert "does not run here" in str(swap_of(server).trouble)
