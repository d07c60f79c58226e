"""Handlers that do what no handler should, and what becomes of them and of the shards beside them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.serving import until
from workers.kit import delivery, named, running

from mldserver.protocol.messages import Version
from mldserver.records import Hook, Shard
from mldserver.runtime.failure_policy import FailurePolicy, OnKeyFailure
from mldserver.runtime.interface import Delivery, MLDLine
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.worker import Limits

QUICK = FailurePolicy(attempts=2, retry_base_seconds=0)


@pytest.fixture
def runtime_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., WorkerRuntime]:
    monkeypatch.chdir(tmp_path)

    def make(text: str, policy: FailurePolicy = QUICK, workers: int = 1) -> WorkerRuntime:
        (tmp_path / "mine.py").write_text(text)
        return WorkerRuntime("mine", workers=workers, policy=policy, limits=Limits(None, None))

    return make


@pytest.mark.usefixtures("logged")
@pytest.mark.parametrize(
    "deed",
    [
        pytest.param("await asyncio.gather(leaving())", id="a task that exits", marks=pytest.mark.long),
        pytest.param(
            "asyncio.get_running_loop().stop(); await asyncio.sleep(9)",
            id="a loop that is stopped",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "[task.cancel() for task in asyncio.all_tasks() if task is not asyncio.current_task()]",
            id="all tasks cancelled",
        ),
    ],
)
async def test_whoever_ends_the_event_loop_is_found_and_the_batches_beside_it_are_done(
    runtime_of: Callable[..., WorkerRuntime], deed: str
) -> None:
    text = f"""
import asyncio, sys
async def leaving(): sys.exit("gone")
async def process_record(record):
    if record.text() == "slow": await asyncio.sleep(0.5)
    if record.text() == "bad":
        {deed}
"""
    async with running(runtime_of(text)) as runtime, asyncio.timeout(800):
        for shard in "ab":
            await runtime.open(Shard(shard))
        beside = asyncio.create_task(runtime.process(delivery("b", "slow")))
        outcome = await runtime.process(delivery("a", "good", "bad"))
        assert [letter.sequence.number for letter in outcome.effects.dead_letters] == [2]
        assert outcome.effects.dead_letters[0].error.startswith("WorkerDied")
        assert (await beside).effects.dead_letters == ()


@pytest.mark.usefixtures("logged")
async def test_a_key_whose_record_failed_before_a_death_is_parked_in_the_next_process_too(
    runtime_of: Callable[..., WorkerRuntime],
) -> None:
    text = """
import os
schema = "n STRING"
def process_record(record):
    if record.text() == "raise": raise ValueError("no")
    if record.text() == "die": os._exit(3)
    return (record.text(),)
"""
    batch = with_keys(delivery("s", "raise", "die", "die", "of the same key", "other"), "kxykz")
    policy = FailurePolicy(attempts=1, retry_base_seconds=0, on_key_failure=OnKeyFailure.PARK)
    async with running(runtime_of(text, policy)) as runtime, asyncio.timeout(800):
        await runtime.open(Shard("s"))
        outcome = await runtime.process(batch)
    assert outcome.effects.rows is not None
    assert outcome.effects.rows["n"].to_pylist() == ["other"]
    assert [
        (letter.sequence.number, letter.error.partition(":")[0]) for letter in outcome.effects.dead_letters
    ] == [
        (1, "ValueError"),
        (2, "WorkerDied"),
        (3, "WorkerDied"),
        (4, "Parked"),
    ]


def with_keys(batch: Delivery, keys: str) -> Delivery:
    _, line = batch.payload.packed()
    message = json.loads(line)
    for record, key in zip(message["records"], keys, strict=True):
        record["partitionKey"] = key
    return msgspec.structs.replace(batch, payload=MLDLine(json.dumps(message).encode(), Version.V2))


@pytest.mark.usefixtures("logged")
async def test_a_handler_that_configures_structlog_is_loaded_and_the_log_stays_the_servers(
    runtime_of: Callable[..., WorkerRuntime], logged: list[dict[str, Any]]
) -> None:
    text = """
import structlog
structlog.configure(processors=[structlog.dev.ConsoleRenderer()], logger_factory=structlog.PrintLoggerFactory())
def initialize(shard): structlog.configure(logger_factory=structlog.PrintLoggerFactory())
def process_record(record):
    print("printed")
    raise ValueError("no")
"""
    async with running(runtime_of(text)) as runtime, asyncio.timeout(800):
        await runtime.open(Shard("s"))
        await runtime.process(delivery("s", "x"))
        await until(lambda: bool(named(logged, "handler.output")))
    assert len(named(logged, "handler.loaded")) == 1
    assert "printed" in [event["text"] for event in named(logged, "handler.output")]


async def test_a_death_beside_which_others_were_at_work_does_not_use_up_a_hooks_attempts(
    runtime_of: Callable[..., WorkerRuntime], logged: list[dict[str, Any]], tmp_path: Path
) -> None:
    text = """
import asyncio, pathlib
async def let_go():
    while not pathlib.Path("go").exists():
        await asyncio.sleep(0.01)
async def shard_ended(shard):
    await let_go()
    pathlib.Path("ended").touch()
async def process_record(record):
    await let_go()
"""
    once = FailurePolicy(attempts=1, retry_base_seconds=0)
    async with running(runtime_of(text, once)) as runtime, asyncio.timeout(800):
        for shard in "ab":
            await runtime.open(Shard(shard))
        process = await runtime._workers[0].process()
        both = [
            asyncio.create_task(runtime.process(delivery("a", "x"))),
            asyncio.create_task(runtime.notify("b", Hook.SHARD_ENDED)),
        ]
        await until(lambda: process.in_hand == 2)
        os.kill(process.pid, signal.SIGKILL)
        (tmp_path / "go").touch()
        await asyncio.gather(*both)
    assert (tmp_path / "ended").exists()
    assert named(logged, "handler.hook_failed") == []


@pytest.mark.parametrize("leaves", ["sys.exit(0)", "return"])
async def test_the_child_of_a_handler_that_forks_is_no_second_worker(
    runtime_of: Callable[..., WorkerRuntime], logged: list[dict[str, Any]], leaves: str
) -> None:
    text = f"""
import os, sys
def process_record(record):
    if record.text() == "fork":
        if (child := os.fork()) == 0:
            {leaves}
        os.waitpid(child, 0)
"""
    async with running(runtime_of(text)) as runtime, asyncio.timeout(800):
        await runtime.open(Shard("a"))
        for texts in ("fork", "x"), ("y",), ("fork",), ("z",):
            outcome = await runtime.process(delivery("a", *texts))
            assert (outcome.outline.records, outcome.attempts, outcome.effects.dead_letters) == (
                len(texts),
                1,
                (),
            )
    assert named(logged, "worker.lost", "worker.garbled") == []
