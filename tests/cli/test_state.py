"""Keyed state from the command line: it is shown, backed up and restored, drained, reset, and follows a renamed pipeline."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from support.serving import quick, serving, until

from mldserver import cli
from mldserver.server import EXIT_CLEAN, EXIT_OPERATOR, Server
from mldserver.testing import FakeMLD, FakeStream, Habits, LocalEngine
from mldserver.testing.fake_kinesis import FakeKinesis

HANDLER = """
from datetime import UTC, datetime
from decimal import Decimal

from mldserver import Context

state_ttl = "1 hour"

def process_record(record, ctx: Context):
    match record.text():
        case "forget":
            ctx.state.clear()
        case "rich":
            ctx.state |= {"at": datetime(2026, 1, 2, tzinfo=UTC), "sum": Decimal("1.50"), "raw": b"\\xff", "list": [1, None]}
        case _:
            ctx.state["n"] = ctx.state.get("n", 0) + 1
"""
HOUR = 3_600_000


class World:
    """A stream, a pipeline that counts the records of each key, and the command line."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "counting.py").write_text(HANDLER)
        self.out, self.capsys = folder / "out", capsys
        self.stream = FakeStream(2, start_ms=0)
        self.put_in: Counter[str] = Counter()

    def settings(self, **changes: Any) -> Any:
        return quick(self.out, "counting", **({"pipeline": "p", "flush_interval": 0.02} | changes))

    def put(self, *keys: str, text: str = "") -> None:
        for key in keys:
            self.stream.put(text.encode(), key)
            self.put_in[key] += not text

    @contextlib.asynccontextmanager
    async def reading(self, **changes: Any) -> AsyncIterator[Server]:
        """Run a server, and a daemon that has no leases yet."""
        async with (
            asyncio.timeout(800),
            serving(self.settings(**changes), stream=self.stream) as server,
            asyncio.TaskGroup() as group,
        ):
            daemon = FakeMLD(self.stream, await server.listening(), habits=Habits(max_records=5))
            playing = group.create_task(daemon.run())
            yield server
            playing.cancel()

    async def read(self, **changes: Any) -> None:
        """Run a server until all that was put is durable."""
        async with self.reading(**changes):
            await self.until_shown(lambda found: _counts(found) == self.put_in)

    async def run(self, *arguments: str, code: int = 0) -> str:
        """Run a command in another thread; return what it printed."""
        assert await asyncio.to_thread(cli.run, arguments) == code
        printed = self.capsys.readouterr()
        assert "Traceback" not in printed.err
        return printed.err if code else printed.out

    async def show(self, *more: str) -> dict[str, Any]:
        text = await self.run("state", "show", "--out", str(self.out), "--json", *more)
        return json.loads(text)  # type: ignore[no-any-return]  # an object

    async def until_shown(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return what is shown once a condition holds of it."""
        while not condition(found := await self.show()):  # noqa: ASYNC110  # the file of the ledger has no event
            await asyncio.sleep(0.02)
        return found

    async def counts(self) -> dict[str, int]:
        """Return the stored count of each key."""
        return _counts(await self.show())


def _state_files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "_mldserver" / "state").iterdir()}


def _counts(found: dict[str, Any]) -> dict[str, int]:
    return {entry["key"]: entry["value"].get("n", 0) for entry in found["entries"]}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> World:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return World(tmp_path, capsys)


async def test_the_largest_states_are_shown_first_and_one_key_alone(world: World) -> None:
    world.put("a", "b", "a", "c")
    await world.read()
    world.put("rich", text="rich")
    world.put("c", text="forget")
    del world.put_in["c"]
    async with world.reading():
        found = await world.until_shown(lambda found: _counts(found) == {"rich": 0, "a": 2, "b": 1})
    first, *rest = found["entries"]
    assert first["value"] == {
        "at": "2026-01-02T00:00:00Z",
        "sum": "1.50",
        "raw": "/w==",
        "list": [1, None],
    }
    assert [(entry["key"], entry["value"]) for entry in rest] == [("a", {"n": 2}), ("b", {"n": 1})]
    assert all(entry["store"] in world.stream.shards for entry in found["entries"])
    assert (found["pipeline"], found["stores"] <= 2, found["files"] > 0) == ("p", True, True)
    text = await world.run("state", "show", "--out", "out", "--limit", "1")
    assert text.splitlines()[2].split()[0] == "rich"
    assert text.splitlines()[-1].startswith("3 keys in ")
    assert text.endswith("(2 keys not shown)\n")
    text = await world.run("state", "show", "--out", "out", "--key", "a")
    assert [line.split(None, 1) for line in text.splitlines()][-1] == ["value", '{"n": 2}']
    assert (await world.show("--key", "b"))["entries"][0]["value"] == {"n": 1}
    text = await world.run("state", "show", "--out", "out", "--key", "c", code=2)
    assert "The key 'c' has no state in the pipeline p." in text


async def test_a_pipeline_is_named_as_the_server_names_it_and_may_have_no_state(world: World) -> None:
    world.out = world.out / "p"
    async with serving(world.settings(), stream=world.stream):
        pass
    assert await world.run("state", "show", "p") == (
        "The pipeline p has no keyed state: no handler that takes `ctx` has opened a shard.\n"
    )
    assert "There is no ledger at out/q" in await world.run("state", "show", "q", code=2)


async def test_what_has_expired_by_the_time_of_its_shard_is_not_shown(world: World) -> None:
    world.put("a", "b", "c")
    await world.read()
    placed = {entry["key"]: entry["store"] for entry in (await world.show())["entries"]}
    assert placed["a"] == placed["c"] != placed["b"]
    world.stream.put(b"", "a", arrival_ms=2 * HOUR)
    async with world.reading():
        found = await world.until_shown(lambda found: found["entries"][0]["expires_ms"] > 2 * HOUR)
    # The count of a began anew; c has expired; the shard of b has seen no later record.
    assert _counts(found) == {"a": 1, "b": 1}


@pytest.mark.parametrize("target", ["again", "out"])
async def test_a_backup_taken_while_a_server_flushes_restores_to_exact_counts(
    world: World, target: str
) -> None:
    # Without retention the server deletes the backup's files as soon as others have taken their place.
    async with world.reading(retention=0.0) as server, asyncio.TaskGroup() as group:
        enough = asyncio.Event()

        async def producing() -> None:
            number = 0
            while not enough.is_set():
                world.put(f"key-{number % 7}")
                number += 1
                await asyncio.sleep(0.005)

        group.create_task(producing())
        await until(lambda: (state := server.document().state) is not None and state.files > 0)
        told = json.loads(await world.run("ledger", "backup", "backup", "--out", "out", "--json"))
        saved = _state_files(Path("backup/files"))
        await until(lambda: not saved <= _state_files(world.out))
        enough.set()
    assert told["files"] > 0
    # To another folder, as after the loss of a disk, or over what is there.
    world.out = world.out.with_name(target)
    await world.run("ledger", "restore", "backup", "--out", target, "--json")
    before = await world.counts()
    assert 0 < sum(before.values()) < world.put_in.total()
    await world.read()
    assert await world.counts() == world.put_in


async def test_state_stays_when_a_pipeline_is_drained_and_renamed(world: World) -> None:
    world.put("a", "b", "a")
    await world.read()
    kinesis = FakeKinesis(world.stream).make
    settings = world.settings(stream="flights")
    assert await Server(settings, engine=LocalEngine(), kinesis=kinesis, drain=True).run() == EXIT_CLEAN
    assert await world.counts() == {"a": 2, "b": 1}
    world.put("a")
    await world.read(pipeline="q", rename_from="p")
    assert await world.counts() == {"a": 3, "b": 1}
    assert (await world.show())["pipeline"] == "q"


async def test_a_shard_with_state_is_reset_only_with_that_word_and_then_counts_from_one(
    world: World,
) -> None:
    world.put("a", "b", "a", "c", "d")
    await world.read()
    shards = [*world.stream.shards]
    text = await world.run("ledger", "reset", *shards, "--out", "out", code=2)
    assert "has keyed state. Nothing was changed. Give --forget-state" in text
    assert await world.counts() == world.put_in
    text = await world.run("ledger", "reset", *shards, "--out", "out", "--forget-state")
    assert "it has no position and no keyed state any more" in text
    assert await world.counts() == {}
    await world.read()
    assert await world.counts() == world.put_in


async def test_without_a_stream_a_handler_that_keeps_state_is_not_started(
    world: World, logged: list[dict[str, Any]]
) -> None:
    assert await Server(world.settings(), engine=LocalEngine()).run() == EXIT_OPERATOR
    (failed,) = (event for event in logged if event["event"] == "server.failed")
    assert "--stream NAME" in failed["advice"]
