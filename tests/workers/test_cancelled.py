"""A batch that was cancelled ends in its worker before the next one of its shard begins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.serving import until
from workers.kit import delivery, named, running

from mldserver.records import Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.worker import Limits

SLOW_TO_END = """
import asyncio, os, pathlib
book = os.open("book", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def note(text):
    os.write(book, (text + "\\n").encode())

async def initialize(shard):
    note("open " + shard.id)

async def process_record(record):
    note("begin " + record.text())
    try:
        if record.text() == "long" and not pathlib.Path("again").exists():
            await asyncio.sleep(3600)
    except asyncio.CancelledError:
        note("rolls back " + record.text())
        while not pathlib.Path("go").exists():
            await asyncio.sleep(0.01)
        raise
    finally:
        note("end " + record.text())
"""


async def test_what_follows_a_call_that_was_given_up_begins_when_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SLOW_TO_END)
    runtime = WorkerRuntime("mine", workers=1, policy=FailurePolicy(), limits=Limits(None, None))

    def noted() -> list[str]:
        return (tmp_path / "book").read_text().split("\n")[:-1]

    async with running(runtime), asyncio.timeout(800):
        await runtime.open(Shard("a"))
        await runtime.open(Shard("b"))
        given_up = asyncio.create_task(runtime.process(delivery("a", "long")))
        await until(lambda: "begin long" in noted())
        given_up.cancel()
        await until(lambda: "rolls back long" in noted())
        (tmp_path / "again").touch()
        # Another connection has the shard now; then a third one, as the second has gone too.
        second = asyncio.create_task(runtime.open(Shard("a")))
        await runtime.process(delivery("b", "beside"))
        second.cancel()
        third = asyncio.create_task(runtime.open(Shard("a")))
        await runtime.process(delivery("b", "beside"))
        (tmp_path / "go").touch()
        await third
        await runtime.process(delivery("a", "long", "next"))
    assert [each for each in noted() if "beside" not in each] == [
        "open a",
        "open b",
        *("begin long", "rolls back long", "end long"),
        *("open a", "begin long", "end long", "begin next", "end next"),
    ]
    assert named(logged, "worker.lost") == []
