"""Batches that are handed to their worker at once, and whose answers wake nobody."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from support.serving import until
from workers.kit import delivery, named, running

from mldserver.errors import InternalError
from mldserver.records import Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.interface import BatchOutcome
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.worker import Limits

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("logged")

HANDLER = """
import pathlib, time

def process_record(record):
    pathlib.Path(record.text()).touch()
    while record.text() == "long" and not pathlib.Path("go").exists():
        time.sleep(0.01)
"""


DESCRIPTORS_GONE = """
import os, pathlib, resource

schema = "text STRING"
kept = []

def process_record(record):
    if record.text() == "all" and not pathlib.Path("once").exists():
        pathlib.Path("once").touch()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        try:
            while True:
                kept.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
    return ("x" * 20_000,)
"""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerRuntime:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HANDLER)
    return WorkerRuntime("mine", workers=1, policy=FailurePolicy(), limits=Limits(None, None))


@pytest.mark.parametrize("size", [1, 50_000], ids=["inside the message", "in the arena"])
async def test_an_answer_is_there_without_anybody_who_waits(runtime: WorkerRuntime, size: int) -> None:
    async with running(runtime), asyncio.timeout(60):
        for shard in "abc":
            await runtime.open(Shard(shard))
        begun = [runtime.begin(delivery(shard, "x", key="k" * size)) for shard in "abc"]
        for batch in begun:
            assert isinstance(batch, asyncio.Future)
            outcome = await batch
            assert isinstance(outcome, BatchOutcome)
            assert outcome.outline.records == 1
        process = await runtime._workers[0].process()
        assert (process.in_hand, process.arena.lines) == (0, 0)


async def test_where_the_process_ends_what_is_left_is_to_be_awaited(
    runtime: WorkerRuntime, tmp_path: Path
) -> None:
    async with running(runtime), asyncio.timeout(60):
        await runtime.open(Shard("a"))
        begun = runtime.begin(delivery("a", "long"))
        assert isinstance(begun, asyncio.Future)
        await until((tmp_path / "long").exists)
        os.kill((await runtime._workers[0].process()).pid, signal.SIGKILL)
        (tmp_path / "go").touch()
        rest: Awaitable[BatchOutcome] = await begun  # type: ignore[assignment]  # see Begun
        assert (await rest).outline.records == 1


async def test_whoever_cancels_a_batch_tells_the_worker_and_holds_up_nobody(
    runtime: WorkerRuntime, tmp_path: Path
) -> None:
    async with running(runtime), asyncio.timeout(60):
        await runtime.open(Shard("a"))
        begun = runtime.begin(delivery("a", "long"))
        assert isinstance(begun, asyncio.Future)
        await until((tmp_path / "long").exists)
        assert begun.cancel()
        assert not begun.cancel()
        process = await runtime._workers[0].process()
        assert process.in_hand == 1, "until it is answered all the same"
        (tmp_path / "go").touch()
        await until(lambda: process.in_hand == 0)
        pass_ = await runtime._workers[0].gate.enter(alone=True)
        runtime._workers[0].gate.leave(pass_)
        assert (await runtime.process(delivery("a", "next"))).outline.records == 1


async def test_what_cannot_go_at_once_is_to_be_awaited(runtime: WorkerRuntime) -> None:
    with pytest.raises(InternalError, match="not open"):
        await runtime.begin(delivery("a", "x"))  # type: ignore[misc]  # it is a coroutine
    async with running(runtime), asyncio.timeout(60):
        await runtime.open(Shard("a"))
        gate = runtime._workers[0].gate
        pass_ = await gate.enter(alone=True)
        waits = runtime.begin(delivery("a", "x", key="k" * 50_000))
        assert asyncio.iscoroutine(waits)
        gate.leave(pass_)
        assert (await waits).outline.records == 1


async def test_a_process_whose_descriptors_are_used_up_leaves_its_batch_to_the_next(
    runtime: WorkerRuntime, tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    (tmp_path / "mine.py").write_text(DESCRIPTORS_GONE)
    async with running(runtime), asyncio.timeout(60):
        await runtime.open(Shard("a"))
        for text in ("with what is imported late", "all"):
            outcome = await runtime.process(delivery("a", text))
        assert outcome.rows is not None
        assert outcome.rows.num_rows == 1
    (lost,) = named(logged, "worker.lost")
    assert "The rows of a batch cannot be handed over" in lost["stacks"]
