"""Messages between server and worker: what was sent is what comes, and what is none is refused."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from mldserver import errors
from mldserver.children.channel import WireError, decode, encode
from mldserver.effects import Effects
from mldserver.errors import HandlerHalted, InternalError, PeerError, StateMoved
from mldserver.handler.inspection import load_spec
from mldserver.handler.spec import HookSpec, TimerHook
from mldserver.records import DeadLetter, Sequence, pack_sequence, unpack_sequence
from mldserver.runtime.failure_policy import FailurePolicy, OnFailure, failure_rule
from mldserver.runtime.interface import (
    BatchOutcome,
    BatchOutline,
    Delivery,
    DueTimers,
    Records,
    TimerFilter,
    TimerLetter,
    TimerReport,
    unpacked,
)
from mldserver.stores import KeyRange, StateChange, StateSnapshot, pack_changes
from mldserver.windows import sliding
from mldserver.workers import wire
from mldserver.workers.shared_memory import rows_file
from mldserver.workers.wire import done_of, outcome_of
from mldserver.workers.worker_process import message_of

sequences = st.builds(Sequence, st.integers(0, 10**56 - 1), st.integers(0, 2**63 - 1))
numbers = st.integers(0, 2**63 - 1)
texts = st.text(max_size=20)
outlines = st.tuples(
    numbers,
    numbers,
    st.none() | sequences,
    st.none() | sequences,
    st.none() | numbers,
    st.none() | numbers,
).map(lambda values: BatchOutline(*values))
letters = st.builds(
    DeadLetter,
    shard_id=texts,
    sequence=sequences,
    partition_key=st.none() | texts,
    data=st.binary(max_size=50),
    arrival_ms=st.none() | numbers,
    attempts=numbers,
    error=texts,
    traceback=texts,
    handler=texts,
    at_ms=numbers,
    parked_behind=st.none() | sequences,
    timer=st.none() | texts,
    due_ms=st.none() | numbers,
)


def crossed(message: Any) -> Any:
    """Return a message as the other side sees it."""
    (seen,) = decode(kinds_of(message), frame(message))
    return seen


def kinds_of(message: Any) -> Any:
    return wire.FromServer if isinstance(message, wire.FromServer) else wire.FromWorker


def frame(message: Any) -> bytes:
    return b"\x91" + encode(message)  # an array of one


@given(outlines)
def test_outlines_cross(outline: BatchOutline) -> None:
    outcome = BatchOutcome(outline)
    assert outcome_of(crossed(done_of(1, outcome)), []) == outcome


@given(letters)
def test_dead_letters_cross(letter: DeadLetter) -> None:
    outcome = BatchOutcome(BatchOutline(1, 0, None, None, None, None), Effects(dead_letters=(letter,)))
    assert outcome_of(crossed(done_of(1, outcome)), []) == outcome


@given(st.none() | sequences)
def test_positions_cross_in_outcomes_and_by_themselves(position: Sequence | None) -> None:
    outline = BatchOutline(0, 0, None, None, None, None)
    outcome = BatchOutcome(outline, position=position, keeps_position=True)
    assert outcome_of(crossed(done_of(1, outcome)), []) == outcome
    assert unpack_sequence(pack_sequence(position)) == position


def test_the_server_knows_of_a_handler_what_the_worker_has_loaded() -> None:
    """All but what only the process needs that calls it."""
    spec = replace(
        load_spec("handlers.departures"),
        windows=sliding("1 hour", every="5 minutes", on="scheduled", early="10 s"),
        concurrency=3,
        keyed=True,
        state_ttl_ms=7,
        after=("payments",),
        window_columns=("since", "until"),
        writes_for_itself=True,
        hooks={"on_window": HookSpec("on_window", is_async=False, takes_previous=True)},
    )
    known = wire.spec_of(spec.path, crossed(wire.loaded_of(spec)))
    names = {each.name for each in fields(spec)} - {"target", "blocking", "changes", "tables"}
    assert {name: getattr(known, name) for name in names} == {name: getattr(spec, name) for name in names}
    assert known.takes_previous


def test_the_server_knows_the_callbacks_of_timers_that_the_worker_has_loaded() -> None:
    timers = {"alarm": TimerHook("alarm", is_async=False, max_lateness_ms=1000)}
    spec = replace(load_spec("handlers.raw"), timers=timers)
    assert wire.spec_of(spec.path, crossed(wire.loaded_of(spec))).timers == timers


def test_requests_to_fire_timers_cross() -> None:
    letter = TimerLetter("key", "alarm/name", 17, b"\xc0")
    for timers in (
        DueTimers(5, 100),
        DueTimers(5, 1, TimerFilter(timer_id="alarm")),
        DueTimers(5, 1, letters=(letter,)),
    ):
        form, data = timers.packed()
        assert unpacked(form, memoryview(data), "shard") == timers


def test_the_report_on_timers_crosses_and_parts_of_a_batch_join() -> None:
    outline = BatchOutline(0, 0, None, None, None, None)
    first = TimerReport(set=1, cancelled=2, pending=1, next_due_ms=5)
    last = TimerReport(
        set=3,
        fired=1,
        lateness=(1, 2),
        lateness_sum_ms=7,
        pending=4,
        unknown=1,
        next_due_ms=9,
        next_call_ms=10,
    )
    outcomes = [BatchOutcome(outline, timers=report) for report in (first, last)]
    assert [outcome_of(crossed(done_of(1, outcome)), []) for outcome in outcomes] == outcomes
    assert wire.joined(outcomes).timers == structs.replace(last, set=4, cancelled=2)
    assert wire.joined([BatchOutcome(outline)] * 2).timers is None


changes = st.builds(
    StateChange,
    st.sampled_from([b"a", b"b", b"\xff"]),
    st.none() | st.binary(max_size=3),
    st.none() | st.integers(0, 2**62),
    st.sampled_from(["", "alarm", "alarm/name"]),
)


@given(
    st.integers(0, 2**128 - 1), st.integers(0, 2**128 - 1), st.none() | numbers, st.lists(st.lists(changes))
)
async def test_a_store_crosses_once_with_the_changes_that_follow_it(
    first: int, last: int, clock_ms: int | None, batches: list[list[StateChange]]
) -> None:
    first_rows = [
        StateChange(b"a", b"old", 5),
        StateChange(b"c", b"stays"),
        StateChange(b"a", b"timer", 5, "alarm"),
    ]
    held = {(change.key, change.timer): change for change in first_rows}
    snapshot = StateSnapshot("s", KeyRange(first, last), 7, clock_ms, table(held.values()), {"b": 2})
    file, size = rows_file(snapshot.entries)
    sent = wire.sent_of(snapshot, size, tuple(map(pack_changes, batches)))
    message = crossed(wire.Open(1, "a", None, 0, sent))
    source = wire.source_of(message.store, file)
    got = await source()
    assert msgspec.structs.replace(got, entries=snapshot.entries) == snapshot
    held |= {(change.key, change.timer): change for batch in batches for change in batch}
    rows = table(change for change in held.values() if change.value is not None).to_pylist()
    order = lambda row: (row["key"], row["timer"] or "")  # noqa: E731  # used twice
    assert sorted(got.entries.to_pylist(), key=order) == sorted(rows, key=order)
    with pytest.raises(StateMoved):
        await source()


def table(entries: Iterable[StateChange]) -> pa.Table:
    names = [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("expires_ms", pa.int64()),
        ("timer", pa.string()),
    ]
    rows = [entry._asdict() | {"timer": entry.timer or None} for entry in entries]
    return pa.Table.from_pylist(rows, schema=pa.schema(names))


@given(st.none() | st.integers(1, 2**40))
def test_a_batchs_number_crosses(number: int | None) -> None:
    process: Any = SimpleNamespace(ids=itertools.count(1))
    given_ = Delivery("a", Records([]), 0, None, number=number)
    form, line = given_.payload.packed()
    assert crossed(message_of(process, given_, form, line, len(line), None)).number == number


def test_parts_of_a_batch_give_their_changes_of_state_in_order() -> None:
    outline = BatchOutline(2, 0, None, None, None, None)
    states: list[tuple[bytes, ...]] = [(b"1",), (), (b"3", b"2")]
    parts = [BatchOutcome(outline, Effects(state=state)) for state in states]
    assert wire.joined(parts).effects.state == (b"1", b"3", b"2")


def test_a_policy_crosses_with_all_its_rules() -> None:
    policy = FailurePolicy(
        attempts=7,
        on_failure=OnFailure.HALT,
        max_age_ms=5,
        max_ahead_ms=6,
        failure_rules=(failure_rule("a.KeyError=retry:2"),),
    )
    start = wire.StartWorker("p", "h", ["/a"], "/b", policy, None, 1.5, 64, 1024, {}, 20)
    assert crossed(start).policy == policy


@pytest.mark.parametrize("cls", [PeerError, HandlerHalted, InternalError, errors.DecodeError])
def test_errors_of_ours_cross_as_what_they_are(cls: type[errors.MldserverError]) -> None:
    error = cls("It broke.", did="Closed.", advice="Mend it.", shard="s", attempts=3, nothing=None)
    back = wire.error_of(crossed(wire.failed(5, error)))
    assert (type(back), str(back)) == (cls, str(error))
    assert back.where == {"shard": "s", "attempts": 3}


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("by zero"), type("MldserverErr", (Exception,), {})("by zero")]
)
def test_errors_of_others_cross_as_bugs(error: Exception) -> None:
    back = wire.error_of(crossed(wire.failed(5, error)))
    assert type(back) is InternalError
    assert "by zero" in str(back)


def test_what_messagepack_does_not_know_crosses_as_text() -> None:
    fields = {"text": "half \ud800", "big": 2**80, "path": Path("/a"), "list": [(1, "\udfff")], "small": -1}
    assert crossed(wire.ForwardedLog("info", "x.y", fields)).fields == {
        "text": "half \\ud800",
        "big": str(2**80),
        "path": "/a",
        "list": [[1, "\\udfff"]],
        "small": -1,
    }
    effects: Any = {"dead_letters": [{"data": b"\xff\x00", "error": "\ud800"}]}
    done = crossed(wire.BatchDone(1, 0, 0, None, None, None, None, b"\x00", effects=effects))
    assert done.effects == {"dead_letters": [{"data": b"\xff\x00", "error": "\\ud800"}]}
    assert done.rows == b"\x00"


@given(st.binary(max_size=40))
def test_bytes_that_are_no_message_are_refused_and_nothing_else_happens(data: bytes) -> None:
    for kinds in (wire.FromServer, wire.FromWorker):
        with contextlib.suppress(WireError):
            decode(kinds, data)


def test_a_message_of_the_wrong_side_is_none() -> None:
    with pytest.raises(WireError):
        decode(wire.FromWorker, frame(wire.Forget(1, "s")))
    with pytest.raises(WireError):
        decode(wire.FromServer, frame(wire.Finished(1)))
