"""The inline runtime's life: start, opening shards, life-cycle hooks, cancellation, end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from mldserver import Retry
from mldserver.errors import HandlerHalted, InternalError
from mldserver.handler.inspection import load_spec
from mldserver.records import Shard
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
