"""Timers from the command line: they are listed from files, and cancelled in a running server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from support.admin_endpoint import endpoint
from support.serving import quick, serving, until

from mldserver import cli
from mldserver.server import Server
from mldserver.testing import FakeMLD, FakeStream, Habits

HANDLER = """
from mldserver import Context, Timer, timer

schema = "key STRING, timer STRING"

def process_record(record, ctx: Context):
    for name, seconds in record.json().items():
        ctx.timers.set(alarm, after=seconds, name=name, payload={"of": ctx.key})
    ctx.state["n"] = 1

@timer
def other(due: Timer, ctx: Context): ...

@timer
def alarm(due: Timer, ctx: Context):
    return ctx.key, due.name
"""
HOUR = 3_600_000
YEAR = 365 * 24 * 3600


class World:
    """A stream, a pipeline that sets timers, and the command line."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.out, self.capsys = folder, folder / "out", capsys
        self.write(HANDLER)
        self.stream = FakeStream(2, start_ms=time.time_ns() // 1_000_000)

    def write(self, handler: str) -> None:
        (self.folder / "alarms.py").write_text(handler)

    def put(self, key: str, **after: float) -> None:
        self.stream.put(json.dumps(after).encode(), key)

    def serving(self, **changes: Any) -> AbstractAsyncContextManager[Server]:
        """Run a server that no daemon connects to."""
        settings = quick(self.out, "alarms", **({"pipeline": "p", "flush_interval": 0.02} | changes))
        return serving(settings, stream=self.stream)

    @contextlib.asynccontextmanager
    async def reading(self, **changes: Any) -> AsyncIterator[Server]:
        async with asyncio.timeout(800), self.serving(**changes) as server, asyncio.TaskGroup() as group:
            daemon = FakeMLD(self.stream, await server.listening(), habits=Habits(max_records=5))
            playing = group.create_task(daemon.run())
            yield server
            playing.cancel()

    async def run(self, *arguments: str, code: int = 0) -> str:
        """Run a command in another thread; return what it printed."""
        assert await asyncio.to_thread(cli.run, arguments) == code
        printed = self.capsys.readouterr()
        assert "Traceback" not in printed.err
        return printed.err if code else printed.out

    async def list(self, *more: str) -> dict[str, Any]:
        text = await self.run("timers", "list", "--out", str(self.out), "--json", *more)
        return json.loads(text)  # type: ignore[no-any-return]  # an object

    async def until_listed(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return what is listed once a condition holds of it."""
        while not condition(found := await self.list()):  # noqa: ASYNC110  # the file of the ledger has no event
            await asyncio.sleep(0.02)
        return found


def _ids(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["key"], each["timer"]) for each in found["timers"]]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> World:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return World(tmp_path, capsys)


async def test_timers_are_listed_by_their_due_times_and_by_conditions(world: World) -> None:
    world.put("a", x=YEAR, y=YEAR // 2)
    world.put("b", **{"": 3600})
    async with world.reading():
        found = await world.until_listed(lambda found: found["pending"] == 3)
    assert _ids(found) == [("b", "alarm"), ("a", "alarm/y"), ("a", "alarm/x")]
    (first, *_) = found["timers"]
    assert (first["attempt"], first["payload"]) == (0, {"of": "b"})
    assert found["timers"][2]["due_ms"] - found["timers"][1]["due_ms"] == (YEAR - YEAR // 2) * 1000
    assert _ids(await world.list("--key", "a")) == [("a", "alarm/y"), ("a", "alarm/x")]
    assert _ids(await world.list("--timer", "alarm/x")) == [("a", "alarm/x")]
    assert len(_ids(await world.list("--timer", "alarm"))) == 3
    assert _ids(await world.list("--due-before", "2 hours")) == [("b", "alarm")]
    assert _ids(await world.list("--due-before", "2 hours", "--key", "a")) == []
    text = await world.run("timers", "list", "p", "--out", str(world.out), "--limit", "1")
    assert '{"of": "b"}' in text
    assert text.endswith("3 timers in 2 stores (2 not shown)\n") or "2 not shown" in text
    assert "--due-before 'soon' is neither a time nor a duration" in await world.run(
        "timers", "list", "--out", str(world.out), "--due-before", "soon", code=2
    )
    shown = json.loads(await world.run("state", "show", "--out", str(world.out), "--json"))
    assert [entry["value"] for entry in shown["entries"]] == [{"n": 1}, {"n": 1}], (
        "state show leaves timers out"
    )


async def test_timers_are_cancelled_in_the_running_server_and_stay_so(world: World) -> None:
    world.put("a", x=YEAR, y=YEAR)
    world.put("b", x=YEAR)
    async with world.reading() as server:
        await world.until_listed(lambda found: found["pending"] == 3)
        request = {"key": "a", "timer_id": "alarm/x", "due_before_ms": None}
        assert await server.carry_out("cancel-timers", json.dumps(request)) == (True, "1 timer cancelled.")
        assert _ids(await world.list()) == [("a", "alarm/y"), ("b", "alarm/x")]
        assert (await server.carry_out("cancel-timers", "{}"))[1] == "2 timers cancelled."
        timers = server.document().timers
        assert timers is not None
        assert (timers.pending, timers.cancelled) == (0, 3)
        done, text = await server.carry_out("cancel-timers", "everything")
        assert (done, "does not say which timers" in text) == (False, True)
    async with world.reading():
        await until(lambda: True)
        assert _ids(await world.list()) == []


async def test_timers_in_stores_that_the_server_does_not_have_stay_and_the_stores_are_named(
    world: World,
) -> None:
    world.put("a", x=YEAR)
    world.put("b", x=YEAR)
    async with world.reading():
        listed = await world.until_listed(lambda found: found["pending"] == 2)
    store_of = {each["key"]: each["store"] for each in listed["timers"]}
    assert len(set(store_of.values())) == 2
    async with world.serving() as server:
        text = (await server.carry_out("cancel-timers", "{}"))[1]
        others = f"does not have these stores with timers open: {', '.join(sorted(store_of.values()))}. Ask"
        assert text.startswith("0 timers cancelled.")
        assert others in text
        text = (await server.carry_out("cancel-timers", '{"key": "a"}'))[1]
        assert (store_of["a"] in text, store_of["b"] in text) == (True, False)
    assert len(_ids(await world.list())) == 2


@pytest.mark.usefixtures("no_standby")
async def test_a_version_without_a_callback_for_which_timers_are_pending_is_refused(world: World) -> None:
    world.put("a", x=YEAR)
    async with world.reading(workers=1):
        await world.until_listed(lambda found: found["pending"] == 1)
    async with world.reading(workers=1) as server:
        await until(lambda: (timers := server.document().timers) is not None and timers.pending == 1)
        world.write(HANDLER.replace("alarm", "renamed"))
        done, text = await server.carry_out("reload", "")
        assert not done
        assert "Timers are pending that call alarm, and the new version has no such callback." in text
        assert "`mldserver timers cancel --timer alarm`" in text
        assert await server.carry_out("cancel-timers", '{"timer_id": "alarm"}') == (
            True,
            "1 timer cancelled.",
        )
        assert (await server.carry_out("reload", ""))[0]


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (["--all"], {}),
        (["--key", "a", "--timer", "alarm/x"], {"key": "a", "timer_id": "alarm/x"}),
        (["--due-before", "1970-01-01T01:00"], {"due_before_ms": HOUR}),
    ],
)
def test_the_command_is_one_act(
    words: list[str], chosen: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with endpoint(path=tmp_path / "admin.sock") as server:
        server.answers["/act/cancel-timers"] = 200, {"done": True, "text": "It is done."}
        assert cli.run(["timers", "cancel", *words, "--admin", server.address]) == 0
        assert capsys.readouterr().out == "It is done.\n"
        path, body = server.asked[-1]
    assert path == "/act/cancel-timers"
    asked = json.loads(body["argument"])
    assert asked == {"key": None, "timer_id": None, "due_before_ms": None} | chosen


@pytest.mark.parametrize("words", [[], ["--all", "--key", "a"]])
def test_without_a_condition_all_must_be_said(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with endpoint(path=tmp_path / "admin.sock") as server:
        assert cli.run(["timers", "cancel", *words, "--admin", server.address]) == 2
        assert server.asked == []
    assert "Give conditions (--key, --timer, --due-before) or --all." in capsys.readouterr().err
