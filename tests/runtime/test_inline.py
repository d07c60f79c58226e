"""The inline runtime: every hook, every way to fail, retries, dead letters, halt."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from mldserver.records import Sequence, Shard
from mldserver.runtime.failure_policy import FailurePolicy, OnFailure
from mldserver.runtime.interface import BatchOutcome, outcome_of
from mldserver.runtime.values import Converter

pytestmark = pytest.mark.quick

ONE = FailurePolicy(attempts=1)
HALT = FailurePolicy(on_failure=OnFailure.HALT)
SCHEMA = "n INT"


def number(record: Any) -> Any:
    return (record.json(),)


async def number_async(record: Any) -> Any:
    await asyncio.sleep(0)
    return (record.json(),)


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


async def test_a_record_that_fails_for_a_while_is_tried_again_in_its_place(
    kit: Any, column: Any, logged: Any
) -> None:
    calls = []

    def process_record(record: Any) -> Any:
        calls.append(record.json())
        if calls.count(2) < 3 and record.json() == 2:
            raise ConnectionError("database is away")
        return (record.json(),)

    outcome = await kit.run(1, 2, 3, schema=SCHEMA, process_record=process_record)
    assert calls == [1, 2, 2, 2, 3]
    assert column(outcome, "n") == [1, 2, 3]
    assert (outcome.effects.dead_letters, outcome.attempts) == ((), 3)
    assert kit.clock.slept == [0.1, 0.2]
    failed = [event for event in logged if event["event"] == "handler.failed"]
    assert [(e["sequence"], e["attempt"], e["delay_seconds"]) for e in failed] == [
        ("2", 1, 0.1),
        ("2", 2, 0.2),
    ]
    assert failed[0]["what"] == "ConnectionError: database is away"
    assert 'raise ConnectionError("database is away")' in failed[0]["traceback"]


async def test_a_record_that_keeps_failing_is_a_dead_letter_and_the_shard_goes_on(
    kit: Any, shard: Any, column: Any, logged: Any
) -> None:
    outcome = await kit.run(1, b"{", 3, schema=SCHEMA, process_record=number)
    (letter,) = outcome.effects.dead_letters
    assert column(outcome, "n") == [1, 3]
    assert (letter.shard_id, letter.sequence, letter.partition_key) == (kit.shard, Sequence(2), "key-2")
    assert (letter.data, letter.arrival_ms, letter.attempts, letter.handler) == (b"{", 1_002, 1, "mine")
    assert letter.at_ms == kit.clock.now_ms()
    assert letter.error.startswith("JSONDecodeError: ")
    assert "in number" in letter.traceback
    dead = [event for event in logged if event["event"] == "handler.dead_letter"]
    assert [(event["sequence"], event["attempts"], event["level"]) for event in dead] == [("2", 1, "error")]


async def test_rows_that_cannot_be_taken_name_their_records(kit: Any, column: Any) -> None:
    outcome = await kit.run(1, "x", 3, schema=SCHEMA, process_record=number)
    (letter,) = outcome.effects.dead_letters
    assert column(outcome, "n") == [1, 3]
    assert (letter.error, letter.attempts, letter.traceback) == ("BadRow: column n: 'x' is not INT", 1, "")


async def test_a_raising_record_and_a_bad_row_before_it_both_die(kit: Any, column: Any) -> None:
    outcome = await kit.run("x", 1, b"{", 4, policy=ONE, schema=SCHEMA, process_record=number)
    assert kit.dead(outcome) == [1, 3]
    assert column(outcome, "n") == [1, 4]


@pytest.mark.parametrize("error", [SystemExit(1), StopIteration(), GeneratorExit(), asyncio.CancelledError()])
async def test_tricks_are_failures_like_any_other(kit: Any, error: Any) -> None:
    def process_record(record: Any) -> None:
        raise error

    async def process_record_async(record: Any) -> None:
        raise error

    for hook in (process_record, process_record_async):
        assert kit.dead(await kit.run(1, 2, policy=ONE, process_record=hook)) == [1, 2]


async def test_rows_that_fail_while_they_are_built_fail_their_records(kit: Any, column: Any) -> None:
    class Trap(dict):
        def get(self, name: Any, default: Any = None) -> None:
            raise SystemExit

    outcome = await kit.run(
        1,
        2,
        3,
        policy=ONE,
        schema=SCHEMA,
        process_record=lambda r: Trap() if r.json() == 2 else number(r),
    )
    assert kit.dead(outcome) == [2]
    assert column(outcome, "n") == [1, 3]


async def test_data_that_is_never_read_is_never_decoded(kit: Any, shard: Any) -> None:
    runtime = await kit.start(process_record=lambda record: None)
    await runtime.open(shard)
    assert (await runtime.process(kit.line([kit.record(1, 1, data="%%%")]))).effects.dead_letters == ()


async def test_rows_without_a_schema_are_told_once_per_record(kit: Any) -> None:
    outcome = await kit.run(1, 2, policy=ONE, process_record=number)
    assert [letter.error for letter in outcome.effects.dead_letters] == [
        "BadRow: returned (1,), but the handler declares no schema",
        "BadRow: returned (2,), but the handler declares no schema",
    ]


async def test_an_asynchronous_record_beyond_its_deadline_has_failed(
    kit: Any, shard: Any, column: Any
) -> None:
    from mldserver.testing.stand_ins import VirtualClock

    clock = VirtualClock()

    async def process_record(record: Any) -> Any:
        if record.json() == 2:
            await asyncio.Event().wait()
        return (record.json(),)

    runtime = await kit.start(
        policy=ONE, clock=clock, deadline=5, schema=SCHEMA, process_record=process_record
    )
    await runtime.open(shard)
    outcome = await clock.drive(runtime.process(kit.delivery(1, 2, 3)), step=1)
    assert column(outcome, "n") == [1, 3]
    assert outcome.effects.dead_letters[0].error == "TimeoutError: it took longer than 5 s"
