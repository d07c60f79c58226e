"""A real server with functions that raise, flood the log, hang, kill their workers and cannot be loaded: a healthy one goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from support.host import Function, Host, hosting

from mldserver.testing import FakeMLD, FakeStream, Habits

RECORDS = 60
HEALTHY = """
def process_record(record):
    with open("healthy", "a") as file:
        file.write(f"{record.text()}\\n")
"""
RAISES = "def process_record(record): raise ValueError('always')\n"
FLOODS = """
def process_records(records):
    for number in range(20_000):
        print("flood", number)
"""
HANGS = """
import pathlib
import time

def process_record(record):
    while not pathlib.Path("go").exists():
        time.sleep(0.02)
"""
KILLS = """
import os
import signal

def process_record(record):
    os.kill(os.getpid(), signal.SIGKILL)
"""
BROKEN = "def process_record(record):\n"
LISTENS = {"listen": "127.0.0.1:0", "workers": 1}
FUNCTIONS = (
    Function("broken", BROKEN, LISTENS),
    Function("raises", RAISES, LISTENS),
    Function("floods", FLOODS, LISTENS),
    Function("hangs", HANGS, LISTENS),
    Function("kills", KILLS, {**LISTENS, "attempts": 2}),
    Function("healthy", HEALTHY, LISTENS),
)


def filled(records: int = RECORDS) -> FakeStream:
    stream = FakeStream(1, seed=1)
    for number in range(records):
        stream.put(str(number).encode(), f"key-{number}")
    stream.end()
    return stream


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with hosting(tmp_path, *FUNCTIONS) as host:
        await host.start()
        yield host


async def daemon_of(host: Host, function: str, records: int = RECORDS) -> FakeMLD:
    return FakeMLD(filled(records), await host.address(function), habits=Habits(max_records=5))


async def test_a_function_delivers_all_while_others_raise_flood_hang_die_and_cannot_be_loaded(
    host: Host, tmp_path: Path
) -> None:
    harmful = {name: await daemon_of(host, name, 3) for name in ("raises", "floods", "hangs", "kills")}
    healthy = await daemon_of(host, "healthy")
    async with asyncio.TaskGroup() as group:
        harm = {name: group.create_task(daemon.run()) for name, daemon in harmful.items()}
        # Each has done its harm, and still does, before the healthy one begins.
        await host.until(partial(host.named, "handler.dead_letter", function="raises"))
        await host.until(partial(host.named, "log.lost", function="floods"))
        await host.until(partial(host.named, "worker.lost", function="kills"))
        await host.until(partial(host.named, "function.failed", function="broken"))
        await healthy.run()
        assert not harm["hangs"].done()
        (tmp_path / "go").touch()
    assert (healthy.violations, healthy.life, healthy.finished) == ([], 1, True)
    assert (tmp_path / "healthy").read_text().split() == [str(number) for number in range(RECORDS)]
    assert all(daemon.finished for daemon in harmful.values()), "each goes on with its own stream"
    assert host.named("worker.lost", "connection.failed", "handler.dead_letter", function="healthy") == []
    assert {event["pipeline"] for event in host.named("worker.lost")} == {"kills"}
    [failed] = host.named("function.failed")
    assert "broken_handler.py" in str(failed)
    assert await host.stopped() == 0
