"""The live copy of a store against the simplest thing that could be right: a dict that is copied before each batch and call."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from datetime import UTC
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.runtime.keyed_state import KeyedState
from mldserver.runtime.state_values import decode_state
from mldserver.stores import KeyRange, StateChange, StateSnapshot, unpack_changes

pytestmark = pytest.mark.quick

TTL = 50
OWN = KeyRange(0, (1 << 128) - 2)
"""A shard's own range, whose expired entries leave the memory at once."""

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.decimals(allow_nan=False)
    | st.datetimes(timezones=st.just(UTC), allow_imaginary=False).map(lambda at: at.replace(fold=0))
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@dataclass
class Call:
    """A record, and what the handler does with the state of its key."""

    key: str
    waits_ms: int
    name: str
    value: Any
    does: str


calls = st.builds(
    Call,
    st.sampled_from(["a", "b", "c", "\ud800"]),
    st.integers(-20, 40),
    st.sampled_from(["n", "m"]),
    values,
    st.sampled_from(["set", "set", "nest", "drop", "clear", "read", "fail", "bad"]),
)
batches = st.tuples(st.lists(calls, max_size=5), st.sampled_from(["done", "done", "abandoned", "moved"]))


@dataclass
class Naive:
    """The state as whole copies, with the time at which each key's state expires."""

    ttl: int | None
    kept: dict[str, tuple[dict[str, Any], int | None]] = field(default_factory=dict)
    clock: int = 0

    def read(self, key: str) -> dict[str, Any]:
        state, expires = self.kept.get(key, ({}, None))
        return {} if expires is not None and expires <= self.clock else copy.deepcopy(state)

    def write(self, key: str, state: dict[str, Any]) -> None:
        if state != self.read(key) or repr(state) != repr(self.read(key)):
            self.kept[key] = copy.deepcopy(state), None if self.ttl is None else self.clock + self.ttl


def act(call: Call, state: dict[str, Any]) -> bool:
    """Do what the handler does; return whether the call counts."""
    match call.does:
        case "set" | "fail":
            state[call.name] = call.value
        case "nest":
            held = state.setdefault("list", [])
            held.append(call.value)
        case "drop":
            state.pop(call.name, None)
        case "clear":
            state.clear()
        case "bad":
            state[call.name] = {"set": {1}}
    return call.does not in {"fail", "bad"}


def snapshot_of(files: dict[bytes, StateChange], accepted: int, clock: int) -> StateSnapshot:
    """Return what a new process would be given: the newest values, without tombstones and expired ones."""
    kept = [
        each
        for each in files.values()
        if each.value is not None and (each.expires_ms is None or each.expires_ms > clock)
    ]
    columns = {
        "key": pa.array([each.key for each in kept], pa.binary()),
        "value": pa.array([each.value for each in kept], pa.binary()),
        "expires_ms": pa.array([each.expires_ms for each in kept], pa.int64()),
    }
    return StateSnapshot("store", OWN, accepted, clock or None, pa.table(columns))


@given(st.lists(batches, max_size=8), st.sampled_from([None, TTL]))
def test_state_is_what_whole_copies_would_have_kept(history: Any, ttl: int | None) -> None:
    naive, files, accepted = Naive(ttl), dict[bytes, StateChange](), 0
    store = KeyedState.loaded(snapshot_of(files, 0, 0), "shard", ttl_ms=ttl, clocks={})
    empty_bytes, arrival = store.memory, 100
    for made, end in history:
        before = copy.deepcopy(naive)
        store.begin("shard", object())
        latest = None
        for call in made:
            arrival = max(0, arrival + call.waits_ms)
            latest = arrival if latest is None else max(latest, arrival)
            naive.clock = max(naive.clock, latest)
            expected, state = naive.read(call.key), store.read(call.key, latest)
            assert state == expected
            assert repr(state) == repr(expected)  # True is not 1, and 1.0 not 1
            if act(call, state):
                store.write(call.key, state, latest)
                act(call, expected)
                naive.write(call.key, expected)
            elif call.does == "bad":
                with pytest.raises(TypeError):
                    store.write(call.key, state, latest)
        if end == "done":
            [*blobs] = store.effects(latest_ms=latest, counts=True, moves=True)
            files |= {change.key: change for blob in blobs for change in unpack_changes(blob)}
            accepted += 1
        else:
            naive = before
        if end == "moved":
            snapshot = snapshot_of(files, accepted, naive.clock)
            store = KeyedState.loaded(snapshot, "shard", ttl_ms=ttl, clocks={})
        assert store.stands_at("shard", accepted + 1)
    store.begin("shard", object())
    for key in "abc\ud800":
        assert repr(store.read(key, 0)) == repr(naive.read(key))
        store.write(key, {}, 0)
    held = {each.key: decode_state(each.value) for each in files.values() if each.value is not None}
    alive = {key.encode("utf-8", "surrogatepass"): naive.read(key) for key in naive.kept}
    assert all(held.get(key) == state for key, state in alive.items() if state)
    if ttl is None:
        assert store.memory == empty_bytes
