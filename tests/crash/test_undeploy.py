"""A server is killed at every step of an undeploy: the next one completes it, and a deploy then misses and doubles nothing."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import sys
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from support.serving import quick, until

from mldserver.base.kill_points import arm
from mldserver.errors import EXIT_CLEAN
from mldserver.functions.lifecycle import Command, Shown
from mldserver.server import Server
from mldserver.testing import FakeMLD, FakeStream, LocalEngine

pytestmark = pytest.mark.timeout(600)

RECORDS, BEFORE = 60, 25
STEPS = (
    "function.wanted",
    "window.cutting",
    "window.cut",
    "attempt.begun",
    "job.running",
    "attempt.staged",
    "window.committed",
    "window.renamed",
    "window.visible",
    "window.published",
    "server.joined",
    *(f"ledger.{moment}:{number}" for number in range(1, 15) for moment in ("written", "committed")),
)
FEW = 3
HANDLER = '''
"""A row for each record."""
from mldserver import batches

schema = "n BIGINT NOT NULL"
windows = batches(max_rows=1000, max_age="1 hour")


def process_record(record):
    return (int(record.data),)
'''


def records(count: int, *, ends: bool) -> FakeStream:
    stream = FakeStream(1, seed=1, start_ms=1_800_000_000_000)
    for number in range(count):
        stream.put(str(number).encode(), f"key-{number}")
    if ends:
        stream.end()
    return stream


def _die_in_an_undeploy(out: Path, step: str, keep: bool) -> None:  # of a new process
    sys.path.insert(0, str(out.parent))
    os.chdir(out.parent)

    async def die() -> None:
        server = Server(quick(out, "plain"), engine=LocalEngine())
        async with asyncio.TaskGroup() as group:
            group.create_task(server.run())
            daemon = FakeMLD(records(BEFORE, ends=False), await server.listening())
            delivering = group.create_task(daemon.run())
            await until(lambda: server.status().rows_durable == BEFORE)
            arm(step)
            await server.only.command(Command.UNDEPLOY, keep=keep)
            await until(lambda: server.only.shown is Shown.UNDEPLOYED)
            delivering.cancel()
            server.stop("the step did not come")

    asyncio.run(die())


def published(out: Path) -> list[int]:
    files = [str(path) for path in out.glob("window=*/*.parquet")]
    return sorted(ds.dataset(files, format="parquet").to_table()["n"].to_pylist()) if files else []


@pytest.mark.usefixtures("no_standby")
@pytest.mark.parametrize("keep", [False, True])
async def test_a_server_killed_in_an_undeploy_completes_it_at_its_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, *, keep: bool, long: bool
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "plain.py").write_text(HANDLER)
    died = 0
    for step in STEPS if long else random.Random(seed).sample(STEPS, FEW):
        out = tmp_path / step.replace(":", "-") / "out"
        out.parent.mkdir()
        (out.parent / "plain.py").write_text(HANDLER)
        killed = multiprocessing.get_context("spawn").Process(
            target=_die_in_an_undeploy, args=(out, step, keep)
        )
        killed.start()
        await asyncio.to_thread(killed.join, 60)
        assert killed.exitcode in {0, -signal.SIGKILL}, step
        died += killed.exitcode != 0
        server = Server(quick(out, "plain"), engine=LocalEngine())
        async with asyncio.TaskGroup() as group, asyncio.timeout(60):
            life = group.create_task(server.run())
            await until(lambda: server.only.shown in {Shown.UNDEPLOYED, Shown.DEPLOYED})  # noqa: B023  # of this turn
            if server.only.shown is Shown.DEPLOYED:  # it was killed before anything was wanted
                await server.only.command(Command.UNDEPLOY, keep=keep)
                await until(lambda: server.only.shown is Shown.UNDEPLOYED)  # noqa: B023  # see above
            assert published(out) == list(range(BEFORE)), step
            await server.only.command(Command.DEPLOY)
            await until(lambda: server.only.shown is Shown.DEPLOYED)  # noqa: B023  # see above
            await FakeMLD(records(RECORDS, ends=True), await server.listening()).run()
            await server.finished()
            server.stop("the test is over")
        assert life.result() == EXIT_CLEAN
        assert published(out) == list(range(RECORDS)), step
    assert died >= (len(STEPS) // 2 if long else 1)
