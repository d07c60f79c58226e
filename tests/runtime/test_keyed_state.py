"""The live copy of a store: what a call reads, what counts, what is taken back, and what travels."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from math import isnan
from typing import Any

import pyarrow as pa
import pytest

from mldserver.errors import KeyElsewhere, NoKey, StateFull, StateTooLarge
from mldserver.handler.context import Context
from mldserver.records import Record
from mldserver.runtime.keyed_state import CallContext, KeyedState
from mldserver.runtime.state_values import decode_state, encode_state
from mldserver.stores import KeyRange, StateChange, StateSnapshot, hash_of, unpack_changes

pytestmark = [pytest.mark.quick, pytest.mark.core]

SHARD = "shard"
DAY = 24 * 3600 * 1000


class Calls:
    """Calls of a handler, one after the other, with a store of their own."""

    def __init__(self, store: KeyedState | None = None, **options: Any) -> None:
        self.store = store or KeyedState("store", **options)
        self.store.applied[SHARD] = 0
        self.begin()

    def begin(self, shard: str = SHARD) -> None:
        self.store.begin(shard, object())

    def read(self, key: str, at_ms: int = 0) -> dict[str, Any]:
        return self.store.read(key, at_ms)

    def change(self, key: str, at_ms: int = 0, **values: Any) -> None:
        self.store.write(key, self.read(key, at_ms) | values, at_ms)

    def end(self, latest_ms: int | None = None, **options: Any) -> list[StateChange]:
        ends = {"counts": True, "moves": True, **options}
        blobs = self.store.effects(latest_ms=latest_ms, **ends)
        self.begin()
        return [change for blob in blobs for change in unpack_changes(blob)]


def test_a_call_reads_what_the_calls_before_it_have_left() -> None:
    calls = Calls()
    calls.change("k", n=1)
    assert calls.read("k") == {"n": 1}
    assert calls.read("other") == {}


def test_a_batch_returns_the_last_value_of_each_key_that_it_changed() -> None:
    calls = Calls()
    calls.change("k", n=1)
    calls.change("k", n=2)
    calls.change("é", n=3)
    assert calls.end() == [
        StateChange(b"k", encode_state({"n": 2})),
        StateChange("é".encode(), encode_state({"n": 3})),
    ]
    assert calls.end() == []


def test_a_change_inside_a_list_counts() -> None:
    calls = Calls()
    calls.change("k", seen=[1])
    calls.end()
    state = calls.read("k")
    state["seen"].append(2)
    calls.store.write("k", state, 0)
    assert [decode_state(change.value or b"") for change in calls.end()] == [{"seen": [1, 2]}]


def test_what_a_call_does_with_its_dict_afterwards_changes_nothing() -> None:
    calls = Calls()
    state = calls.read("k")
    state["n"] = 1
    calls.store.write("k", state, 0)
    state["n"] = 2
    assert calls.read("k") == {"n": 1}


def test_a_call_that_changes_nothing_and_a_key_that_comes_and_goes_have_no_effect() -> None:
    calls = Calls()
    calls.change("k", n=1, price=Decimal("1.5"))
    calls.end()
    calls.change("k")
    calls.store.write("new", {}, 0)
    calls.change("brief", n=1)
    calls.store.write("brief", {}, 0)
    calls.change("k", n=5)
    calls.change("k", n=1)
    assert calls.end() == []


def test_an_empty_dict_deletes_the_key() -> None:
    calls = Calls()
    before = calls.store.memory
    calls.change("k", n=1)
    calls.end()
    calls.store.write("k", {}, 0)
    assert calls.read("k") == {}
    assert calls.end() == [StateChange(b"k", None)]
    assert (len(calls.store), calls.store.memory) == (0, before)


def test_a_batch_that_does_not_come_to_its_end_is_taken_back() -> None:
    calls = Calls()
    calls.change("old", n=1)
    calls.change("gone", n=1)
    calls.end()
    before = calls.store.memory
    calls.change("old", n=2)
    calls.change("old", n=3)
    calls.change("new", n=1)
    calls.store.write("gone", {}, 0)
    calls.change("brief", n=1)
    calls.store.write("brief", {}, 0)
    calls.begin()
    assert [calls.read(key) for key in ("old", "new", "gone")] == [{"n": 1}, {}, {"n": 1}]
    assert (calls.end(), calls.store.memory, len(calls.store)) == ([], before, 2)


def test_outcomes_are_counted_by_shard_and_parts_are_not() -> None:
    calls = Calls()
    assert calls.store.stands_at(SHARD, 1)
    calls.end(counts=False)
    assert calls.store.stands_at(SHARD, 1)
    calls.end()
    assert (calls.store.stands_at(SHARD, 1), calls.store.stands_at(SHARD, 2)) == (False, True)
    assert calls.store.stands_at(SHARD, None)
    assert calls.store.stands_at("another", 1)
    calls.store.forget(SHARD)
    assert calls.store.stands_at(SHARD, 1)


def test_state_expires_after_its_last_change_by_the_running_maximum_of_arrival_times() -> None:
    calls = Calls(ttl_ms=100)
    calls.change("k", 1000, n=1)
    assert calls.end(1000) == [StateChange(b"k", encode_state({"n": 1}), 1100)]
    calls.change("k", 1050)  # it changes nothing
    calls.change("other", 1050, n=1)
    assert [calls.read("k", at) for at in (1099, 1100)] == [{"n": 1}, {}]
    calls.end(1100)
    calls.end(900)
    assert calls.read("k", 1050) == {}, "a record that comes late finds what the one before it found"
    calls.change("k", 1050, m=2)
    assert calls.end(1100) == [StateChange(b"k", encode_state({"m": 2}), 1200)]


def test_the_same_value_after_the_expiry_is_a_new_one() -> None:
    calls = Calls(ttl_ms=100)
    calls.change("k", 1000, n=1)
    calls.end(1000)
    calls.change("k", 1100, n=1)
    assert calls.end(1100) == [StateChange(b"k", encode_state({"n": 1}), 1200)]
    calls.store.write("k", {}, 1200)  # expired: there is nothing to delete
    assert calls.end(1200) == []


def test_records_that_run_once_more_do_not_move_the_clock() -> None:
    calls = Calls(ttl_ms=100)
    calls.change("k", 1000, n=1)
    calls.end(1000)
    calls.end(5000, moves=False)
    assert calls.read("k", 1000) == {"n": 1}


def test_a_batch_that_is_taken_back_does_not_move_the_clock() -> None:
    calls = Calls(ttl_ms=100)
    calls.change("k", 1000, n=1)
    calls.end(1000)
    assert calls.read("k", 5000) == {}
    calls.begin()
    assert calls.read("k", 1000) == {"n": 1}


def test_expired_entries_leave_the_memory_of_a_shards_own_range() -> None:
    lower = KeyRange(0, (1 << 128) - 2)
    calls = Calls(ttl_ms=800, key_range=lower)
    for at in (1000, 1500):
        calls.change(f"k{at}", at, n=1)
    calls.end(1500)
    assert calls.end(1850) == []
    assert len(calls.store) == 1
    calls.end(2310)
    assert len(calls.store) == 0
    assert calls.store.memory == 0


def test_entries_are_not_searched_with_every_batch() -> None:
    calls = Calls(ttl_ms=800, key_range=KeyRange(0, (1 << 128) - 2))
    calls.change("k", 1000, n=1)
    calls.end(1750)
    calls.end(1801)
    assert len(calls.store) == 1, "an eighth of the ttl has not passed"
    calls.end(1860)
    assert len(calls.store) == 0


def test_shards_that_share_a_store_may_lag_by_a_day() -> None:
    calls = Calls(ttl_ms=800)
    calls.change("k", 1000, n=1)
    calls.end(1000)
    calls.store.applied["behind"] = 0
    calls.end(3 * DAY)
    assert len(calls.store) == 1, "the other shard's time is not known"
    calls.begin("behind")
    calls.end(1000 + DAY)
    calls.end(3 * DAY)
    assert len(calls.store) == 1
    calls.begin("behind")
    calls.end(2000 + DAY)
    assert len(calls.store) == 0


def test_a_key_that_another_shard_has_fails_unless_it_has_state_here() -> None:
    here = KeyRange(hash_of(b"mine"), hash_of(b"mine"))
    calls = Calls(key_range=here, entries=[(b"old", encode_state({"n": 1}), None)])
    assert calls.read("mine") == {}
    assert calls.read("old") == {"n": 1}
    with pytest.raises(KeyElsewhere, match=r"'theirs' hashes outside the range of its shard \(store\)"):
        calls.read("theirs")


def test_new_keys_find_a_full_store() -> None:
    calls = Calls()
    calls.change("k", n=1)
    calls.store.room = calls.store.memory
    with pytest.raises(StateFull, match=r"The state of 1 keys in the store store takes \d+ bytes"):
        calls.change("new", n=1)
    calls.change("k", n=2, text="longer than before")
    assert [change.key for change in calls.end()] == [b"k"]


def test_a_key_has_at_most_256_kib() -> None:
    calls = Calls()
    calls.change("k", data=bytes(256 * 1024 - 20))
    with pytest.raises(StateTooLarge, match=r"takes 262,15\d bytes; the limit is 262,144"):
        calls.change("k", data=bytes(256 * 1024))
    assert len(calls.read("k")["data"]) == 256 * 1024 - 20


def test_a_snapshot_becomes_the_copy_of_its_shard_and_of_its_siblings() -> None:
    entries = pa.table(
        {
            "key": pa.array([b"a", "\ud800".encode("utf-8", "surrogatepass")], pa.binary()),
            "value": pa.array([encode_state({"n": 1}), encode_state({"n": 2})], pa.binary()),
            "expires_ms": pa.array([None, 500], pa.int64()),
        }
    )
    whole = KeyRange(0, 5)
    snapshot = StateSnapshot("root", whole, 7, 400, entries, {"sibling": 3})
    store = KeyedState.loaded(snapshot, SHARD, ttl_ms=None, clocks={"sibling": 20})
    assert (store.store_id, store.key_range, len(store), store.timed) == ("root", whole, 2, True)
    assert store.stands_at(SHARD, 8)
    assert store.stands_at("sibling", 4)
    calls = Calls(store)
    assert [calls.read(key) for key in ("a", "\ud800")] == [{"n": 1}, {"n": 2}]
    assert calls.read("\ud800", 500) == {}
    for shard in ("sibling", SHARD):
        calls.begin(shard)
        calls.end(DAY)
    assert len(calls.store) == 1
    first = KeyedState.loaded(
        StateSnapshot("root", whole, 0, None, entries.slice(0, 1)), SHARD, ttl_ms=None, clocks={}
    )
    assert (first.clocks, first.timed) == ({}, False)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -(2**63), 2**64 - 1, 1.5, "text", b"bytes", [1, [2]], {"a": {"b": []}}, {}),
        *(Decimal("1.10"), datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)),
    ],
)
def test_values_come_back_as_they_were_stored(value: Any) -> None:
    back = decode_state(encode_state({"v": value, "list": [value]}))
    assert back == {"v": value, "list": [value]}
    assert type(back["v"]) is type(value)
    assert str(back["v"]) == str(value)


def test_what_python_has_in_several_forms_comes_back_in_one() -> None:
    state = {"pair": (1, (2, Decimal(3))), "at": datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))}
    back = decode_state(encode_state(state))
    assert back == {"pair": [1, [2, Decimal(3)]], "at": datetime(2026, 1, 1, tzinfo=UTC)}
    assert back["at"].tzinfo is UTC
    assert isnan(decode_state(encode_state({"v": float("nan")}))["v"])
    assert decode_state(encode_state({"v": Decimal("NaN")}))["v"].is_nan()


def test_bytes_that_did_not_change_are_the_same_object() -> None:
    for state in ({"n": 1}, {"price": Decimal("1.5")}):
        before = encode_state(state)
        assert encode_state(state, before) is before
        assert encode_state(state | {"m": 1}, before) is not before


class _Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"a": {1}}, "ctx.state['a'] is of the type set"),
        ({"a": [1, object()]}, "ctx.state['a'][1] is of the type object"),
        ({"a": ({"b": bytearray(b"")},)}, "ctx.state['a'][0]['b'] is of the type bytearray"),
        ({"a": _Text("x")}, "ctx.state['a'] is of the type _Text"),
        ({"a": datetime(2026, 1, 1)}, "ctx.state['a'] is a datetime without a time zone"),  # noqa: DTZ001  # that is the point
        ({"a": 2**64}, "ctx.state['a']: can't serialize ints"),
        ({"a": ["\ud800"]}, "ctx.state['a'][0]: 'utf-8' codec can't encode"),
        ({1: 2}, "ctx.state has the key 1, which is not text"),
        ({"a": {b"b": 2}}, "ctx.state['a'] has the key b'b', which is not text"),
    ],
)
def test_other_values_are_refused_with_their_path(state: Any, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        encode_state(state)
    assert str(caught.value).startswith(text)
    assert "The call failed. State holds None, bool" in str(caught.value)


def test_bytes_of_another_program_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown code 2"):
        decode_state(b"\x81\xa1a\xd4\x02\x00")


def context_of(record: Record, store: KeyedState | None = None) -> CallContext:
    context = CallContext(store or KeyedState("store"), SHARD)
    context.received_ms = 9_000
    assert context.begin(record, 0) is record
    return context


def record_of(key: str | None = "k", arrival_ms: int | None = 1_500) -> Record:
    return Record(shard_id=SHARD, sequence_number="1", partition_key=key, arrival_ms=arrival_ms)


def test_a_context_is_that_of_its_record() -> None:
    context = context_of(record_of())
    assert (context.key, context.now) == ("k", datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC))
    assert (context.state, dict(context.settings)) == ({}, {})
    context.state["n"] = 1
    assert context.state == {"n": 1}
    context.join()
    assert context.store.read("k", 0) == {"n": 1}
    context.begin(record_of("k"), 0)
    context.state = {"m": 2}
    context.join()
    assert context.store.read("k", 0) == {"m": 2}
    context.begin(record_of("other"), 0)
    context.join()
    assert (context.state, len(context.store)) == ({}, 1)


def test_without_an_arrival_time_it_is_the_time_of_receipt() -> None:
    assert context_of(record_of(arrival_ms=None)).now == datetime(1970, 1, 1, 0, 0, 9, tzinfo=UTC)


def test_a_record_without_a_key_has_no_state() -> None:
    context = context_of(record_of(None))
    for name in ("key", "state"):
        with pytest.raises(
            NoKey, match=r"The record has no partition key. The call failed. Give the records"
        ):
            getattr(context, name)


def test_a_test_of_a_handler_makes_a_context_of_its_own() -> None:
    state = {"n": 1}
    context = Context("k", now=datetime(2026, 1, 1, tzinfo=UTC), state=state)
    assert (context.key, context.now, context.state) == ("k", datetime(2026, 1, 1, tzinfo=UTC), state)
    assert context.state is state
    assert Context("k").state == {}
    with pytest.raises(NoKey):
        _ = Context().state
