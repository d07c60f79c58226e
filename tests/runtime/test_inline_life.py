"""The inline runtime's life: start, opening shards, life-cycle hooks, cancellation, end."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mldserver import Retry
from mldserver.errors import HandlerHalted, InternalError
from mldserver.handler.inspection import load_spec
from mldserver.records import Hook, Shard
from mldserver.runtime.failure_policy import FailurePolicy, OnFailure
from mldserver.runtime.inline import InlineRuntime

pytestmark = pytest.mark.quick

ONE = FailurePolicy(attempts=1)
HALT = FailurePolicy(on_failure=OnFailure.HALT)
SCHEMA = "n INT"


async def test_a_class_whose_instance_lacks_a_hook_fails_as_its_init_would(kit: Any) -> None:
    class Strange:
        schema = SCHEMA

        def __new__(cls) -> Any:
            return None

        def process_record(self, record: Any) -> Any:
            return (record.json(),)

    runtime = await kit.start(Strange, policy=FailurePolicy(attempts=1, on_failure=OnFailure.HALT))
    with pytest.raises(HandlerHalted, match="__init__ failed for good: AttributeError: 'NoneType' object"):
        await runtime.open(Shard("a"))


async def test_life_cycle_hooks_are_called_with_the_shard(kit: Any, shard: Any) -> None:
    seen = []

    async def shard_ended(shard: Any) -> None:
        seen.append(("shard_ended", shard))

    runtime = await kit.start(
        process_record=lambda record: None,
        initialize=lambda shard: seen.append(("initialize", shard)),
        lease_lost=lambda shard: seen.append(("lease_lost", shard)),
        shard_ended=shard_ended,
    )
    await runtime.open(shard)
    for hook in (Hook.LEASE_LOST, Hook.SHARD_ENDED, Hook.SHUTDOWN_REQUESTED):
        await runtime.notify(shard.id, hook)
    assert seen == [("initialize", shard), ("lease_lost", shard), ("shard_ended", shard)]


async def test_a_failing_hook_is_tried_again_then_logged_and_never_raised(
    kit: Any, shard: Any, logged: Any
) -> None:
    def lease_lost(shard: Any) -> None:
        raise OSError("away")

    runtime = await kit.start(process_record=lambda record: None, lease_lost=lease_lost)
    await runtime.open(shard)
    await runtime.notify(shard.id, Hook.LEASE_LOST)
    assert kit.clock.slept == [0.1, 0.2]
    told = [(event["event"], event["level"]) for event in logged[1:]]
    assert told == [
        ("handler.failed", "warning"),
        ("handler.failed", "debug"),
        ("handler.hook_failed", "error"),
    ]
    assert (logged[-1]["attempts"], logged[-1]["what"]) == (3, "OSError: away")


@pytest.mark.parametrize("place", ["__init__", "initialize"])
async def test_opening_is_tried_until_it_succeeds_with_a_fresh_instance_each_time(
    kit: Any, shard: Any, place: Any, logged: Any
) -> None:
    made = []

    class Slow:
        def __init__(self) -> None:
            made.append(self)
            self.fail("__init__")

        def initialize(self, shard: Any) -> None:
            self.fail("initialize")

        def fail(self, here: Any) -> None:
            if here == place and len(made) < 6:
                raise ConnectionError("not yet")

        def process_record(self, record: Any) -> None: ...

    runtime = await kit.start(Slow)
    await runtime.open(shard)
    assert len(made) == 6
    assert kit.clock.slept == [0.1, 0.2, 0.4, 0.8, 1.6]
    failed = [event for event in logged if event["event"] == "handler.failed"]
    assert [event["hook"] for event in failed] == [place] * 5
    levels = [event["level"] for event in failed]
    assert levels == ["warning", "debug", "error", "debug", "debug"], (
        "from the policy's attempts on a person is called, once a minute"
    )
    await runtime.process(kit.delivery(1))


async def test_under_halt_opening_is_given_up_after_the_attempts(kit: Any, shard: Any, logged: Any) -> None:
    def initialize(shard: Any) -> None:
        raise ConnectionError("never")

    runtime = await kit.start(policy=HALT, process_record=lambda record: None, initialize=initialize)
    with pytest.raises(HandlerHalted, match="initialize failed for good: ConnectionError: never"):
        await runtime.open(shard)
    assert kit.clock.slept == [0.1, 0.2]
    assert logged[-1]["event"] == "handler.halted"


async def test_a_cancelled_opening_leaves_the_shard_closed(kit: Any, shard: Any) -> None:
    gate = asyncio.Event()

    async def initialize(shard: Any) -> None:
        gate.set()
        await asyncio.Event().wait()

    runtime = await kit.start(process_record=lambda record: None, initialize=initialize)
    opening = asyncio.create_task(runtime.open(shard))
    await gate.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    with pytest.raises(InternalError, match="not open"):
        await runtime.process(kit.delivery(1))


async def test_a_cancelled_batch_stops_and_the_next_one_works(kit: Any, shard: Any) -> None:
    begun, go = threading.Event(), threading.Event()

    def process_record(record: Any) -> None:
        begun.set()
        go.wait()

    runtime = await kit.start(process_record=process_record)
    await runtime.open(shard)
    running = asyncio.create_task(runtime.process(kit.delivery(1, 2)))
    await asyncio.to_thread(begun.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    go.set()
    assert (await runtime.process(kit.delivery(1))).outline.records == 1


async def test_the_handler_is_told_at_start(kit: Any, shard: Any, logged: Any, column: Any) -> None:
    runtime = InlineRuntime(load_spec("handlers.raw"), policy=ONE, clock=kit.clock, random=lambda: 0.5)
    kit.runtimes.append(runtime)
    await runtime.start()
    (loaded,) = logged
    assert (loaded["event"], loaded["hooks"], loaded["windows"]) == (
        "handler.loaded",
        ["process_record"],
        "tumbling, 1 h of arrival time",
    )
    await runtime.open(shard)
    assert column(await runtime.process(kit.delivery(b"abc")), "data") == [b"abc"]


async def test_warnings_of_the_check_are_logged_with_the_handler(
    kit: Any, logged: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nearly_mine.py").write_text("def process_record(r): ...\ndef shard_end(shard): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    runtime = InlineRuntime(load_spec("nearly_mine"), policy=ONE, clock=kit.clock, random=lambda: 0.5)
    kit.runtimes.append(runtime)
    await runtime.start()
    del sys.modules["nearly_mine"]
    assert logged[0]["advice"].endswith("shard_end is never called or read; did you mean shard_ended?")


async def test_a_hook_may_say_when_it_is_to_be_called_again(kit: Any, shard: Any) -> None:
    busy = [Retry("busy", after=33)]

    def initialize(shard: Any) -> None:
        if busy:
            raise busy.pop()

    runtime = await kit.start(process_record=lambda record: None, initialize=initialize)
    await runtime.open(shard)
    assert kit.clock.slept == [33]
