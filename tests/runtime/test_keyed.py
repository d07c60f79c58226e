"""Handlers that keep state by key, in the inline runtime: what counts, what is taken back, and whose copy it is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pyarrow as pa
import pytest
from msgspec import structs

from mldserver import Context, Timer, timer
from mldserver.config.kinds import OnKeyFailure
from mldserver.errors import HandlerHalted, HandlerInvalid, InternalError, StateMoved
from mldserver.records import Record, Retry, Shard
from mldserver.runtime import work
from mldserver.runtime.failure_policy import FailurePolicy, OnFailure
from mldserver.runtime.inline import InlineRuntime
from mldserver.runtime.interface import BatchOutcome, Delivery, Records, outcome_of
from mldserver.runtime.state_values import decode_state, encode_state
from mldserver.stores import ALL_KEYS, StateSnapshot, unpack_changes
from mldserver.testing import VirtualClock

pytestmark = pytest.mark.quick

A, B = "shard-a", "shard-b"
ONE = FailurePolicy(attempts=1)


def batch(*records: Any, shard: str = A, number: int | None = None, first: int = 1, **more: Any) -> Delivery:
    """Return a batch of (key, payload) pairs with the sequences from ``first`` on, one second apart."""
    made = [
        Record(
            shard_id=shard,
            sequence_number=str(place),
            data=payload,
            partition_key=key,
            arrival_ms=1_000 * place,
        )
        for place, (key, payload) in enumerate(records, first)
    ]
    return Delivery(shard, Records(made), 9_000, None, number=number, **more)


def ones(*keys: str | None, **more: Any) -> Delivery:
    """Return a batch with a record for each key."""
    return batch(*((key, b"") for key in keys), **more)


def changed(outcome: BatchOutcome) -> dict[str, dict[str, Any] | None]:
    """Return the changes of an outcome."""
    return {
        change.key.decode(): None if change.value is None else decode_state(change.value)
        for blob in outcome.effects.state
        for change in unpack_changes(blob)
    }


def count(record: Any, ctx: Any) -> None:
    """Count a key's records; fail, with the count changed, as the payload says."""
    ctx.state["n"] = ctx.state.get("n", 0) + 1
    if record.data == b"fail":
        raise OSError("not now")


async def count_async(record: Any, ctx: Any) -> None:
    count(record, ctx)
    await asyncio.sleep(0)


def snapshots(
    store: str = "store", **accepted: int
) -> tuple[dict[str, int], Callable[[str], Any], list[str]]:
    """Return (numbers that a test sets, a source for each shard, the shards that were read).

    A snapshot's entries are the counts of the dict, except the shards'.
    """
    held: dict[str, int] = dict(accepted)
    read: list[str] = []

    def source(shard: str) -> Callable[[], Awaitable[StateSnapshot]]:
        async def snapshot() -> StateSnapshot:
            read.append(shard)
            keys = [key for key in held if not key.startswith("shard")]
            entries = pa.table(
                {
                    "key": pa.array([key.encode() for key in keys], pa.binary()),
                    "value": pa.array([encode_state({"n": held[key]}) for key in keys], pa.binary()),
                    "expires_ms": pa.nulls(len(keys), pa.int64()),
                }
            )
            others = {name: n for name, n in held.items() if name.startswith("shard") and name != shard}
            return StateSnapshot(store, ALL_KEYS, held.get(shard, 0), None, entries, others)

        return snapshot

    return held, source, read


@pytest.fixture(params=["at once", "on a thread", "async"])
async def keyed(request: Any, kit: Any) -> Any:
    """Open a shard of a handler that counts, however its hooks run, and return a function that runs a batch."""
    options = {"at once": {"at_once": True}, "on a thread": {}, "async": {"process_record": count_async}}
    runtime = await kit.start(**{"process_record": count, **options[request.param]})
    await runtime.open(Shard(A))

    async def run(delivery: Delivery) -> BatchOutcome:
        return await outcome_of(runtime.begin(delivery))

    return run


async def test_state_is_kept_by_key_from_record_to_record_and_batch_to_batch(keyed: Any) -> None:
    assert changed(await keyed(ones("a", "b", "a"))) == {"a": {"n": 2}, "b": {"n": 1}}
    assert changed(await keyed(ones("b", first=4))) == {"b": {"n": 2}}
    assert changed(await keyed(ones())) == {}


async def test_a_call_that_fails_changes_nothing(keyed: Any) -> None:
    outcome = await keyed(batch(("a", b""), ("a", b"fail"), ("a", b"")))
    assert [letter.sequence.number for letter in outcome.effects.dead_letters] == [2]
    assert outcome.attempts > 1
    assert changed(outcome) == {"a": {"n": 2}}


async def test_a_record_without_a_key_is_a_dead_letter_after_one_call(keyed: Any) -> None:
    outcome = await keyed(ones("a", None))
    assert [letter.error.partition(":")[0] for letter in outcome.effects.dead_letters] == ["NoKey"]
    assert (outcome.attempts, changed(outcome)) == (1, {"a": {"n": 1}})


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_call_whose_row_the_schema_refuses_changes_nothing(
    kit: Any, at_once: bool, column: Any
) -> None:
    def process_record(record: Any, ctx: Any) -> tuple[Any, ...]:
        count(record, ctx)
        return (ctx.state["n"] if record.data == b"" else "text",)

    runtime = await kit.start(at_once=at_once, schema="n INT", process_record=process_record)
    await runtime.open(Shard(A))
    outcome = await outcome_of(runtime.begin(batch(("a", b""), ("a", b"bad"), ("a", b""))))
    assert [letter.error for letter in outcome.effects.dead_letters] == [
        "BadRow: column n: 'text' is not INT"
    ]
    assert (column(outcome, "n"), changed(outcome)) == ([1, 2], {"a": {"n": 2}})


async def test_the_calls_of_a_batch_are_made_again_only_if_a_row_is_refused(kit: Any, column: Any) -> None:
    called: list[bytes] = []

    def process_record(record: Any, ctx: Any) -> tuple[Any, ...]:
        called.append(record.data)
        count(record, ctx)
        if record.data == b"raise":
            raise ValueError("no")
        return ("text" if record.data == b"bad" else ctx.state["n"],)

    runtime = await kit.start(at_once=True, schema="n INT", process_record=process_record, policy=ONE)
    await runtime.open(Shard(A))
    outcome = await outcome_of(runtime.begin(batch(("a", b"1"), ("a", b"raise"), ("a", b"3"), number=1)))
    assert called == [b"1", b"raise", b"3"]
    assert (column(outcome, "n"), changed(outcome)) == ([1, 2], {"a": {"n": 2}})
    called.clear()
    rows = [("a", b"4"), ("a", b"bad"), ("a", b"raise"), ("a", b"7")]
    outcome = await outcome_of(runtime.begin(batch(*rows, first=4, number=2)))
    assert called == [b"4", b"bad", b"raise", b"4", b"bad", b"raise", b"7"]
    assert (column(outcome, "n"), changed(outcome)) == ([3, 4], {"a": {"n": 4}})


@pytest.mark.parametrize("value", [{1}, object()])
async def test_a_value_that_state_cannot_hold_fails_its_call(kit: Any, value: Any) -> None:
    async def process_record(record: Any, ctx: Any) -> None:
        ctx.state["v"] = value

    for hook in (process_record, lambda record, ctx: ctx.state.update(v=value)):
        outcome = await (await opened(kit, process_record=hook)).process(ones("a"))
        assert [letter.error.partition("ctx")[0] for letter in outcome.effects.dead_letters] == [
            "TypeError: "
        ]
        assert (outcome.attempts, changed(outcome)) == (1, {})


async def opened(kit: Any, *shards: str, source: Any = None, **options: Any) -> Any:
    runtime = await kit.start(**{"process_record": count, **options})
    for shard in shards or (A,):
        await runtime.open(Shard(shard), None if source is None else source(shard))
    return runtime


async def test_a_handler_reads_the_settings_and_cannot_change_them(kit: Any, column: Any) -> None:
    def process_record(record: Any, ctx: Any) -> tuple[str]:
        if record.data:
            ctx.settings["limit"] = "30"
        return (ctx.settings["limit"],)

    settings = {"limit": "20"}
    runtime = await opened(kit, schema="n STRING", process_record=process_record, settings=settings)
    outcome = await runtime.process(batch(("a", b""), ("a", b"change"), ("a", b"")))
    assert column(outcome, "n") == ["20", "20"]
    assert [letter.error[:9] for letter in outcome.effects.dead_letters] == ["TypeError"]


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_batch_that_is_repeated_as_a_whole_counts_once(
    kit: Any, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def process_record(record: Any, ctx: Any) -> tuple[int]:
        called.append(record.sequence_number)
        count(record, ctx)
        return (1,)

    join = work.join_rows

    def join_rows(*arguments: Any, **options: Any) -> Any:
        if len(called) < 4:
            raise RuntimeError("no memory")
        return join(*arguments, **options)

    monkeypatch.setattr(work, "join_rows", join_rows)
    runtime = await opened(kit, at_once=at_once, schema="n INT", process_record=process_record)
    outcome = await outcome_of(runtime.begin(ones("a", "a")))
    assert (called, changed(outcome)) == ([1, 2, 1, 2], {"a": {"n": 2}})


async def test_an_async_call_that_swallows_its_deadline_changes_nothing(kit: Any) -> None:
    clock = VirtualClock()

    async def process_record(record: Any, ctx: Any) -> None:
        count_of = ctx.state.get("n", 0)
        ctx.state["n"] = count_of + 1
        if record.data == b"hang":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return

    runtime = await opened(kit, process_record=process_record, clock=clock, deadline=10, policy=ONE)
    running = asyncio.create_task(runtime.process(batch(("a", b""), ("a", b"hang"), ("a", b""))))
    await clock.advance(25)
    outcome = await running
    assert [letter.error[:12] for letter in outcome.effects.dead_letters] == ["TimeoutError"]
    assert changed(outcome) == {"a": {"n": 2}}


@pytest.mark.parametrize("hook", [count, count_async])
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_batch_that_stops_its_shard_is_taken_back(kit: Any, hook: Any, at_once: bool) -> None:
    policy = FailurePolicy(attempts=1, on_failure=OnFailure.HALT)
    runtime = await opened(kit, process_record=hook, at_once=at_once, policy=policy)
    with pytest.raises(HandlerHalted):
        await outcome_of(runtime.begin(batch(("a", b""), ("a", b"fail"), number=1)))
    assert changed(await outcome_of(runtime.begin(ones("a", number=1)))) == {"a": {"n": 1}}


async def test_a_batch_that_is_cancelled_is_taken_back(kit: Any) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def process_record(record: Any, ctx: Any) -> None:
        count(record, ctx)
        begun.set()
        await go.wait()

    runtime = await opened(kit, process_record=process_record)
    running = asyncio.create_task(runtime.process(ones("a", number=1)))
    await begun.wait()
    running.cancel()
    await asyncio.wait({running})
    go.set()
    assert changed(await runtime.process(ones("a", number=1))) == {"a": {"n": 1}}


async def test_a_call_that_was_abandoned_on_its_thread_changes_nothing_afterwards(kit: Any) -> None:
    begun, go = threading.Event(), threading.Event()

    def process_record(record: Any, ctx: Any) -> None:
        count(record, ctx)
        begun.set()
        go.wait()

    runtime = await opened(kit, process_record=process_record)
    running = asyncio.create_task(runtime.process(ones("a", number=1)))
    await asyncio.to_thread(begun.wait)
    running.cancel()
    await asyncio.wait({running})
    again = asyncio.create_task(runtime.process(ones("a", number=1)))
    await asyncio.sleep(0)
    go.set()
    assert changed(await again) == {"a": {"n": 1}}


async def test_ttl_goes_by_the_running_maximum_of_arrival_times(kit: Any) -> None:
    runtime = await opened(kit, state_ttl="3 s")
    outcome = await runtime.process(ones("a"))  # arrives at 1 s, expires at 4 s
    [change] = unpack_changes(outcome.effects.state[0])
    assert change.expires_ms == 4_000
    assert changed(await runtime.process(ones("a", "b", "c", "a", first=2))) == {
        "a": {"n": 1},
        "b": {"n": 1},
        "c": {"n": 1},
    }  # twice: at 2 s it had not expired, at 5 s it had
    late = ones("b", "a", first=20)
    records = late.payload.records  # type: ignore[attr-defined]  # of this payload
    records[1] = Record(shard_id=A, sequence_number="21", partition_key="a", arrival_ms=1)
    assert changed(await runtime.process(late)) == {"b": {"n": 1}, "a": {"n": 1}}


async def test_parts_of_a_batch_do_not_count_as_outcomes(kit: Any) -> None:
    runtime = await opened(kit, state_ttl="1 hour")
    first = await runtime.process(ones("a", "b", number=1, part=range(1)))
    second = await runtime.process(ones("a", "b", number=1, part=range(1, 2)))
    assert (changed(first), changed(second)) == ({"a": {"n": 1}}, {"b": {"n": 1}})
    with pytest.raises(StateMoved):
        await runtime.process(ones("a", number=2))


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_number_that_is_not_the_next_one_loads_the_state_again(
    kit: Any, at_once: bool, logged: Any
) -> None:
    held, source, read = snapshots(a=10)
    runtime = await opened(kit, source=source, at_once=at_once)
    assert changed(await outcome_of(runtime.begin(ones("a", number=1)))) == {"a": {"n": 11}}
    # The server has not accepted it, and delivers its record again.
    assert changed(await outcome_of(runtime.begin(ones("a", number=1)))) == {"a": {"n": 11}}
    assert [event["event"] for event in logged if event["event"].startswith("state")] == ["state.moved"]
    held |= {A: 1, "a": 11}
    assert changed(await outcome_of(runtime.begin(ones("a", number=2)))) == {"a": {"n": 12}}
    assert read == [A, A]


async def test_state_that_cannot_be_had_is_said(kit: Any) -> None:
    runtime = await opened(kit)
    with pytest.raises(StateMoved, match="Batch 5 of the shard came, but its state contains 0"):
        await runtime.process(ones("a", number=5))
    _, source, _ = snapshots(**{A: 7})
    await runtime.open(Shard(A), source(A))
    assert changed(await runtime.process(ones("a", number=8))) == {"a": {"n": 1}}
    with pytest.raises(StateMoved, match="contains 7"):
        await runtime.process(ones("a", number=5))


async def test_a_large_snapshot_is_read_on_a_thread(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, source, _ = snapshots(**{f"k{number}": number for number in range(10_001)})
    threads: list[Any] = []
    to_thread = asyncio.to_thread

    async def recording(function: Any) -> Any:
        threads.append(function)
        return await to_thread(function)

    monkeypatch.setattr(asyncio, "to_thread", recording)
    runtime = await opened(kit, source=source)
    assert (len(threads), changed(await runtime.process(ones("k7")))) == (1, {"k7": {"n": 8}})


async def test_a_shard_that_is_opened_again_has_nothing_of_what_the_server_did_not_accept(kit: Any) -> None:
    _, source, _ = snapshots(a=10)
    runtime = await opened(kit, A, B, source=source)
    await runtime.process(ones("a", number=1))
    await runtime.forget(A)
    await runtime.open(Shard(A), source(A))
    assert changed(await runtime.process(ones("a", number=1))) == {"a": {"n": 11}}
    await runtime.process(ones("b", shard=B, number=1))


async def test_a_shard_that_opens_replaces_the_copy_of_its_siblings(kit: Any) -> None:
    held, source, read = snapshots()
    runtime = await opened(kit, A, source=source)
    await runtime.process(ones("a", number=1))  # the answer is on its way when the other shard opens
    await runtime.open(Shard(B), source(B))
    assert changed(await runtime.process(ones("b", shard=B, number=1))) == {"b": {"n": 1}}
    held |= {"a": 1, "b": 1, A: 1, B: 1}
    assert read == [A, B]
    assert changed(await runtime.process(ones("a", number=2))) == {"a": {"n": 2}}
    assert changed(await runtime.process(ones("b", shard=B, number=2))) == {"b": {"n": 2}}
    assert read == [A, B, A]


async def test_a_shard_that_was_given_up_while_its_state_was_read_stays_closed(kit: Any) -> None:
    _, source, _ = snapshots()
    going, go = asyncio.Event(), asyncio.Event()

    async def slow() -> Any:
        going.set()
        await go.wait()
        return await source(A)()

    runtime = await kit.start(process_record=count)
    opening = asyncio.create_task(runtime.open(Shard(A), slow))
    await going.wait()
    await runtime.forget(A)
    go.set()
    await opening
    with pytest.raises(InternalError):
        await runtime.process(ones("a"))


async def test_batches_of_shards_that_share_a_store_take_turns(kit: Any) -> None:
    _, source, _ = snapshots()
    running = []

    async def process_record(record: Any, ctx: Any) -> None:
        running.append(record.shard_id)
        await count_async(record, ctx)

    runtime = await opened(kit, A, B, source=source, process_record=process_record)
    outcomes = await asyncio.gather(
        *(runtime.process(ones("k", "k", shard=shard, number=1)) for shard in (A, B))
    )
    assert running == [A, A, B, B]
    assert [changed(outcome) for outcome in outcomes] == [{"k": {"n": 2}}, {"k": {"n": 4}}]


async def test_a_batch_that_goes_on_after_one_of_another_shard_begins_again(kit: Any) -> None:
    _, source, _ = snapshots()
    called: list[int] = []

    def process_record(record: Any, ctx: Any) -> None:
        called.append(record.sequence_number)
        count(record, ctx)
        if record.data == b"once" and len(called) < 3:
            raise Retry("later")

    runtime = await opened(kit, A, B, source=source, process_record=process_record, at_once=True)
    rest = runtime.begin(batch(("a", b""), ("a", b"once"), number=1))
    between = runtime.begin(ones("b", shard=B, number=1, first=7))
    assert isinstance(between, BatchOutcome)
    assert changed(between) == {"b": {"n": 1}}
    assert changed(await outcome_of(rest)) == {"a": {"n": 2}}
    assert called == [1, 2, 7, 1, 2]


async def test_a_batch_that_is_abandoned_before_it_goes_on_is_taken_back(kit: Any) -> None:
    runtime = await opened(kit, at_once=True)
    rest = runtime.begin(batch(("a", b""), ("b", b"fail"), number=1))
    assert not isinstance(rest, BatchOutcome)
    rest.close()  # type: ignore[union-attr]  # a coroutine
    assert changed(await outcome_of(runtime.begin(ones("a", number=1)))) == {"a": {"n": 1}}


async def test_a_batch_waits_for_one_of_another_shard_that_waits_for_its_next_attempt(kit: Any) -> None:
    _, source, _ = snapshots()
    clock = VirtualClock()
    failing = [True]

    def process_record(record: Any, ctx: Any) -> None:
        count(record, ctx)
        if record.data == b"once" and failing.pop():
            failing.append(False)
            raise Retry("later", after=5)

    runtime = await opened(kit, A, B, source=source, process_record=process_record, at_once=True, clock=clock)
    first = asyncio.create_task(outcome_of(runtime.begin(batch(("a", b"once"), number=1))))
    await clock.advance(1)
    second = asyncio.create_task(outcome_of(runtime.begin(ones("b", shard=B, number=1))))
    await clock.advance(1)
    assert not second.done()
    await clock.advance(5)
    assert (changed(await first), changed(await second)) == ({"a": {"n": 1}}, {"b": {"n": 1}})


async def test_dead_letters_that_run_once_more_count_as_outcomes(kit: Any) -> None:
    runtime = await opened(kit)
    await runtime.process(ones("a", number=1))
    assert changed(await runtime.process(ones("a", number=2, redriven=True))) == {"a": {"n": 2}}
    assert changed(await runtime.process(ones("a", number=3, first=2))) == {"a": {"n": 3}}


async def test_records_without_an_arrival_time_arrive_when_they_are_received(kit: Any) -> None:
    times: list[Any] = []

    def process_record(record: Any, ctx: Any) -> None:
        times.append(ctx.now.timestamp())
        count(record, ctx)

    runtime = await opened(kit, process_record=process_record, state_ttl="3 s")
    record = Record(shard_id=A, sequence_number="1", partition_key="a", arrival_ms=None)
    outcome = await runtime.process(Delivery(A, Records([record]), 9_000, None))
    [change] = unpack_changes(outcome.effects.state[0])
    assert (times, change.expires_ms) == ([9.0], 12_000)


async def test_the_times_of_dead_letters_that_run_once_more_expire_nothing(kit: Any) -> None:
    runtime = await opened(kit, state_ttl="3 s")
    await runtime.process(ones("a"))
    await runtime.process(ones("b", first=20, redriven=True))
    assert changed(await runtime.process(ones("a", first=2))) == {"a": {"n": 2}}


async def test_the_times_of_a_part_are_those_of_its_records(kit: Any) -> None:
    runtime = await opened(kit, state_ttl="3 s")
    whole = ones("a", "a", *"bcdefg")
    await runtime.process(structs.replace(whole, part=range(1)))
    assert changed(await runtime.process(structs.replace(whole, part=range(1, 8))))["a"] == {"n": 2}


async def test_condemned_records_change_nothing(kit: Any) -> None:
    runtime = await opened(kit)
    outcome = await runtime.process(structs.replace(ones("a", number=1), condemned="it killed its process"))
    assert (len(outcome.effects.dead_letters), changed(outcome)) == (1, {})
    assert changed(await runtime.process(ones("a", number=2))) == {"a": {"n": 1}}


async def test_stores_share_the_memory_that_state_may_take(kit: Any) -> None:
    runtime = await opened(kit, A, B)
    runtime.state_bytes = 900
    outcome = await runtime.process(ones(*"abc"))
    assert len(changed(outcome)) == 3
    outcome = await runtime.process(ones(*"abc", shard=B))
    assert len(changed(outcome)) == 1
    assert {letter.error.partition(":")[0] for letter in outcome.effects.dead_letters} == {"StateFull"}
    assert [(size.store_id, size.keys) for size in runtime.state_sizes()] == [(A, 3), (B, 1)]
    assert runtime.trouble is not None
    assert f"most of it in the store {A} with 3 keys: raise state_bytes" in runtime.trouble
    await runtime.forget(A)
    assert len(changed(await runtime.process(ones(*"bc", shard=B, first=4)))) == 2
    runtime.state_bytes = 900
    assert [size.store_id for size in runtime.state_sizes()] == [B]
    runtime.state_bytes = 1_000
    assert runtime.trouble is None


async def test_hooks_of_changes_may_take_a_context_each(kit: Any) -> None:
    seen: list[Any] = []
    record = Record(
        shard_id=A,
        sequence_number="1",
        partition_key='{"id":{"S":"1"}}',
        arrival_ms=1,
        data=b'{"eventName":"INSERT","dynamodb":{"Keys":{"id":{"S":"1"}},"NewImage":{"id":{"S":"1"}}}}',
    )
    gone = Record(
        shard_id=A,
        sequence_number="2",
        partition_key='{"id":{"S":"1"}}',
        arrival_ms=1,
        data=b'{"eventName":"REMOVE","dynamodb":{"Keys":{"id":{"S":"1"}},"OldImage":{"id":{"S":"1"}}}}',
    )

    def on_insert(change: Any, ctx: Any) -> None:
        ctx.state["new"] = change.new["id"]

    def on_delete(change: Any) -> None:
        seen.append(change.old["id"])

    runtime = await opened(kit, process_record=None, on_insert=on_insert, on_delete=on_delete)
    outcome = await runtime.process(Delivery(A, Records([record, gone]), 1, None))
    assert (changed(outcome), seen) == ({'{"id":{"S":"1"}}': {"new": "1"}}, ["1"])

    async def process_record(change: Any, ctx: Any) -> None:
        ctx.state["kind"] = change.kind

    runtime = await opened(kit, process_record=process_record, changes=True)
    outcome = await runtime.process(Delivery(A, Records([record]), 1, None))
    assert changed(outcome) == {'{"id":{"S":"1"}}': {"kind": "insert"}}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"concurrency": 2}, "concurrency is 2, but the handler keeps state"),
        ({"policy": FailurePolicy(max_ahead_ms=1)}, "on_ahead is fail, but the handler keeps state"),
    ],
)
async def test_what_state_does_not_go_with_is_refused(kit: Any, options: Any, text: str) -> None:
    given = {"policy": FailurePolicy(), "clock": kit.clock, "random": lambda: 0.0, **options}
    with pytest.raises(HandlerInvalid, match=text):
        InlineRuntime(kit.spec(process_record=count), **given)


@timer
def alarm(due: Timer, ctx: Context) -> None: ...


async def test_timers_do_not_go_with_parked_keys(kit: Any) -> None:
    parking = FailurePolicy(on_key_failure=OnKeyFailure.PARK)
    given = {"policy": parking, "clock": kit.clock, "random": lambda: 0.0}
    InlineRuntime(kit.spec(process_record=count), **given)
    with pytest.raises(HandlerInvalid, match="on_key_failure is park, but the handler has timers"):
        InlineRuntime(kit.spec(process_record=count, alarm=alarm), **given)


async def test_a_handler_without_a_context_has_no_store(kit: Any) -> None:
    _, source, read = snapshots()
    runtime = await opened(kit, source=source, process_record=lambda record: None)
    outcome = await runtime.process(ones("a", number=17))
    assert (read, outcome.effects.state) == ([], ())


async def test_a_state_may_be_replaced_or_merged_as_a_whole(kit: Any) -> None:
    def process_record(record: Any, ctx: Any) -> None:
        if record.data == b"merge":
            ctx.state |= {"b": 2}
        else:
            ctx.state = {"n": ctx.state.get("n", 0) + 1}

    runtime = await opened(kit, process_record=process_record)
    outcome = await runtime.process(batch(("k", b""), ("k", b"merge")))
    assert changed(outcome) == {"k": {"n": 1, "b": 2}}
    assert changed(await runtime.process(batch(("k", b""), first=3))) == {"k": {"n": 2}}
    context = Context("k", state={"a": 1})
    context.state |= {"b": 2}
    assert context.state == {"a": 1, "b": 2}
    context.state = {}
    assert context.state == {}
