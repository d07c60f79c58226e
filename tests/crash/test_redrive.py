"""A server is killed while it redrives dead letters; each record comes out once, whatever dies, and no letter is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from crash.lives import Plan
from crash.local_life import LocalLife
from support.serving import until
from support.store import SqliteStore

from mldserver import cli
from mldserver.config.kinds import UnixAddress
from mldserver.config.locations import LetterPlace
from mldserver.deadletters.destinations import read_letters
from mldserver.errors import LedgerError, OperatorError
from mldserver.output.layout import DEAD_LETTERS, LEDGER
from mldserver.testing import FakeMLD, FakeStream, Habits
from tests.test_server_redrive import HANDLER, fill, ids

DEATHS = (
    "redrive.taken",
    "redrive.handled",
    "segment.written",
    "flush.registering",
    "flush.registered",
    "flush.done",
    "redrive.done",
    "redrive.taken:2",
    "redrive.handled:2",
)
SHARDS = 12
RECORDS = 300


@dataclass
class Ward:
    """One output folder with wanted letters, and the servers that live and die over it."""

    plan: Plan
    stream: FakeStream
    daemon: FakeMLD

    async def live(self, step: str | None = None) -> None:
        """See one life through: until its death, or until no letter is wanted."""
        life = LocalLife(self.plan, step)
        await life.start()
        try:
            async with asyncio.timeout(800), asyncio.TaskGroup() as group:
                ended = group.create_task(life.ended())
                if step is None:
                    await until(lambda: not self.letters())
                    self.stream.end()
                    life.stream_is_over()
                code = await ended
        finally:
            life.kill()
        assert code == (0 if step is None else -signal.SIGKILL), f"armed for {step}"

    def letters(self) -> list[int]:
        store = SqliteStore(self.plan.out / LEDGER, pipeline="poisonous", server_id="tool")
        try:
            store.peek()
            return [json.loads(each.letter.data)["id"] for each in store.letters(limit=1000)]
        except LedgerError:  # the first server has not made it yet
            return []
        finally:
            store.close()

    def want_all(self) -> None:
        store = SqliteStore(self.plan.out / LEDGER, pipeline="poisonous", server_id="tool")
        store.peek()
        store.redrive(tuple(each.id for each in store.letters(limit=1000)))
        store.close()


@pytest.fixture
def ward(tmp_path: Path) -> Iterator[Ward]:
    (tmp_path / "poisonous.py").write_text(HANDLER.format(version="1"))
    stream = FakeStream(SHARDS, seed=3, start_ms=1_800_000_000_000)
    fill(stream, 0, RECORDS)
    with tempfile.TemporaryDirectory(prefix="redrive-") as sockets:
        address = Path(sockets) / "server"
        settings = {
            "listen": UnixAddress(address),
            "attempts": 1,
            "flush_interval": 0.03,
            "settle_time_ms": 80,
            "log_file": tmp_path / "log",
            "log_format": "json",
        }
        daemon = FakeMLD(
            stream,
            f"unix:{address}",
            habits=Habits(seed=1, idle_seconds=0.01),
            supervised=True,
            backoff_seconds=0.01,
        )
        yield Ward(Plan(tmp_path / "out", "poisonous", str(tmp_path), settings), stream, daemon)


@pytest.mark.parametrize(
    "connected",
    [
        pytest.param(True, id="its shards are read"),
        pytest.param(False, id="its shards have ended", marks=pytest.mark.long),
    ],
)
async def test_a_server_killed_at_every_step_of_a_redrive_counts_each_letter_once(
    ward: Ward, tmp_path: Path, seed: int, *, connected: bool
) -> None:
    deaths = list(DEATHS)
    random.Random(seed).shuffle(deaths)
    bad = list(range(3, RECORDS, 10))
    async with asyncio.TaskGroup() as group:
        playing = group.create_task(ward.daemon.run())
        if not connected:
            ward.stream.end()
        first = LocalLife(ward.plan, None)
        await first.start()
        async with asyncio.timeout(800):
            if not connected:
                await playing
            await until(lambda: sorted(ward.letters()) == bad)
        first.kill()
        await first.ended()
        ward.want_all()
        (tmp_path / "antidote").touch()
        for death in deaths:
            await ward.live(death)
            left = set(ward.letters())
            assert left <= set(bad)
        await ward.live()
    assert ward.letters() == []
    out = ward.plan.out
    assert ids(out) + ids(out / "_late") == Counter(range(RECORDS))


async def test_letters_in_files_are_there_whatever_dies_and_run_again_from_there_once(
    ward: Ward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ward.plan.settings["dead_letters"] = LetterPlace("jsonl")
    folder = ward.plan.out / DEAD_LETTERS
    async with asyncio.TaskGroup() as group:
        group.create_task(ward.daemon.run())
        for death in ("letters.stored", "flush.registering", "letters.stored"):
            await ward.live(death)
        life = LocalLife(ward.plan, None)
        await life.start()
        async with asyncio.timeout(800):
            await until(lambda: ids_in_files(folder) == list(range(3, RECORDS, 10)))
        life.kill()
        await life.ended()
        assert ward.letters() == []
        # Of those whose position had not moved yet, the records come again, and the letters are left where they are.
        redrive = ["dead-letters", "redrive", "--from", str(folder), "--out", "out"]
        assert await asyncio.to_thread(cli.run, redrive) == 0
        (tmp_path / "antidote").touch()
        await ward.live("flush.registered")
        await ward.live()
    assert ids(ward.plan.out) + ids(ward.plan.out / "_late") == Counter(range(RECORDS))


def ids_in_files(folder: Path) -> list[int]:
    if not folder.exists():
        return []
    with contextlib.suppress(OperatorError):  # none yet
        return sorted({json.loads(each.data)["id"] for each in read_letters(str(folder), "poisonous")})
    return []
