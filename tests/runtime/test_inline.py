"""The inline runtime: every hook, every way to fail, retries, dead letters, halt."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from mldserver.records import Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.interface import BatchOutcome, outcome_of
from mldserver.runtime.values import Converter

pytestmark = pytest.mark.quick

ONE = FailurePolicy(attempts=1)
SCHEMA = "n INT"


async def test_synchronous_hooks_run_on_one_thread_that_is_not_the_loops(kit: Any, shard: Any) -> None:
    threads = set()
    runtime = await kit.start(
        process_record=lambda record: threads.add(threading.current_thread()),
        initialize=lambda shard: threads.add(threading.current_thread()),
    )
    await asyncio.gather(*(runtime.open(Shard(name)) for name in "ab"))
    await asyncio.gather(*(runtime.process(kit.line([kit.record(1, 1)], shard=name)) for name in "ab"))
    assert len(threads) == 1
    assert threading.current_thread() not in threads


@pytest.mark.parametrize(
    ("more", "on_the_loop"),
    [({}, True), ({"blocking": True}, False), ({"concurrency": 2}, False)],
    ids=["it need not wait", "it blocks", "it has lanes"],
)
async def test_at_once_synchronous_hooks_run_on_the_loop_unless_they_may_wait(
    kit: Any, shard: Any, more: Any, on_the_loop: bool
) -> None:
    threads = set()
    runtime = await kit.start(
        at_once=True,
        process_record=lambda record: threads.add(threading.current_thread()),
        initialize=lambda shard: threads.add(threading.current_thread()),
        **more,
    )
    await runtime.open(shard)
    begun = runtime.begin(kit.delivery(1))
    assert isinstance(begun, BatchOutcome) is on_the_loop
    await outcome_of(begun)
    assert (threads == {threading.current_thread()}) is on_the_loop


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_value_with_an_equality_of_its_own_is_no_row_and_harms_no_other(
    kit: Any, shard: Any, column: Any, at_once: bool
) -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise SystemExit("compared")

        __hash__ = None  # type: ignore[assignment]  # nobody asks for it

    def process_records(batch: Any) -> list[Any]:
        return [(1,), Odd(), None]

    runtime = await kit.start(at_once=at_once, policy=ONE, schema=SCHEMA, process_records=process_records)
    await runtime.open(shard)
    outcome = await outcome_of(runtime.begin(kit.delivery(1, 2, 3)))
    assert (column(outcome, "n"), kit.dead(outcome)) == ([1], [2])


@pytest.mark.parametrize("at_once", [False, True])
async def test_rows_that_cannot_be_built_together_are_built_one_by_one(
    kit: Any, shard: Any, column: Any, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, called = Converter.array, []

    def too_much(self: Converter, values: Any) -> Any:
        if len(values) > 1:
            raise MemoryError
        return array(self, values)

    monkeypatch.setattr(Converter, "array", too_much)

    def process_record(record: Any) -> tuple[int]:
        called.append(record)
        return (record.sequence_number,)

    runtime = await kit.start(at_once=at_once, policy=ONE, schema=SCHEMA, process_record=process_record)
    await runtime.open(shard)
    outcome = await outcome_of(runtime.begin(kit.delivery(1, 2, 3)))
    assert (column(outcome, "n"), kit.dead(outcome)) == ([1, 2, 3], [])
    assert len(called) <= 9  # all, then by halves


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_synchronous_hook_may_run_a_loop_of_its_own(
    kit: Any, shard: Any, column: Any, at_once: bool
) -> None:
    async def ask() -> int:
        return 7

    runtime = await kit.start(
        at_once=at_once, policy=ONE, schema=SCHEMA, process_record=lambda _: (asyncio.run(ask()),)
    )
    await runtime.open(shard)
    outcome = await outcome_of(runtime.begin(kit.delivery(1, 2)))
    assert (column(outcome, "n"), kit.dead(outcome)) == ([7, 7], [])


async def test_an_initialize_that_has_held_up_the_loop_for_too_long_is_told(
    kit: Any, shard: Any, logged: Any
) -> None:
    def initialize(_: Any) -> None:
        kit.clock.ms += 61_000

    runtime = await kit.start(at_once=True, deadline=60, initialize=initialize, process_record=lambda _: None)
    await runtime.open(shard)
    (told,) = [event for event in logged if event["event"] == "handler.slow"]
    assert (told["hook"], told["seconds"]) == ("initialize", 61)


async def test_a_call_that_has_held_up_the_loop_for_too_long_is_told(
    kit: Any, shard: Any, logged: Any
) -> None:
    clock = kit.clock

    def process_record(record: Any) -> None:
        clock.ms += 61_000

    runtime = await kit.start(at_once=True, deadline=60.0, process_record=process_record)
    await runtime.open(shard)
    assert isinstance(runtime.begin(kit.delivery(1)), BatchOutcome)
    (line,) = [line for line in logged if line["event"] == "handler.slow"]
    assert line["seconds"] == 61
    assert "blocking = True" in line["advice"]


async def test_asynchronous_hooks_run_on_the_loop(kit: Any) -> None:
    seen = []

    async def process_record(record: Any) -> None:
        seen.append(threading.current_thread())

    await kit.run(1, process_record=process_record)
    assert seen == [threading.current_thread()]


async def test_data_that_is_never_read_is_never_decoded(kit: Any, shard: Any) -> None:
    runtime = await kit.start(process_record=lambda record: None)
    await runtime.open(shard)
    assert (await runtime.process(kit.line([kit.record(1, 1, data="%%%")]))).effects.dead_letters == ()
