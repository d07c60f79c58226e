"""Timers in the inline runtime: what fires, in which order, what counts, and what becomes of callbacks that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from mldserver import Context, Discard, Fatal, Retry, Timer, timer
from mldserver.base.clock import SystemClock
from mldserver.records import Record, Sequence, Shard
from mldserver.runtime.failure_policy import FailurePolicy, OnFailure
from mldserver.runtime.inline import InlineRuntime
from mldserver.runtime.interface import (
    BatchOutcome,
    Delivery,
    DueTimers,
    Records,
    TimerFilter,
    TimerLetter,
    TimerReport,
    outcome_of,
)
from mldserver.runtime.state_values import decode_state, decode_timer, encode_payload
from mldserver.stores import unpack_changes

pytestmark = pytest.mark.quick

A = "shard-a"
HOOKS = ["at once", "on a thread", "async"]
SCHEMA = "text STRING, at TIMESTAMP"


def set_one(record: Any, ctx: Context) -> None:
    """Set the timer that the payload names, due so many seconds after the record: ``callback name seconds payload``."""
    callback, name, seconds, *payload = record.text().split()
    named = "" if name == "-" else name
    if callback == "cancel":
        ctx.timers.cancel(alarm, named)
    else:
        ctx.timers.set(CALLBACKS[callback], after=float(seconds), name=named, payload=payload)


@timer
def alarm(due: Timer, ctx: Context) -> Any:
    """Return a row, and do what the payload says."""
    ctx.state["fired"] = ctx.state.get("fired", 0) + 1
    for word in due.payload:
        if word == "fail":
            raise OSError("not now")
        if word == "value":
            raise ValueError("never")
        if word == "fatal":
            raise Fatal("never")
        if word == "discard":
            raise Discard("no")
        if word == "later":
            raise Retry("busy", after=7)
        if word == "again":
            ctx.timers.set(alarm, after="10 seconds", payload=["done"])
        if word == "cancel":
            ctx.timers.cancel(alarm, "other")
        if word == "replace":
            ctx.timers.set(alarm, after=0, name="other", payload=["replaced"])
        if word == "row":
            return 1, 2, 3
    return f"{ctx.key} {due.name} {due.attempt} {ctx.state['fired']} {' '.join(due.payload)}", ctx.now


@timer(max_lateness="5 seconds")
def hasty(due: Timer, ctx: Context) -> Any:
    """Return a row."""
    return f"hasty {ctx.key}", due.at


async def set_one_async(record: Any, ctx: Context) -> None:
    set_one(record, ctx)
    await asyncio.sleep(0)


def as_async(function: Callable[..., Any], name: str, **options: Any) -> Any:
    """Return an asynchronous callback with this name that does as a synchronous one does."""

    async def called(due: Timer, ctx: Context) -> Any:
        await asyncio.sleep(0)
        return function(due, ctx)

    called.__name__ = called.__qualname__ = name
    return timer(**options)(called)


def as_sync(function: Callable[..., Any]) -> Any:
    """Return a function as the callback ``alarm``."""
    function.__name__ = function.__qualname__ = "alarm"
    return timer(function)


CALLBACKS = {"alarm": alarm, "hasty": hasty}
SYNC = {"process_record": set_one, **CALLBACKS, "schema": SCHEMA}
ASYNC = {
    "process_record": set_one_async,
    "alarm": as_async(alarm, "alarm"),
    "hasty": as_async(hasty, "hasty", max_lateness="5 seconds"),
    "schema": SCHEMA,
}


class HandClock(SystemClock):
    """A clock whose steady time a test sets."""

    ms = 0

    def steady_ms(self) -> int:
        return self.ms


class Fired:
    """A shard of a handler with timers."""

    def __init__(self, runtime: InlineRuntime) -> None:
        self.runtime = runtime
        self.number = 0

    async def records(self, *payloads: str, first: int = 1) -> BatchOutcome:
        """Process records of ``key payload``, one second apart from second ``first`` on."""
        self.number += 1
        made = []
        for second, payload in enumerate(payloads, first):
            key, _, data = payload.partition(" ")
            made.append(
                Record(
                    shard_id=A,
                    sequence_number=str(second),
                    data=data.encode(),
                    partition_key=key,
                    arrival_ms=1_000 * second,
                )
            )
        delivery = Delivery(A, Records(made), 9_000, None, number=self.number)
        return await outcome_of(self.runtime.begin(delivery))

    async def fire(self, until: float, limit: int = 100, **more: Any) -> BatchOutcome:
        """Fire what is due at second ``until``, at that time."""
        names = {name: more.pop(name) for name in ("cancel", "letters") if name in more}
        due = DueTimers(int(until * 1000), limit, **names)
        self.number += 1
        options = {"received_ms": int(until * 1000), "after": Sequence(9, 1), "number": self.number, **more}
        return await outcome_of(self.runtime.begin(Delivery(A, due, **options)))


@pytest.fixture(params=HOOKS)
async def fired(request: Any, kit: Any) -> Any:
    """Return a function that opens the shard with a policy, however the hooks run."""

    async def open_(**policy: Any) -> Fired:
        names = ASYNC if request.param == "async" else SYNC
        runtime = await kit.start(**names, at_once=request.param == "at once", policy=FailurePolicy(**policy))
        await runtime.open(Shard(A))
        return Fired(runtime)

    return open_


def texts(outcome: BatchOutcome) -> list[str]:
    """Return the first column of an outcome's rows."""
    rows = outcome.effects.rows
    return [] if rows is None else rows.column("text").to_pylist()


def timers(outcome: BatchOutcome) -> dict[str, Any]:
    """Return the timers that an outcome changed, by ``key/id``: due second, attempt and payload; None: it is gone."""
    changes = [change for blob in outcome.effects.state for change in unpack_changes(blob) if change.timer]
    return {
        f"{change.key.decode()}/{change.timer}": None
        if change.value is None
        else ((change.expires_ms or 0) / 1000, *decode_timer(change.value)[1:])
        for change in changes
    }


def state(outcome: BatchOutcome) -> dict[str, Any]:
    """Return the state that an outcome changed."""
    changes = [change for blob in outcome.effects.state for change in unpack_changes(blob)]
    return {change.key.decode(): decode_state(change.value or b"") for change in changes if not change.timer}


def report(outcome: BatchOutcome) -> TimerReport:
    assert outcome.timers is not None
    return outcome.timers


async def test_a_timer_fires_once_with_its_rows_and_state(fired: Any) -> None:
    shard = await fired()
    outcome = await shard.records("k alarm - 10 x")
    assert timers(outcome) == {"k/alarm": (11.0, 0, ["x"])}
    assert report(outcome) == TimerReport(
        set=1, pending=1, callbacks=("alarm",), next_due_ms=11_000, next_call_ms=11_000
    )
    early = await shard.fire(10.999)
    assert (texts(early), early.effects.state, report(early).pending) == ([], (), 1)
    outcome = await shard.fire(11.25)
    assert texts(outcome) == ["k  0 1 x"]
    assert timers(outcome) == {"k/alarm": None}
    assert state(outcome) == {"k": {"fired": 1}}
    assert outcome.outline.latest_arrival_ms == 11_000
    assert outcome.outline.records == 0
    seen = report(outcome)
    assert (seen.fired, seen.pending, seen.next_due_ms, seen.lateness_sum_ms) == (1, 0, None, 250)
    assert sum(seen.lateness) == 1
    [row] = outcome.effects.rows.to_pylist()
    assert (row["_time"], row["_sequence"], row["_sub_sequence"], row["_arrival"]) == (11_000, "9", 1, None)
    assert row["at"].timestamp() == 11
    assert texts(await shard.fire(12)) == []


async def test_timers_fire_by_due_time_and_then_as_they_were_set_and_at_most_so_many(fired: Any) -> None:
    shard = await fired()
    await shard.records("k alarm b 9 2", "k alarm a 8 3", "l alarm - 2 1")
    assert texts(await shard.fire(20, limit=2)) == ["l  0 1 1", "k b 0 1 2"]
    outcome = await shard.fire(20, limit=2)
    assert texts(outcome) == ["k a 0 2 3"]
    assert outcome.timers.next_due_ms is None


async def test_the_time_of_a_row_is_not_before_the_shards_clock(fired: Any) -> None:
    shard = await fired()
    await shard.records("k alarm - 1", "k alarm later 9", "k nothing", first=5)
    outcome = await shard.fire(30)
    assert outcome.effects.rows.column("_time").to_pylist() == [7_000, 15_000]
    await shard.records("k alarm - 1", first=16)
    assert (await shard.fire(30)).effects.rows.column("_time").to_pylist() == [17_000]


async def test_a_callback_that_cancels_or_replaces_another_timer_of_the_portion_decides(fired: Any) -> None:
    shard = await fired()
    await shard.records("k alarm first 1 cancel", "k alarm other 1")
    outcome = await shard.fire(20)
    assert texts(outcome) == ["k first 0 1 cancel"]
    assert timers(outcome) == {"k/alarm/first": None, "k/alarm/other": None}
    assert (report(outcome).fired, report(outcome).cancelled) == (1, 1)
    await shard.records("k alarm first 1 replace", "k alarm other 1 old")
    outcome = await shard.fire(20)
    assert texts(outcome) == ["k first 0 2 replace"]
    assert timers(outcome) == {"k/alarm/first": None, "k/alarm/other": (2.0, 0, ["replaced"])}
    assert texts(await shard.fire(20)) == ["k other 0 3 replaced"]


async def test_a_callback_may_set_its_own_timer_again(fired: Any) -> None:
    shard = await fired()
    await shard.records("k alarm - 1 again")
    outcome = await shard.fire(5)
    assert timers(outcome) == {"k/alarm": (12.0, 0, ["done"])}
    assert (report(outcome).set, report(outcome).fired, report(outcome).next_due_ms) == (1, 1, 12_000)


async def test_a_failed_callback_is_set_again_and_takes_no_part_in_the_state(fired: Any) -> None:
    shard = await fired(attempts=3, retry_base_seconds=2.0)
    await shard.records("k alarm a 1 fail", "k alarm b 1 ok")
    outcome = await shard.fire(5)
    assert texts(outcome) == ["k b 0 1 ok"]
    assert timers(outcome) == {"k/alarm/a": (5 + 2, 1, ["fail"]), "k/alarm/b": None}
    assert (report(outcome).fired, report(outcome).failed, report(outcome).pending) == (1, 1, 1)
    outcome = await shard.fire(7)
    assert timers(outcome) == {"k/alarm/a": (7 + 4, 2, ["fail"])}
    assert report(outcome).lateness == ()
    outcome = await shard.fire(11)
    assert timers(outcome) == {"k/alarm/a": None}
    assert (report(outcome).fired, report(outcome).failed) == (1, 0)
    [letter] = outcome.effects.dead_letters
    assert (letter.timer, letter.due_ms, letter.partition_key, letter.attempts) == ("alarm/a", 11_000, "k", 3)
    assert letter.data == encode_payload(["fail"])
    assert (letter.sequence, letter.arrival_ms) == (Sequence(9, 1), None)


async def test_retry_names_the_time_of_the_next_call(fired: Any) -> None:
    shard = await fired(attempts=3)
    await shard.records("k alarm - 1 later")
    assert timers(await shard.fire(5)) == {"k/alarm": (12.0, 1, ["later"])}


@pytest.mark.parametrize("on_failure", [OnFailure.HALT, OnFailure.DEAD_LETTER])
@pytest.mark.parametrize("word", ["value", "fatal", "row"])
async def test_what_no_repetition_mends_is_a_dead_letter_and_never_stops_the_shard(
    fired: Any, word: str, on_failure: OnFailure
) -> None:
    shard = await fired(on_failure=on_failure)
    await shard.records(f"k alarm a 1 {word}", "k alarm b 1 ok")
    outcome = await shard.fire(5)
    assert texts(outcome) == ["k b 0 1 ok"]
    assert [letter.timer for letter in outcome.effects.dead_letters] == ["alarm/a"]
    assert timers(outcome) == {"k/alarm/a": None, "k/alarm/b": None}


async def test_timers_may_be_skipped_or_discarded(fired: Any) -> None:
    shard = await fired(on_failure=OnFailure.SKIP)
    await shard.records("k alarm a 1 value", "k alarm b 1 discard")
    outcome = await shard.fire(5)
    assert (outcome.skipped, outcome.discarded, outcome.effects.dead_letters) == (1, 1, ())
    assert timers(outcome) == {"k/alarm/a": None, "k/alarm/b": None}


async def test_a_timer_that_is_later_than_its_callback_allows_is_skipped(fired: Any) -> None:
    shard = await fired()
    await shard.records("k hasty - 1", "l hasty - 1")
    outcome = await shard.fire(7.5)
    assert texts(outcome) == ["hasty l"]
    assert (report(outcome).skipped, report(outcome).fired) == (1, 1)
    assert timers(outcome) == {"k/hasty": None, "l/hasty": None}


async def test_timers_are_cancelled_by_key_callback_and_time(fired: Any) -> None:
    shard = await fired()
    await shard.records("k alarm a 10", "k alarm b 20", "k hasty - 5", "l alarm - 10")
    outcome = await shard.fire(0, cancel=TimerFilter("k", "alarm", 22_000))
    assert timers(outcome) == {"k/alarm/a": None}
    assert (report(outcome).cancelled, report(outcome).fired) == (1, 0)
    assert report(await shard.fire(0, cancel=TimerFilter(timer_id="alarm"), limit=1)).cancelled == 1
    assert report(await shard.fire(0, cancel=TimerFilter(timer_id="alarm"))).cancelled == 1
    assert report(await shard.fire(0, cancel=TimerFilter())).pending == 0


async def test_dead_letters_run_beside_the_timer_with_their_id(fired: Any) -> None:
    shard = await fired(attempts=2)
    await shard.records("k alarm - 100 kept")
    letters = tuple(TimerLetter("k", "alarm", 3_000, encode_payload([word])) for word in ("x", "fail"))
    outcome = await shard.fire(50, letters=letters, redriven=True)
    assert texts(outcome) == ["k  0 1 x"]
    assert outcome.effects.rows.column("_time").to_pylist() == [3_000]
    [letter] = outcome.effects.dead_letters
    assert (letter.timer, letter.due_ms, letter.attempts) == ("alarm", 3_000, 2)
    assert timers(outcome) == {}
    assert report(outcome).pending == 1


async def test_a_condemned_timer_is_a_dead_letter_without_a_call(fired: Any) -> None:
    shard = await fired()
    await shard.records("k alarm a 1 x", "k alarm b 2 y")
    outcome = await shard.fire(20, limit=1, condemned="WorkerDied: it died")
    assert [letter.timer for letter in outcome.effects.dead_letters] == ["alarm/a"]
    assert timers(outcome) == {"k/alarm/a": None}
    assert state(outcome) == {}


async def test_a_handler_without_timers_refuses_to_fire(kit: Any) -> None:
    runtime = await kit.start(process_record=lambda record, ctx: None)
    await runtime.open(Shard(A))
    outcome = await Fired(runtime).fire(5)
    assert (outcome.timers, outcome.effects.state) == (None, ())


async def test_a_callback_beyond_its_deadline_is_set_again(kit: Any) -> None:
    async def slow(due: Timer, ctx: Context) -> None:
        ctx.state["never"] = 1
        await asyncio.sleep(3600)

    names = ASYNC | {"alarm": as_sync(slow)}
    runtime = await kit.start(**names, deadline=0.05, clock=SystemClock())
    await runtime.open(Shard(A))
    shard = Fired(runtime)
    await shard.records("k alarm - 1", "l hasty - 1")
    outcome = await shard.fire(5)
    assert timers(outcome)["k/alarm"][1] == 1
    assert state(outcome) == {}
    assert report(outcome).failed == 1


async def test_a_dead_letter_that_fails_again_is_never_skipped(fired: Any) -> None:
    shard = await fired(on_failure=OnFailure.SKIP)
    letter = TimerLetter("k", "alarm", 3_000, encode_payload(["value"]))
    outcome = await shard.fire(50, letters=(letter,), redriven=True)
    assert ([each.timer for each in outcome.effects.dead_letters], outcome.skipped) == (["alarm"], 0)


@pytest.mark.parametrize("hook", HOOKS)
async def test_a_portion_ends_when_its_calls_have_taken_long(kit: Any, hook: str) -> None:
    clock = HandClock()

    def slow(due: Timer, ctx: Context) -> Any:
        clock.ms += 30
        return ctx.key, due.at

    names = SYNC | {"alarm": as_sync(slow)}
    if hook == "async":
        names = ASYNC | {"alarm": as_async(slow, "alarm")}
    runtime = await kit.start(**names, at_once=hook == "at once", clock=clock)
    await runtime.open(Shard(A))
    shard = Fired(runtime)
    await shard.records("a alarm - 1", "b alarm - 1", "c alarm - 1", "d alarm - 1")
    outcome = await shard.fire(50)
    assert texts(outcome) == ["a", "b"]
    assert (outcome.outline.latest_arrival_ms, report(outcome).pending) == (3_000, 2)
    outcome = await shard.fire(50)
    assert texts(outcome) == ["c", "d"]
    assert outcome.effects.rows.column("_time").to_pylist() == [4_000, 5_000]


async def test_all_dead_letters_run_however_long_that_takes(kit: Any) -> None:
    clock = HandClock()

    def slow(due: Timer, ctx: Context) -> Any:
        clock.ms += 3_600_000
        return ctx.key, due.at

    runtime = await kit.start(**SYNC | {"alarm": as_sync(slow)}, clock=clock)
    await runtime.open(Shard(A))
    letters = tuple(TimerLetter(key, "alarm", 3_000, encode_payload(None)) for key in "abc")
    outcome = await Fired(runtime).fire(50, letters=letters, redriven=True)
    assert texts(outcome) == ["a", "b", "c"]
