"""Record processors in the inline runtime: failures go by the policy, positions by their checkpoints."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import pytest
from amazon_kclpy import kcl
from amazon_kclpy.v3 import processor
from handler.kclpy.wire import SHARD, delivery
from msgspec.structs import replace
from support.clocks import RecordingClock

from mldserver.handler.inspection import inspect_handler
from mldserver.handler.loader import Loaded
from mldserver.records import Hook, Sequence, Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.inline import InlineRuntime
from mldserver.runtime.interface import BatchOutcome

pytestmark = pytest.mark.quick


class Processor(processor.RecordProcessorBase):
    """Does what the test wants with each record; ``seen`` has the sequence numbers of each call."""

    seen: list[list[int]]
    made: list[Any]

    def __init__(self) -> None:
        self.made.append(self)
        self.checkpointer: Any = None

    def initialize(self, initialize_input: Any) -> None:
        self.shard_id = initialize_input.shard_id

    def process_records(self, process_records_input: Any) -> None:
        self.checkpointer = process_records_input.checkpointer
        self.seen.append([int(record.sequence_number) for record in process_records_input.records])
        for record in process_records_input.records:
            self.process(record)

    def process(self, record: Any) -> None:
        """Nothing."""

    def lease_lost(self, lease_lost_input: Any) -> None:
        """Nothing."""

    def shard_ended(self, shard_ended_input: Any) -> None:
        shard_ended_input.checkpointer.checkpoint()

    def shutdown_requested(self, shutdown_requested_input: Any) -> None:
        shutdown_requested_input.checkpointer.checkpoint()


class Kit:
    def __init__(self) -> None:
        self.clock = RecordingClock()
        self.runtimes: list[InlineRuntime] = []

    async def start(self, cls: type[Processor], **policy: Any) -> InlineRuntime:
        cls.seen, cls.made = [], []
        spec, findings = inspect_handler(Loaded("mine:It", sys.modules[cls.__module__], cls, "It"))
        assert spec is not None, findings
        runtime = InlineRuntime(
            spec,
            policy=FailurePolicy(**policy),
            clock=self.clock,
            random=lambda: 1.0,
            deadline_seconds=None,
        )
        await runtime.start()
        self.runtimes.append(runtime)
        await runtime.open(SHARD)
        return runtime


@pytest.fixture
async def kit() -> AsyncIterator[Kit]:
    kit = Kit()
    yield kit
    for runtime in kit.runtimes:
        await runtime.close()


def position(outcome: BatchOutcome) -> int | None:
    assert outcome.keeps_position
    return None if outcome.position is None else outcome.position.number


def events(logged: list[dict[str, Any]]) -> list[str]:
    return [entry["event"] for entry in logged]


async def test_a_batch_moves_the_position_only_as_far_as_it_was_checkpointed(kit: Kit) -> None:
    class It(Processor):
        def process(self, record: Any) -> None:
            if record.sequence_number == "3":
                self.checkpointer.checkpoint("2")

    runtime = await kit.start(It)
    assert position(await runtime.process(delivery(1, 2))) is None
    assert position(await runtime.process(delivery(3, 4))) == 2
    assert position(await runtime.process(delivery(5))) == 2
    assert It.seen == [[1, 2], [3, 4], [5]]


async def test_it_owes_what_it_was_given_until_it_has_checkpointed_all_of_it(kit: Kit) -> None:
    class It(Processor):
        def process(self, record: Any) -> None:
            if int(record.sequence_number) >= 3:
                self.checkpointer.checkpoint(record.sequence_number)

    runtime = await kit.start(It)
    outcomes = [await runtime.process(delivery(*numbers)) for numbers in ((), (1, 2), (3, 4), (4,), ())]
    assert [outcome.owes for outcome in outcomes] == [False, True, False, False, False]


async def test_what_was_checkpointed_before_a_failure_is_not_called_again(kit: Kit) -> None:
    class It(Processor):
        failures = 1

        def process(self, record: Any) -> None:
            if record.sequence_number == "3" and self.failures:
                self.failures -= 1
                raise OSError("for a moment")
            self.checkpointer.checkpoint(record.sequence_number)

    runtime = await kit.start(It)
    outcome = await runtime.process(delivery(1, 2, 3, 4))
    assert It.seen == [[1, 2, 3, 4], [3, 4]]
    assert (position(outcome), outcome.effects.dead_letters) == (4, ())


async def test_an_empty_message_is_an_empty_call_whose_checkpoint_counts(
    kit: Kit, logged: list[dict[str, Any]]
) -> None:
    class It(Processor):
        empty = 0

        def process_records(self, process_records_input: Any) -> None:
            super().process_records(process_records_input)
            if not process_records_input.records:
                self.empty += 1
                if self.empty == 2:
                    raise ValueError("no records")
                process_records_input.checkpointer.checkpoint()

    runtime = await kit.start(It)
    assert position(await runtime.process(delivery(1, 2))) is None
    assert position(await runtime.process(delivery())) == 2
    assert It.seen == [[1, 2], []]
    assert "handler.hook_failed" not in events(logged)
    assert position(await runtime.process(delivery())) == 2
    assert "handler.hook_failed" in events(logged)


async def test_hooks_say_how_far_the_processor_is_by_then(kit: Kit) -> None:
    runtime = await kit.start(Processor)
    await runtime.process(delivery(1, 2))
    assert await runtime.notify(SHARD.id, Hook.SHUTDOWN_REQUESTED) == Sequence(2)
    await runtime.process(delivery(3))
    assert await runtime.notify(SHARD.id, Hook.LEASE_LOST) == Sequence(2)


@pytest.mark.parametrize("checkpoints", [True, False])
async def test_an_end_that_is_not_checkpointed_is_told(
    kit: Kit, logged: list[dict[str, Any]], checkpoints: bool
) -> None:
    class It(Processor):
        def shard_ended(self, shard_ended_input: Any) -> None:
            if checkpoints:
                super().shard_ended(shard_ended_input)

    runtime = await kit.start(It)
    await runtime.process(delivery(1))
    await runtime.notify(SHARD.id, Hook.SHARD_ENDED)
    assert ("handler.end_not_checkpointed" in events(logged)) != checkpoints


async def test_a_processor_without_an_end_is_told_too_and_its_base_is_not_called(
    kit: Kit, logged: list[dict[str, Any]]
) -> None:
    class It(kcl.RecordProcessorBase):
        def process_records(self, records: Any, checkpointer: Any) -> None:
            checkpointer.checkpoint()

    runtime = await kit.start(It)
    assert position(await runtime.process(delivery(1))) == 1
    await runtime.notify(SHARD.id, Hook.SHARD_ENDED)
    assert events(logged).count("handler.end_not_checkpointed") == 1
    assert "handler.hook_failed" not in events(logged)


async def test_a_processor_that_never_checkpoints_is_told_every_ten_minutes(
    kit: Kit, logged: list[dict[str, Any]]
) -> None:
    runtime = await kit.start(Processor)
    for minute in range(1, 26):
        kit.clock.ms = minute * 60_000
        await runtime.process(delivery(minute))
    told = [entry for entry in logged if entry["event"] == "handler.not_checkpointing"]
    assert [(entry["seconds"], entry["position"]) for entry in told] == [(600, None), (1200, None)]


async def test_a_shard_that_is_opened_again_has_a_new_processor_and_the_old_one_cannot_checkpoint(
    kit: Kit,
) -> None:
    checkpointers = []

    class It(Processor):
        def process(self, record: Any) -> None:
            checkpointers.append(self.checkpointer)

    runtime = await kit.start(It)
    await runtime.process(delivery(1))
    await runtime.open(SHARD)
    assert len(It.made) == 2
    with pytest.raises(kcl.CheckpointError) as refusal:
        checkpointers[0].checkpoint()
    assert refusal.value.value == "ShutdownException"
    assert position(await runtime.process(delivery(1))) is None
    await runtime.forget(SHARD.id)
    await runtime.forget(SHARD.id)
    with pytest.raises(kcl.CheckpointError):
        checkpointers[1].checkpoint()


async def test_a_handler_that_keeps_no_position_has_none(kit: Kit) -> None:
    module = ModuleType("mine")
    vars(module).update(process_record=lambda record: None, shutdown_requested=lambda shard: None)
    spec, _ = inspect_handler(Loaded("mine", module, module))
    assert spec is not None
    runtime = InlineRuntime(
        spec, policy=FailurePolicy(), clock=kit.clock, random=lambda: 1.0, deadline_seconds=None
    )
    await runtime.start()
    kit.runtimes.append(runtime)
    await runtime.open(SHARD)
    assert not (await runtime.process(delivery(1))).keeps_position
    assert await runtime.notify(SHARD.id, Hook.SHUTDOWN_REQUESTED) is None


async def test_a_processor_that_waits_holds_up_no_other_shard(kit: Kit) -> None:
    released = threading.Event()

    class It(Processor):
        def process(self, record: Any) -> None:
            if self.shard_id == SHARD.id:
                released.wait()

    runtime = await kit.start(It)
    other = Shard("shardId-000000000002", "TRIM_HORIZON")
    await runtime.open(other)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(runtime.process(delivery(1)))
        await runtime.process(replace(delivery(5), shard_id=other.id))
        assert not waiting.done()
        released.set()
    assert sorted(It.seen) == [[1], [5]]


async def test_two_processors_of_a_shard_never_run_at_the_same_time(kit: Kit) -> None:
    released, entered = threading.Event(), threading.Event()

    class It(Processor):
        def process(self, record: Any) -> None:
            if len(self.made) == 1:
                entered.set()
                released.wait()

    runtime = await kit.start(It)
    abandoned = asyncio.create_task(runtime.process(delivery(1)))
    while not entered.is_set():  # noqa: ASYNC110  # set by a thread
        await asyncio.sleep(0.001)
    abandoned.cancel()
    await runtime.forget(SHARD.id)
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(runtime.open(SHARD))
        await asyncio.wait({opening}, timeout=0.05)
        assert (opening.done(), len(It.made)) == (False, 1)
        released.set()
    assert len(It.made) == 2
    await runtime.process(delivery(1))
    await asyncio.wait({abandoned})


async def test_a_shards_thread_ends_with_it(kit: Kit) -> None:
    runtime = await kit.start(Processor)
    await runtime.process(delivery(1))
    (thread,) = [each for each in threading.enumerate() if each.name == f"mldserver-{SHARD.id}"]
    await runtime.forget(SHARD.id)
    thread.join()
    await runtime.open(SHARD)
    await runtime.process(delivery(1))
    assert Processor.seen == [[1], [1]]
