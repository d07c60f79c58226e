"""Records of a batch at the same time: in order for each key, whatever fails and however long it takes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.virtual_loop import LoopClock, VirtualLoop

from mldserver import Discard, Retry
from mldserver.errors import HandlerInvalid, InternalError
from mldserver.records import Hook, Sequence, Shard
from mldserver.runtime.failure_policy import FailurePolicy, OnKeyFailure
from mldserver.runtime.inline import InlineRuntime
from mldserver.runtime.lane import Lane
from mldserver.runtime.work import lane_of

SCHEMA = "n INT"


def records(kit: Any, keys: Any) -> Any:
    """Return a batch whose payloads are 1, 2, 3 …, with these partition keys."""
    return kit.line([kit.record(n, n, partitionKey=key) for n, key in enumerate(keys, 1)])


def test_a_key_has_the_same_lane_in_every_process() -> None:
    assert [lane_of(key, 8) for key in ("a", "b", "c", "é", "\ud800", "", None)] == [3, 1, 7, 6, 0, 0, 0]
    assert {lane_of(f"key-{n}", 4) for n in range(100)} == {0, 1, 2, 3}
    assert {lane_of(f"key-{n}", 1) for n in range(100)} == {0}


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
    assert (await runtime.process(kit.line([]))).effects.rows is None
    assert threads == ["mldserver-handler"] * 3


@pytest.mark.parametrize("then", ["opened again", "lost"])
async def test_a_call_that_was_given_up_in_a_lane_ends_before_the_shards_next_hook(
    kit: Any, then: Any
) -> None:
    begun, go, told = threading.Event(), threading.Event(), []

    def process_record(record: Any) -> None:
        begun.set()
        go.wait()
        told.append("record")

    def hook(shard: Any) -> None:
        told.append("hook")

    runtime = await kit.start(concurrency=8, process_record=process_record, initialize=hook, lease_lost=hook)
    await runtime.open(Shard(kit.shard))
    told.clear()
    # Lanes 1 and 3: neither is on the thread of the hooks.
    batch = asyncio.create_task(runtime.process(records(kit, "ab")))
    await asyncio.to_thread(begun.wait)
    batch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await batch
    next_hook = (
        runtime.open(Shard(kit.shard))
        if then == "opened again"
        else runtime.notify(kit.shard, Hook.LEASE_LOST)
    )
    waiting = asyncio.create_task(next_hook)
    for _ in range(10):
        await asyncio.sleep(0)
    await runtime._thread.run(lambda: None)
    assert told == []
    go.set()
    await waiting
    assert told[-1] == "hook"
    assert told.count("record") in {1, 2}


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
def test_the_setting_is_refused_for_hooks_that_take_whole_batches(kit: Any, hook: Any) -> None:
    with pytest.raises(HandlerInvalid, match="concurrency is 2, but the handler takes all records"):
        InlineRuntime(
            kit.spec(**{hook: lambda batch: None}),
            policy=FailurePolicy(),
            clock=kit.clock,
            random=lambda: 0.0,
            concurrency=2,
        )


@st.composite
def stories(draw: Any) -> Any:
    """Draw batches, lanes, and whether keys are parked.

    A batch: its records (a key, and how long each call for it takes and what it comes to), and the seconds after which
    its connection is lost; None: it is not.
    """
    call = st.tuples(st.integers(0, 30), st.sampled_from(["row", "row", "none", "error", "retry", "discard"]))
    record = st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.lists(call, min_size=1, max_size=4))
    batch = st.tuples(st.lists(record, max_size=10), st.none() | st.integers(0, 60))
    return draw(st.lists(batch, min_size=1, max_size=4)), draw(st.integers(2, 6)), draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(stories())
def test_keys_and_positions_are_in_order_whatever_fails_takes_long_or_is_lost(
    kit_class: Any, story: Any
) -> None:
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda: 0.0)) as runner:
        world = World(kit_class(), LoopClock(runner.get_loop()), *story)
        runner.run(world.live())


class World:
    """A shard whose batches are delivered again, with those before, until they are decided."""

    def __init__(self, kit: Any, clock: Any, batches: Any, lanes: int, park: bool) -> None:
        self.kit, self.clock, self.batches, self.lanes, self.park = kit, clock, batches, lanes, park
        kit.clock = clock
        self.calls = {}
        """What is left of the calls for each record, by its sequence number."""
        self.keys = {}
        self.busy: set[int] = set()
        self.order: Any = defaultdict(list)
        """By key, the records of the calls since the last connection began."""
        self.position = 0
        self.dead_keys: dict[str, Sequence] = {}

    async def process_record(self, record: Any) -> Any:
        n, lane = record.sequence_number, lane_of(record.partition_key, self.lanes)
        assert lane not in self.busy, "a lane does one thing at a time"
        assert n > self.position, "what was decided is not seen again"
        self.order[record.partition_key].append(n)
        self.busy.add(lane)
        try:
            seconds, what = self.calls[n].pop(0) if self.calls[n] else (0, "error")
            await self.clock.sleep(seconds)
        finally:
            self.busy.remove(lane)
        if what in {"error", "retry", "discard"}:
            raise {"error": ConnectionError("no"), "retry": Retry(after=7), "discard": Discard()}[what]
        return (n,) if what == "row" else None

    async def live(self) -> None:
        policy = FailurePolicy(attempts=2, on_key_failure=OnKeyFailure("park" if self.park else "continue"))
        runtime = await self.kit.start(
            schema=SCHEMA, concurrency=self.lanes, process_record=self.process_record, policy=policy
        )
        try:
            await runtime.open(Shard(self.kit.shard))
            line: list[Any] = []
            for records, lost_after in self.batches:
                for key, calls in records:
                    n = len(self.keys) + 1
                    self.keys[n], self.calls[n] = key, list(calls)
                    line.append(self.kit.record(n, n, partitionKey=key))
                await self.deliver(runtime, line, lost_after)
        finally:
            # The virtual loop cannot wait for a real thread, which has nothing to do here.
            runtime._thread._calls.put(None)

    async def deliver(self, runtime: Any, line: Any, lost_after: Any) -> None:
        """Deliver all records so far: those up to the position were decided earlier."""
        delivery = self.kit.line(line, after=self.position)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(lost_after):
                expected = self.expected(len(line))
                self.take(await runtime.process(delivery), expected)
                return
        assert not self.busy
        self.order.clear()
        await runtime.open(Shard(self.kit.shard))
        await runtime.park(self.kit.shard, self.dead_keys)
        expected = self.expected(len(line))
        self.take(await runtime.process(delivery), expected)

    def take(self, outcome: Any, expected: Any) -> None:
        rows = (
            []
            if outcome.effects.rows is None
            else [int(n) for n in outcome.effects.rows.column("_sequence").to_pylist()]
        )
        letters = {letter.sequence.number: letter.parked_behind for letter in outcome.effects.dead_letters}
        assert (rows, letters, outcome.discarded) == expected[:3]
        assert not self.busy, "a batch is done when all its lanes are"
        for seen in self.order.values():
            # Each key's records came one after the other; only one that failed came again, before any other.
            assert seen == sorted(seen)
        self.dead_keys = expected[3]
        if outcome.outline.last is not None:
            self.position = outcome.outline.last.number

    def expected(self, last: int) -> Any:
        """Return rows, letters, the number of discarded records, and the parked keys: one record after the other."""
        rows, letters, discarded, dead_keys = [], {}, 0, dict(self.dead_keys)
        for n in range(self.position + 1, last + 1):
            key = self.keys[n]
            if self.park and key in dead_keys:
                letters[n] = dead_keys[key]
                continue
            tries = [what for _, what in [*self.calls[n], (0, "error"), (0, "error")][:2]]
            what = next((what for what in tries if what not in {"error", "retry"}), "error")
            if what == "row":
                rows.append(n)
            elif what == "error":
                letters[n] = None
                if key is not None:
                    dead_keys[key] = Sequence(n)
            discarded += what == "discard"
        return rows, letters, discarded, dead_keys


async def test_a_batch_whose_lane_was_cancelled_from_outside_does_not_count(
    kit: Any, monkeypatch: Any
) -> None:
    async def process_record(record: Any) -> Any:
        return (record.json(),)

    async def run_async(lane: Lane, near: Any) -> None:
        if lane.plan.indices[0] == 0:
            raise asyncio.CancelledError
        await original(lane, near)

    original = Lane.run_async
    monkeypatch.setattr(Lane, "run_async", run_async)
    runtime = await kit.start(schema=SCHEMA, concurrency=8, process_record=process_record)
    await runtime.open(Shard(kit.shard))
    with pytest.raises(InternalError, match="not worked on to the end"):
        await runtime.process(records(kit, "ab"))
