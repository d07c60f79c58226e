"""The table of the life cycle, cell by cell, on a server that is killed: in each state, and after each command that it carried out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from crash.lives import Plan
from crash.local_life import SHOWN, LocalLife
from support.serving import until

from mldserver.config.kinds import UnixAddress
from mldserver.functions.lifecycle import CELLS, DONE, NO_OP, Command, Shown
from mldserver.testing import FakeMLD, FakeStream, Habits

pytestmark = pytest.mark.timeout(600)

HANDLER = '''
"""Waits for files: one before it loads, one before it makes a row."""
import time
from pathlib import Path

from mldserver import batches

schema = "n BIGINT NOT NULL"
windows = batches(max_rows=1000, max_age="1 hour")
version = "1"
HERE = Path({here!r})

while not (HERE / "loads").exists():
    time.sleep(0.01)


def process_record(record):
    while not (HERE / "works").exists():
        time.sleep(0.01)
    return (int(record.data),)
'''
FINALLY = {
    Command.DEPLOY: Shown.DEPLOYED,
    Command.ROLLBACK: Shown.DEPLOYED,
    Command.PAUSE: Shown.PAUSED,
    Command.RESUME: Shown.DEPLOYED,
    Command.UNDEPLOY: Shown.UNDEPLOYED,
}
"""The state that follows a command in the end."""
AFTER_A_KILL = {state: state for state in Shown} | {
    Shown.DEPLOYING: Shown.DEPLOYED,
    Shown.PAUSING: Shown.PAUSED,
    Shown.RESUMING: Shown.DEPLOYED,
    Shown.UNDEPLOYING: Shown.UNDEPLOYED,
}
"""The state of the next server in the end."""


class House:
    """A folder with a function beside a calm one, and the servers that live and die over it."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        self.folder = folder
        (folder / "calm.py").write_text("def process_record(record): ...\n")
        self.write_handler()
        self.lets("loads", "works")
        common = {"flush_interval": 0.03, "log_format": "json", "log_file": folder / "log"}
        rows = common | {"listen": UnixAddress(sockets / "rows"), "workers": 1}
        calm = common | {"listen": UnixAddress(sockets / "calm")}
        out = folder / "out"
        self._plans = [
            Plan(out / name, name, str(folder), settings)
            for name, settings in {"rows": rows, "calm": calm}.items()
        ]
        self._stream = FakeStream(1, seed=1)
        self._daemon = FakeMLD(
            self._stream,
            f"unix:{sockets / 'rows'}",
            habits=Habits(idle_seconds=0.01),
            supervised=True,
            backoff_seconds=0.01,
        )
        self.life: LocalLife

    def write_handler(self, text: str = HANDLER) -> None:
        (self.folder / "rows.py").write_text(text.format(here=str(self.folder)))

    def lets(self, *what: str) -> None:
        """Let the handler do what it would wait with."""
        for each in what:
            (self.folder / each).touch()

    def hinders(self, *what: str) -> None:
        for each in what:
            (self.folder / each).unlink(missing_ok=True)

    async def start(self, step: str | None = None) -> None:
        """Begin a life, which ends at a step if one is given."""
        self.life = LocalLife(self._plans[0], step, *self._plans[1:])
        await self.life.start()

    async def kill(self) -> None:
        self.life.kill()
        await self.life.ended()

    async def command(self, name: str, **options: str) -> tuple[bool, str]:
        result = await self.life.act(f"functions.{name}", json.dumps(options))
        assert result is not None, "the server lives"
        return result

    async def shown(self) -> str:
        result = await self.life.act(SHOWN, "")
        assert result is not None, "the server lives"
        return result[1]

    async def comes_to(self, state: Shown) -> None:
        async with asyncio.timeout(30):
            while await self.shown() != state:  # noqa: ASYNC110  # another process has no event to wait on
                await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def delivering(self) -> AsyncIterator[None]:
        """Let the daemon deliver its one record inside the block, again and again where servers die."""
        playing = asyncio.create_task(self._daemon.run())
        try:
            yield
        finally:
            playing.cancel()
            await asyncio.wait({playing})

    async def has_two_versions(self) -> None:
        """Deploy a second version, so that there is a previous one."""
        await self.start()
        await self.comes_to(Shown.DEPLOYED)
        second = self.folder / "second"
        second.mkdir()
        text = HANDLER.replace('"1"', '"2"').format(here=str(self.folder))
        (second / "rows.py").write_text(text)
        assert (await self.command("stage", path=str(second)))[0]
        assert (await self.command("deploy"))[0]
        await self.kill()

    async def bring_to(self, state: Shown) -> None:
        """Bring a fresh life to a state in which it stays."""
        if state is Shown.DEPLOYING:
            self.hinders("loads")
        if state in {Shown.PAUSING, Shown.UNDEPLOYING}:
            self.hinders("works")
        if state is Shown.FAILED:
            self.write_handler("import nothing_of_this_name\n")
        await self.start()
        if state in {Shown.DEPLOYING, Shown.FAILED}:
            await self.comes_to(state)
            return
        await self.comes_to(Shown.DEPLOYED)
        self._stream.put(b"1", "a")
        if state is not Shown.UNDEPLOYED:
            async with asyncio.timeout(30):
                await until(lambda: self._daemon.records_sent > 0)
        match state:
            case Shown.PAUSING | Shown.PAUSED:
                await self.life.act("pause", "")
            case Shown.UNDEPLOYING | Shown.UNDEPLOYED:
                await self.command("undeploy")
        await self.comes_to(state)


@contextlib.asynccontextmanager
async def house(folder: Path) -> AsyncIterator[House]:
    with tempfile.TemporaryDirectory(prefix="crash-") as sockets:
        one = House(folder, Path(sockets))
        async with one.delivering():
            yield one
            one.life.kill()


STAYS = [state for state in Shown if state is not Shown.RESUMING]
"""States in which a server can be held."""


@pytest.mark.parametrize("state", STAYS)
async def test_what_a_state_refuses_changes_nothing_and_a_kill_in_it_is_carried_on_from(
    state: Shown, tmp_path: Path
) -> None:
    async with house(tmp_path) as one:
        await one.bring_to(state)
        for command, cells in CELLS.items():
            if cells[state] is NO_OP:
                assert (await one.command(command))[0]
            elif cells[state] is not DONE:
                done, text = await one.command(command)
                assert (done, f"is {state}: {command} is not possible" in text) == (False, True)
                assert cells[state].format(name="rows") in text
        assert await one.shown() == state
        await one.kill()
        one.lets("loads", "works")
        await one.start()
        await one.comes_to(AFTER_A_KILL[state])


CARRIED_OUT = [
    pytest.param(state, command, id=f"{command} of {state}")
    for command, cells in CELLS.items()
    for state, cell in cells.items()
    if cell is DONE and state in STAYS
]


@pytest.mark.long
@pytest.mark.parametrize(("state", "command"), CARRIED_OUT)
async def test_a_server_killed_once_a_command_is_carried_out_leaves_it_to_the_next(
    state: Shown, command: Command, tmp_path: Path
) -> None:
    async with house(tmp_path) as one:
        if state is not Shown.FAILED:  # its error is in the code on the Python path
            await one.has_two_versions()
        await one.bring_to(state)
        acting = asyncio.create_task(one.command(command))
        await asyncio.wait({acting}, timeout=1)  # the worker may still wait in what it does
        one.lets("loads", "works")
        one.write_handler()
        done, text = await acting
        if state is Shown.FAILED and command is Command.ROLLBACK:
            assert "has no previous version" in text
            return
        assert done, text
        await one.kill()
        await one.start()
        is_swap = command in {Command.DEPLOY, Command.ROLLBACK}
        await one.comes_to(state if is_swap and state is Shown.PAUSED else FINALLY[command])


async def test_a_server_killed_before_it_follows_a_resume_goes_on_at_its_next_start(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        await one.bring_to(Shown.PAUSED)
        await one.kill()
        await one.start("function.wanted")
        await one.comes_to(Shown.PAUSED)
        assert await one.life.act("resume", "") is None
        await one.life.ended()
        await one.start()
        await one.comes_to(AFTER_A_KILL[Shown.RESUMING])
