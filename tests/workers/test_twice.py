"""What the death of a worker makes run twice: what it had not answered, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.serving import until
from workers.kit import delivery, named, running

from mldserver.records import Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.worker import Limits
from mldserver.workers.worker_process import WorkerProcess

HANDLER = """
import os, pathlib, time
book = os.open("book", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def note(text):
    os.write(book, (text + "\\n").encode())

def initialize(shard):
    note("open " + shard.id)

def process_record(record):
    note(record.text())
    while record.text() == "b2" and not pathlib.Path("go").exists():
        time.sleep(0.01)
"""


async def test_only_the_batches_that_a_dead_worker_had_not_answered_are_called_again_after_initialize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HANDLER)
    runtime = WorkerRuntime("mine", workers=1, policy=FailurePolicy(), limits=Limits(None, None))

    def noted() -> Counter[str]:
        return Counter((tmp_path / "book").read_text().split("\n")[:-1])

    async with running(runtime), asyncio.timeout(800):
        for shard in "abc":
            await runtime.open(Shard(shard))
        await runtime.process(delivery("a", "a1", "a2", "a3"))
        await runtime.process(delivery("b", "b0"))
        process: WorkerProcess = await runtime._workers[0].process()
        begun = asyncio.create_task(runtime.process(delivery("b", "b1", "b2", "b3")))
        await until(lambda: noted()["b2"] == 1)
        waits = asyncio.create_task(runtime.process(delivery("c", "c1", "c2")))
        await until(lambda: process.in_hand == 2)
        os.kill(process.pid, signal.SIGKILL)
        (tmp_path / "go").touch()
        assert [(await task).outline.records for task in (begun, waits)] == [3, 2]
        await runtime.process(delivery("a", "a4"))
    once = ("a1", "a2", "a3", "a4", "b0", "b3", "c1", "c2")
    twice = ("b1", "b2", "open a", "open b", "open c")
    assert noted() == Counter(once) + Counter(twice) + Counter(twice)
    assert [lost["batches"] for lost in named(logged, "worker.lost")] == [2]
    assert sorted(event["shard"] for event in named(logged, "shard.reopened")) == ["a", "b", "c"]


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
