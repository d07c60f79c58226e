"""What a call sees of its key's timers, and what counts of what it asks for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pytest

from mldserver import Context, Timer, timer
from mldserver.errors import KeyElsewhere, NotATimer, StateFull, StateTooLarge
from mldserver.handler.spec import TimerHook
from mldserver.records import Record
from mldserver.runtime.keyed_state import CallContext, KeyedState
from mldserver.runtime.state_values import MAX_ID_BYTES, MAX_PAYLOAD_BYTES, MAX_TIMERS, encode_payload
from mldserver.runtime.timer_table import DueTimer, TimerTable
from mldserver.stores import ALL_KEYS, KeyRange, StateSnapshot, TimerEntry, pack_timer, unpack_changes

pytestmark = [pytest.mark.quick, pytest.mark.core]

SHARD: Final = "shard"
HOOKS: Final = {name: TimerHook(name, is_async=False) for name in ("alarm", "report")}
COLUMNS: Final = pa.schema(
    [("key", pa.binary()), ("value", pa.binary()), ("expires_ms", pa.int64()), ("timer", pa.string())]
)


@timer
def alarm(due: Timer, ctx: Context) -> None: ...


@timer
def report(due: Timer, ctx: Context) -> None: ...


class Calls:
    """Calls of a handler, one after the other, in batches."""

    def __init__(self, store: KeyedState | None = None, hooks: dict[str, TimerHook] = HOOKS) -> None:
        self.store = KeyedState("store", timers=TimerTable(hooks)) if store is None else store
        self.context = CallContext(self.store, SHARD, hooks=hooks)
        self.context.received_ms = 9_000
        self.store.begin(SHARD, object())

    def call(self, key: str = "k", at_ms: int | None = 1_000) -> CallContext:
        record = Record(shard_id=SHARD, sequence_number="1", data=b"", partition_key=key, arrival_ms=at_ms)
        self.context.begin(record, at_ms or 0)
        return self.context

    def end(self) -> list[tuple[bytes, str, int | None]]:
        """End the batch; return the changes by key, timer and time."""
        blobs = self.store.effects(latest_ms=None, counts=True, moves=True)
        self.store.begin(SHARD, object())
        changes = [change for blob in blobs for change in unpack_changes(blob)]
        return [(change.key, change.timer, change.expires_ms) for change in changes]


def names(context: CallContext) -> list[str]:
    return [f"{each.callback}/{each.name} {each.payload}" for each in context.timers]


def at(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


def test_timers_count_from_the_arrival_of_the_record_or_the_receipt_of_its_batch() -> None:
    calls = Calls()
    context = calls.call()
    context.timers.set(alarm, after=1)
    context.timers.set(report, at=at(7))
    context.join()
    context = calls.call("other", at_ms=None)
    context.timers.set(alarm, after=1)
    context.join()
    assert calls.end() == [(b"k", "alarm", 2_000), (b"k", "report", 7), (b"other", "alarm", 10_000)]


def test_a_call_sees_what_it_has_asked_for_over_what_is_set() -> None:
    calls = Calls()
    context = calls.call()
    for name in "abc":
        context.timers.set(alarm, after=1, name=name, payload=(name, Decimal(1)))
    context.join()
    context = calls.call()
    assert names(context) == [f"alarm/{name} ['{name}', Decimal('1')]" for name in "abc"]
    context.timers.set(alarm, after=1, name="a", payload=1)
    context.timers.set(alarm, after=1, name="d", payload=2)
    assert context.timers.cancel(alarm, "b") is True
    assert context.timers.cancel(alarm, "b") is False
    assert context.timers.cancel(alarm, "d") is True
    assert context.timers.cancel(alarm, "never") is False
    assert [each.name for each in context.timers] == ["c", "a"]
    assert len(context.timers) == 2
    assert context.timers.get(alarm, "a") == Timer(at(2_000), 1, "a", callback="alarm")
    assert context.timers.get(alarm, "b") is None
    context.timers.set(alarm, after=0, name="b")
    assert [each.name for each in context.timers] == ["b", "c", "a"]


def test_what_a_call_that_fails_has_asked_for_does_not_count() -> None:
    calls = Calls()
    context = calls.call()
    context.timers.set(alarm, after=1)
    context.state["n"] = 1
    context = calls.call()
    assert (names(context), context.state) == ([], {})
    context.timers.set(report, after=1)
    context.state["n"] = object()
    with pytest.raises(TypeError):
        context.join()
    assert calls.end() == []
    assert names(calls.call()) == []


def test_a_batch_that_does_not_come_to_its_end_sets_nothing() -> None:
    calls = Calls()
    context = calls.call()
    context.timers.set(alarm, after=1)
    context.state["n"] = 1
    context.join()
    calls.store.begin(SHARD, object())
    assert (names(calls.call()), calls.store.memory) == ([], 0)
    assert calls.end() == []


def test_state_and_timers_are_changes_of_one_blob() -> None:
    calls = Calls()
    for key in "ab":
        context = calls.call(key)
        context.state["n"] = 1
        context.timers.set(alarm, after=1, name="x")
        context.join()
    assert calls.end() == [
        (b"a", "", None),
        (b"b", "", None),
        (b"a", "alarm/x", 2_000),
        (b"b", "alarm/x", 2_000),
    ]


def due_of(calls: Calls) -> DueTimer:
    assert calls.store.timers is not None
    [(key, timer_id, entry)] = calls.store.timers.due(1 << 40, 9)
    return DueTimer(SHARD, None, key, timer_id, entry, received_ms=60_000)


def test_in_a_callback_its_timer_is_gone_and_now_is_its_due_time() -> None:
    calls = Calls()
    calls.call().timers.set(alarm, after=1)
    calls.context.join()
    calls.end()
    due = due_of(calls)
    calls.context.begin(due, due.due_ms)
    assert calls.context.take(due, 0)
    assert (calls.context.now, calls.context.key, len(calls.context.timers)) == (at(2_000), "k", 0)
    calls.context.timers.set(alarm, after=1)
    calls.context.join()
    assert calls.end() == [(b"k", "alarm", 3_000)]


def test_a_handler_without_callbacks_has_no_timers_and_fires_none() -> None:
    calls = Calls(KeyedState("store"), hooks={})
    context = calls.call()
    assert (list(context.timers), len(context.timers)) == ([], 0)
    with pytest.raises(NotATimer):
        context.timers.set(alarm, after=1)
    due = DueTimer(SHARD, None, "k", "alarm", TimerEntry(0, b"\xc0"), received_ms=0)
    assert context.take(due, 0) is False


def test_a_payload_or_an_id_that_is_too_long_fails_the_call() -> None:
    timers = Calls().call().timers
    timers.set(alarm, after=1, payload=b"x" * (MAX_PAYLOAD_BYTES - 3), name="é" * ((MAX_ID_BYTES - 6) // 2))
    with pytest.raises(StateTooLarge, match=r"alarm of the key 'k' has a payload of 16,385 bytes"):
        timers.set(alarm, after=1, payload=b"x" * (MAX_PAYLOAD_BYTES - 2))
    with pytest.raises(StateTooLarge, match="for its id 1,024"):
        timers.set(alarm, after=1, name="é" * ((MAX_ID_BYTES - 4) // 2))


def test_a_key_has_no_more_than_a_thousand_timers() -> None:
    calls = Calls()
    context = calls.call()
    for number in range(MAX_TIMERS - 1):
        context.timers.set(alarm, after=1, name=str(number))
    context.join()
    context = calls.call()
    context.timers.set(alarm, after=2, name="0")
    context.timers.set(report, after=2)
    with pytest.raises(StateTooLarge, match=r"The key 'k' has 1,000 timers, which is the limit"):
        context.timers.set(alarm, after=1, name="more")
    context.timers.set(report, after=3)
    context.timers.cancel(alarm, "5")
    context.timers.set(alarm, after=1, name="more")
    assert len(context.timers) == MAX_TIMERS


def test_a_new_timer_finds_a_full_store_and_one_that_replaces_another_does_not() -> None:
    calls = Calls()
    calls.call().timers.set(alarm, after=1)
    calls.context.join()
    calls.store.room = calls.store.memory
    context = calls.call()
    context.timers.set(alarm, after=2)
    with pytest.raises(StateFull, match=r"The state of 0 keys and of 1 timers in the store store takes"):
        context.timers.set(alarm, after=2, name="x")


def test_a_key_of_another_shard_has_no_timers_here() -> None:
    store = KeyedState("store", key_range=KeyRange(0, 0), timers=TimerTable(HOOKS))
    with pytest.raises(KeyElsewhere):
        _ = Calls(store).call().timers


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ({1, 2}, "payload is of the type set"),
        ([1, {"a": object()}], r"payload\[1\]\['a'\] is of the type object"),
        ({1: 2}, "payload has the key 1, which is not text"),
        (1 << 70, "payload: "),
        ([1 << 70], r"payload\[0\]: "),
        (datetime(2026, 1, 1), "payload is a datetime without a time zone"),  # noqa: DTZ001  # that is the point
    ],
)
def test_a_payload_has_values_as_state_has(payload: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        encode_payload(payload)


def test_a_snapshot_brings_state_and_timers() -> None:
    rows = [
        {"key": b"k", "value": b"\x81\xa1n\x01", "expires_ms": None, "timer": None},
        {"key": b"k", "value": pack_timer(TimerEntry(5, b"\x07", 2, 9)), "expires_ms": 5, "timer": "alarm/x"},
    ]
    entries = pa.Table.from_pylist(rows, schema=COLUMNS)
    # The shard is read beyond the timer's due time.
    snapshot = StateSnapshot("store", ALL_KEYS, 3, 7, entries)
    loaded = KeyedState.loaded(snapshot, SHARD, ttl_ms=None, clocks={}, hooks=HOOKS)
    context = Calls(loaded).call()
    assert (context.state, list(context.timers)) == ({"n": 1}, [Timer(at(5), 7, "x", 2, "alarm")])
    without = KeyedState.loaded(snapshot, SHARD, ttl_ms=None, clocks={})
    assert (without.timers, Calls(without, hooks={}).call().state) == (None, {"n": 1})
    only_state = StateSnapshot("store", ALL_KEYS, 3, 7, entries.drop_columns("timer").slice(0, 1))
    for hooks in ({}, HOOKS):
        state = KeyedState.loaded(only_state, SHARD, ttl_ms=None, clocks={}, hooks=hooks)
        assert names(Calls(state, hooks=hooks).call()) == []
