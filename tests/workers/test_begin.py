"""Batches that are handed to their worker at once, and whose answers wake nobody."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.serving import until
from workers.kit import delivery, named, running

from mldserver.errors import HandlerHalted, InternalError
from mldserver.records import Shard
from mldserver.runtime.failure_policy import FailurePolicy, OnFailure
from mldserver.runtime.interface import BatchOutcome, Begun, outcome_of
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.worker import Limits

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
    async with running(runtime, standby=False), asyncio.timeout(800):
        for shard in "abc":
            await runtime.open(Shard(shard))
        begun = [runtime.begin(delivery(shard, "x", key="k" * size)) for shard in "abc"]
        for batch in begun:
            assert isinstance(batch, asyncio.Future)
            outcome = await batch
            assert isinstance(outcome, BatchOutcome)
            assert outcome.outline.records == 1
        process = await runtime._workers[0].process()
        assert (process.in_hand, process.arena.allocated) == (0, {})


async def test_where_the_process_ends_what_is_left_is_to_be_awaited(
    runtime: WorkerRuntime, tmp_path: Path
) -> None:
    async with running(runtime), asyncio.timeout(800):
        await runtime.open(Shard("a"))
        begun = runtime.begin(delivery("a", "long"))
        assert isinstance(begun, asyncio.Future)
        await until((tmp_path / "long").exists)
        os.kill((await runtime._workers[0].process()).pid, signal.SIGKILL)
        (tmp_path / "go").touch()
        rest: Awaitable[BatchOutcome] = await begun  # type: ignore[assignment]  # see Begun
        assert (await rest).outline.records == 1


async def test_a_shard_that_was_idle_when_its_process_died_is_opened_again_for_its_next_batch(
    runtime: WorkerRuntime, logged: list[dict[str, Any]]
) -> None:
    async with running(runtime), asyncio.timeout(800):
        await runtime.open(Shard("a"))
        worker = runtime._workers[0]
        died = await worker.process()
        os.kill(died.pid, signal.SIGKILL)
        await until(lambda: worker.ready not in {None, died})
        outcome = await outcome_of(runtime.begin(delivery("a", "x")))
        assert (outcome.outline.records, outcome.attempts, outcome.effects.dead_letters) == (1, 1, ())
    assert len(named(logged, "shard.reopened")) == 1


async def test_whoever_cancels_a_batch_tells_the_worker_and_holds_up_nobody(
    runtime: WorkerRuntime, tmp_path: Path
) -> None:
    async with running(runtime, standby=False), asyncio.timeout(800):
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
    async with running(runtime, standby=False), asyncio.timeout(800):
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
    async with running(runtime), asyncio.timeout(800):
        await runtime.open(Shard("a"))
        for text in ("with what is imported late", "all"):
            outcome = await runtime.process(delivery("a", text))
        assert outcome.effects.rows is not None
        assert outcome.effects.rows.num_rows == 1
    (lost,) = named(logged, "worker.lost")
    assert "The rows of a batch cannot be handed over" in lost["stacks"]


IN_ORDER = """
import asyncio, pathlib

async def process_record(record):
    with open("book", "a") as book:
        book.write("begins " + record.text() + "\\n")
    while record.text() == "long" and not pathlib.Path("go").exists():
        await asyncio.sleep(0.01)
    with open("book", "a") as book:
        book.write("ends " + record.text() + "\\n")
    if record.text() == "fails":
        raise ValueError
"""


def begun_together(runtime: WorkerRuntime, *texts: str) -> list[Begun]:
    """Begin batches of one shard, each behind the one before it."""
    begun = [
        runtime.begin(replace(delivery("a", text), behind=number > 1)) for number, text in enumerate(texts, 1)
    ]
    assert all(isinstance(each, asyncio.Future) for each in begun)
    return begun


async def test_batches_of_a_shard_that_are_sent_together_never_overlap(
    runtime: WorkerRuntime, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(IN_ORDER)
    async with running(runtime), asyncio.timeout(800):
        await runtime.open(Shard("a"))
        texts = ["long", "second", "third"]
        begun = begun_together(runtime, *texts)
        await until((tmp_path / "book").exists)
        (tmp_path / "go").touch()
        assert [(await outcome_of(each)).outline.records for each in begun] == [1, 1, 1]
    assert (tmp_path / "book").read_text().split("\n")[:-1] == [
        f"{what} {text}" for text in texts for what in ("begins", "ends")
    ]


@pytest.mark.parametrize(
    "handler", [IN_ORDER, IN_ORDER.replace("async ", "").replace("await asyncio", "time")]
)
async def test_behind_one_that_fails_none_reaches_the_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(f"import time\n{handler}")
    policy = FailurePolicy(attempts=1, on_failure=OnFailure.HALT)
    runtime = WorkerRuntime("mine", workers=1, policy=policy, limits=Limits(None, None))
    async with running(runtime), asyncio.timeout(800):
        await runtime.open(Shard("a"))
        halted, behind = begun_together(runtime, "fails", "second")
        with pytest.raises(HandlerHalted):
            await outcome_of(halted)
        with pytest.raises(InternalError, match="before this one has failed"):
            await outcome_of(behind)
        assert (tmp_path / "book").read_text() == "begins fails\nends fails\n"
        # The server knows of it: what it sends next is worked on.
        assert (await runtime.process(delivery("a", "third"))).outline.records == 1


async def test_where_the_process_ends_all_that_it_had_is_done_again_in_order(
    runtime: WorkerRuntime, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(IN_ORDER)
    async with running(runtime), asyncio.timeout(800):
        await runtime.open(Shard("a"))
        begun = begun_together(runtime, "long", "second")
        await until((tmp_path / "book").exists)
        os.kill((await runtime._workers[0].process()).pid, signal.SIGKILL)
        (tmp_path / "go").touch()
        for each in begun:
            assert (await outcome_of(each)).outline.records == 1
    lines = (tmp_path / "book").read_text().split("\n")[:-1]
    assert lines == ["begins long", "begins long", "ends long", "begins second", "ends second"]
