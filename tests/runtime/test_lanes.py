"""Records of a batch at the same time: in order for each key, whatever fails and however long it takes."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mldserver import Discard, Retry
from mldserver.errors import HandlerHalted, HandlerInvalid
from mldserver.records import Sequence, Shard
from mldserver.runtime.failure import FailurePolicy, OnFailure, OnKeyFailure
from mldserver.runtime.inline import InlineRuntime
from mldserver.runtime.work import lane_of
from mldserver.testing.virtual_loop import LoopClock, VirtualLoop

SCHEMA = "n INT"


def records(kit: Any, keys: Any) -> Any:
    """Return a batch whose payloads are 1, 2, 3 …, with these partition keys."""
    return kit.line([kit.record(n, n, partitionKey=key) for n, key in enumerate(keys, 1)])


def test_a_key_has_the_same_lane_in_every_process() -> None:
    assert [lane_of(key, 8) for key in ("a", "b", "c", "é", "\ud800", "", None)] == [3, 1, 7, 6, 0, 0, 0]
    assert {lane_of(f"key-{n}", 4) for n in range(100)} == {0, 1, 2, 3}
    assert {lane_of(f"key-{n}", 1) for n in range(100)} == {0}


async def test_synchronous_hooks_of_different_keys_run_at_the_same_time(kit: Any, column: Any) -> None:
    together = threading.Barrier(2, timeout=30)

    def process_record(record: Any) -> Any:
        together.wait()
        return (record.json(),)

    runtime = await kit.start(schema=SCHEMA, concurrency=8, process_record=process_record)
    await runtime.open(Shard(kit.shard))
    outcome = await runtime.process(records(kit, "ab"))
    assert column(outcome, "n") == [1, 2]


async def test_asynchronous_hooks_of_different_keys_run_at_the_same_time(kit: Any, column: Any) -> None:
    together = asyncio.Barrier(3)

    async def process_record(record: Any) -> Any:
        await together.wait()
        return (record.json(),)

    runtime = await kit.start(schema=SCHEMA, concurrency=8, process_record=process_record)
    await runtime.open(Shard(kit.shard))
    assert column(await runtime.process(records(kit, "abc")), "n") == [1, 2, 3]


async def test_a_retry_holds_its_own_lane_only(kit: Any, column: Any) -> None:
    done, failing = [], [Retry(after=100)]

    async def process_record(record: Any) -> Any:
        if record.json() == 1 and failing:
            raise failing.pop()
        done.append(record.json())
        return (record.json(),)

    runtime = await kit.start(schema=SCHEMA, concurrency=8, process_record=process_record)
    await runtime.open(Shard(kit.shard))
    outcome = await runtime.process(records(kit, "abab"))
    assert done.index(3) == done.index(1) + 1
    assert done.index(4) < done.index(1)
    assert (column(outcome, "n"), outcome.attempts) == ([1, 2, 3, 4], 2)


async def test_a_batch_of_one_lane_needs_no_other(kit: Any, column: Any) -> None:
    threads = []

    def process_record(record: Any) -> Any:
        threads.append(threading.current_thread().name)
        return (record.json(),)

    runtime = await kit.start(schema=SCHEMA, concurrency=4, process_record=process_record)
    await runtime.open(Shard(kit.shard))
    assert column(await runtime.process(records(kit, [None, None, None])), "n") == [1, 2, 3]
    assert (await runtime.process(kit.line([]))).rows is None
    assert threads == ["mldserver-handler"] * 3


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_the_first_lane_that_halts_stops_the_shard_and_the_other_lanes(kit: Any, kind: Any) -> None:
    waiting, calls = asyncio.Event(), []

    def process_record(record: Any) -> None:
        calls.append(record.json())
        raise ValueError("both")

    async def process_record_async(record: Any) -> None:
        calls.append(record.json())
        if record.json() == 1:
            raise ValueError("no")
        waiting.set()
        await asyncio.Event().wait()

    runtime = await kit.start(
        schema=SCHEMA,
        concurrency=8,
        process_record=process_record if kind == "sync" else process_record_async,
        policy=FailurePolicy(attempts=1, on_failure=OnFailure.HALT),
    )
    await runtime.open(Shard(kit.shard))
    with pytest.raises(HandlerHalted):
        await runtime.process(records(kit, "ab"))
    assert len(calls) == len(set(calls)) >= 1


async def test_the_setting_wins_over_the_handler(kit: Any) -> None:
    names = []

    def process_record(record: Any) -> None:
        names.append(threading.current_thread().name)

    runtime = InlineRuntime(
        kit.spec(concurrency=8, process_record=process_record),
        policy=FailurePolicy(),
        clock=kit.clock,
        random=lambda: 0.0,
        concurrency=1,
    )
    await runtime.start()
    kit.runtimes.append(runtime)
    await runtime.open(Shard(kit.shard))
    await runtime.process(records(kit, "abcd"))
    assert set(names) == {"mldserver-handler"}


@pytest.mark.parametrize("hook", ["process_records", "process_table"])
async def test_the_setting_is_refused_for_hooks_that_take_whole_batches(kit: Any, hook: Any) -> None:
    runtime = InlineRuntime(
        kit.spec(**{hook: lambda batch: None}),
        policy=FailurePolicy(),
        clock=kit.clock,
        random=lambda: 0.0,
        concurrency=2,
    )
    kit.runtimes.append(runtime)
    with pytest.raises(HandlerInvalid, match="concurrency is 2, but the handler takes all records"):
        await runtime.start()


@st.composite
def stories(draw: Any) -> Any:
    """Draw records: key, seconds that each of its calls takes, what they come to; lanes; whether keys are parked."""
    call = st.tuples(st.integers(0, 30), st.sampled_from(["row", "row", "none", "error", "retry", "discard"]))
    record = st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.lists(call, min_size=1, max_size=4))
    batches = draw(st.lists(st.lists(record, max_size=10), min_size=1, max_size=3))
    return batches, draw(st.integers(2, 6)), draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(stories())
def test_keys_are_in_order_and_every_record_is_decided_once_whatever_takes_how_long(
    kit_class: Any, story: Any
) -> None:
    kit = kit_class()
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda: 0.0)) as runner:
        kit.clock = LoopClock(runner.get_loop())
        runner.run(_live(kit, *story))


async def _live(kit: Any, batches: Any, lanes: int, park: bool) -> None:
    script = {
        (n, place): list(calls) for n, batch in enumerate(batches) for place, (_, calls) in enumerate(batch)
    }
    running: dict[Any, Any] = defaultdict(list)
    order: dict[Any, list[Any]] = defaultdict(list)

    async def process_record(record: Any) -> Any:
        name = tuple(record.json())
        assert not running[lane_of(record.partition_key, lanes)], "a lane does one thing at a time"
        running[lane_of(record.partition_key, lanes)].append(name)
        order[record.partition_key].append(name)
        try:
            seconds, what = script[name].pop(0) if script[name] else (0, "error")
            await kit.clock.sleep(seconds)
        finally:
            running[lane_of(record.partition_key, lanes)].clear()
        if what in {"error", "retry", "discard"}:
            raise {"error": ValueError("no"), "retry": Retry(after=7), "discard": Discard()}[what]
        return (name[1],) if what == "row" else None

    policy = FailurePolicy(attempts=2, on_key_failure=OnKeyFailure.PARK if park else OnKeyFailure.CONTINUE)
    runtime = await kit.start(schema=SCHEMA, concurrency=lanes, process_record=process_record, policy=policy)
    try:
        await runtime.open(Shard(kit.shard))
        await _deliver(kit, runtime, batches, park)
    finally:
        # The virtual loop cannot wait for a real thread, which has nothing to do here.
        runtime._thread._jobs.put(None)
    for seen in order.values():
        # Each key's records came one after the other; only a failed one came again, and before any other.
        assert seen == sorted(seen)


async def _deliver(kit: Any, runtime: Any, batches: Any, park: bool) -> None:
    dead_keys: dict[Any, Any] = {}
    sequence = 0
    for n, batch in enumerate(batches):
        line = []
        for place, (key, _) in enumerate(batch):
            line.append(kit.record(sequence + place + 1, [n, place], partitionKey=key))
        outcome = await runtime.process(kit.line(line))
        assert outcome.outline.records == len(batch)
        rows = [] if outcome.rows is None else outcome.rows.column("_sequence").to_pylist()
        letters = {letter.sequence.number: letter for letter in outcome.dead_letters}
        expected_rows, expected_letters, discarded = [], {}, 0
        for place, (key, calls) in enumerate(batch):
            number = sequence + place + 1
            if park and key in dead_keys:
                expected_letters[number] = dead_keys[key]
                continue
            last = next(
                (what for _, what in [*calls, (0, "error")][:2] if what not in {"error", "retry"}), "error"
            )
            if last == "row":
                expected_rows.append(str(number))
            elif last == "discard":
                discarded += 1
            elif last == "error":
                expected_letters[number] = None
                if key is not None:
                    dead_keys[key] = Sequence(number)
        assert rows == expected_rows
        assert outcome.discarded == discarded
        assert {number: letter.parked_behind for number, letter in letters.items()} == expected_letters
        sequence += len(batch)
