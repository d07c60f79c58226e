"""The state machine of a shard's consumption: its rules one by one, and against a naive model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mldserver.consumer import core
from mldserver.consumer.core import (
    PHASES,
    QUICK_MS,
    WORK,
    Consumption,
    InFlight,
    Order,
    Phase,
    Signal,
    Stage,
    Work,
)
from mldserver.errors import InternalError

pytestmark = [pytest.mark.quick, pytest.mark.core]


def batch(number: int = 1, *, size: int = 10, at: int = 0) -> InFlight:
    return InFlight(f"batch {number}", size, at)


def opened(*, early: bool = True, one_at_a_time: bool = False) -> Consumption:
    it = Consumption(early=early, one_at_a_time=one_at_a_time)
    it.signal(Signal.CLAIM)
    it.signal(Signal.OPENED)
    it.orders.clear()
    return it


def orders(it: Consumption) -> list[Order]:
    """Return the orders, as carried out."""
    given = [order for order, _ in it.orders]
    it.orders.clear()
    return given


def working(count: int = 1, *, early: bool = True) -> tuple[Consumption, list[InFlight]]:
    """Return batches of which the runtime works on all by itself, and the source waits for none but the last."""
    it, given = opened(early=early), []
    for number in range(count):
        it.quick = number > 0 or early
        given.append(batch(number))
        it.deliver(given[-1], ahead=number < count - 1)
        given[-1].begun = "a future"
        it.submitted(given[-1])
    it.orders.clear()
    return it, given


# The tables.


@pytest.mark.parametrize("state", [*Phase, *Work])
def test_a_signal_without_a_row_is_an_error_that_changes_nothing(state: Phase | Work) -> None:
    rows, others = (PHASES, WORK) if isinstance(state, Phase) else (WORK, PHASES)
    known = {signal for row in rows.values() for signal in row}
    assert known.isdisjoint(signal for row in others.values() for signal in row)
    for signal in known - rows[state].keys():  # type: ignore[index]  # of its own table
        it = Consumption()
        if isinstance(state, Phase):
            it.phase = state
        else:
            it.work = state
        with pytest.raises(InternalError, match="is not possible"):
            it.signal(signal)
        assert (it.phase if isinstance(state, Phase) else it.work, it.orders) == (state, [])


@pytest.mark.parametrize("work", [work for work, row in WORK.items() if Signal.SUBMIT not in row])
def test_a_batch_that_the_work_cannot_have_changes_nothing(work: Work) -> None:
    it = Consumption()
    it.phase, it.work = Phase.IDLE, work
    if Signal.QUEUE not in WORK[work]:
        with pytest.raises(InternalError, match="is not possible"):
            it.deliver(InFlight(b"", 1, 0))
        assert (it.phase, it.work, it.batches, it.bytes, it.owed, it.orders) == (
            Phase.IDLE, work, [], 0, None, [],
        )  # fmt: skip
    else:
        assert it.deliver(InFlight(b"", 1, 0))


def test_every_state_can_be_reached_and_every_phase_but_the_last_can_be_left() -> None:
    for rows, start in ((PHASES, Phase.NEW), (WORK, Work.EMPTY)):
        reached = {move.to for row in rows.values() for move in row.values()} | {start}  # type: ignore[attr-defined]
        assert reached == set(rows)
    assert all(Signal.FORGET in row for row in PHASES.values())
    assert all(Signal.SUPERSEDED in row for phase, row in PHASES.items() if phase is not Phase.NEW)
    assert all(Signal.GIVE_UP in row for row in WORK.values())


def test_the_source_is_acknowledged_in_every_phase_in_which_it_waits() -> None:
    for phase, row in PHASES.items():
        if {Signal.READY, Signal.OPENED} & row.keys() and phase is not Phase.STOPPED:
            assert Order.ACKNOWLEDGE in row[Signal.READY if Signal.READY in row else Signal.OPENED].orders
        if Signal.READY_DUE in row:
            assert Order.ACKNOWLEDGE in PHASES[row[Signal.READY_DUE].to][Signal.CHECKPOINTED].orders


# One batch.


def test_a_batch_is_submitted_accepted_acknowledged_and_reported() -> None:
    it, one = opened(), batch(at=5)
    assert it.deliver(one)
    assert (orders(it), it.phase, it.work, it.owed_since_ms) == ([Order.SUBMIT], "waiting", "working", 5)
    assert it.in_request
    assert it.is_first(one)
    it.done(one, 7)
    assert (orders(it), it.phase, it.work) == ([Order.ACKNOWLEDGE, Order.REPORT], "idle", "empty")
    assert (it.owed_since_ms, it.in_request, it.is_first(one), one.done_ms, it.bytes) == (
        None,
        False,
        False,
        7,
        0,
    )
    assert repr(it) == "<Consumption idle, empty, 0 in flight>"


def test_a_checkpoint_that_is_due_goes_first_and_the_batch_is_reported_with_it() -> None:
    it, (one,) = working()
    it.done(one, 7, due=True)
    assert (orders(it), it.phase, it.owed_since_ms) == ([Order.CHECKPOINT], "checkpointing", None)
    it.checkpointed()
    assert (orders(it), it.phase) == ([Order.ACKNOWLEDGE, Order.REPORT], "idle")


def test_a_batch_is_accepted_when_the_runtime_reports_its_outcome() -> None:
    it, (one,) = working()
    it.processed(one)
    assert orders(it) == [Order.ACCEPT]


def test_a_throttled_batch_is_acknowledged_once_there_is_room() -> None:
    it, (one,) = working()
    it.throttled(one)
    assert (orders(it), it.work) == ([Order.AWAIT], "throttled")
    assert not it.deadline(due=False, memory=True)
    it.done(one, 9)
    assert orders(it) == [Order.ACKNOWLEDGE, Order.REPORT]


def test_a_batch_behind_a_visitor_waits_for_its_turn() -> None:
    it, one = opened(), batch()
    it.deliver(one, free=False)
    assert (orders(it), it.work) == ([Order.BEGIN, Order.AWAIT], "awaiting")
    it.throttled(one)
    assert (orders(it), it.work) == ([], "throttled")


def test_what_is_left_of_a_batch_is_awaited() -> None:
    it, (one,) = working()
    it.unfinished(one)
    assert (orders(it), it.work, one.stage) == ([Order.AWAIT], "awaiting", Stage.QUEUED)
    it.processed(one)
    it.unfinished(one)
    assert orders(it) == []


# Ahead.


def test_behind_a_quick_batch_the_next_are_acknowledged_when_the_runtime_has_them() -> None:
    it, (one,) = working()
    it.done(one, QUICK_MS - 1)
    it.orders.clear()
    two = batch(2)
    it.deliver(two, ahead=it.quick)
    it.submitted(two)
    assert (orders(it), it.phase, it.work) == ([Order.SUBMIT, Order.ACKNOWLEDGE], "idle", "working")


@pytest.mark.parametrize(("early", "took", "quick"), [(True, 49, True), (True, 50, False), (False, 0, False)])
def test_a_batch_is_quick_within_a_limit_and_only_where_early_answers_are_allowed(
    early: bool, took: int, quick: bool
) -> None:
    it, (one,) = working(early=early)
    it.done(one, took)
    assert it.quick is quick


@pytest.mark.parametrize(("most", "size"), [(1, 10), (9, 1 << 20)])
def test_what_is_ahead_is_bounded_and_continues_with_each_batch_that_is_done(
    monkeypatch: pytest.MonkeyPatch, most: int, size: int
) -> None:
    monkeypatch.setattr(core, "MOST_AHEAD", most)
    it, (one,) = working()
    it.phase, it.owed, it.quick = Phase.IDLE, None, True
    two = batch(2, size=size)
    it.deliver(two, ahead=True)
    it.submitted(two)
    assert (orders(it), it.phase) == ([Order.SUBMIT], "waiting")
    it.done(one, 0, memory=True)
    assert orders(it) == [Order.ACKNOWLEDGE, Order.BEGIN, Order.REPORT]


@pytest.mark.parametrize("facts", [{}, {"memory": True, "due": True}])
def test_without_memory_or_with_a_checkpoint_due_the_last_batch_waits_for_its_own_turn(facts: Any) -> None:
    it, (one, two) = working(2)
    it.done(one, 0, **facts)
    assert (orders(it), it.owed) == ([Order.BEGIN, Order.REPORT], two)


def test_outcomes_are_accepted_in_order_whatever_comes_first() -> None:
    it, (one, two, three) = working(3)
    it.processed(two)
    assert orders(it) == []
    it.processed(one)
    assert orders(it) == [Order.ACCEPT]
    it.done(one, 99)
    assert it.orders[-1] == (Order.ACCEPT, two)
    it.unfinished(three)
    it.orders.clear()
    it.done(two, 99)
    assert (orders(it)[-1], it.work) == (Order.AWAIT, "awaiting")


def test_with_the_first_batch_that_needs_a_wait_the_task_takes_over_until_none_is_in_flight() -> None:
    it, (one, two) = working(2)
    it.unfinished(one)
    it.phase, it.owed = Phase.IDLE, None
    three = batch(3)
    it.orders.clear()
    it.deliver(three)
    assert (orders(it), it.work, it.quick) == ([], "awaiting", False)
    it.done(one, 9)
    assert (orders(it), it.work) == ([Order.BEGIN, Order.AWAIT, Order.REPORT], "awaiting")
    it.done(two, 9)
    it.done(three, 9)
    assert (it.work, it.phase) == ("empty", "idle")


def test_a_batch_that_the_runtime_does_not_do_by_itself_makes_those_before_it_awaited_too() -> None:
    it, (one,) = working()
    it.phase, it.owed = Phase.IDLE, None
    two = batch(2)
    it.deliver(two)
    it.orders.clear()
    it.unfinished(two)
    assert (it.orders, it.work) == ([(Order.AWAIT, one)], "awaiting")


# One at a time.


def test_with_a_handler_that_keeps_state_the_next_batch_is_submitted_when_the_one_before_is_accepted() -> (
    None
):
    it, one, two = opened(one_at_a_time=True), batch(1), batch(2)
    it.quick = True
    it.deliver(one, ahead=True)
    one.begun = "a future"
    it.submitted(one)
    assert orders(it) == [Order.SUBMIT, Order.ACKNOWLEDGE]
    it.deliver(two)
    assert (orders(it), it.work, it.owed) == ([], "working", two)
    it.processed(one)
    assert it.orders.pop(0) == (Order.ACCEPT, one)
    it.done(one, 9)
    assert it.orders[-1] == (Order.SUBMIT, two)
    assert (orders(it), it.owed) == ([Order.BEGIN, Order.REPORT, Order.SUBMIT], two)
    it.submitted(two)
    it.done(two, 9)
    assert (orders(it), it.work) == ([Order.ACKNOWLEDGE, Order.REPORT], "empty")


def test_a_batch_that_waits_in_the_core_is_acknowledged_ahead_once_and_within_the_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core, "MOST_AHEAD", 2)
    it, (one, two, three) = opened(one_at_a_time=True), map(batch, range(3))
    it.deliver(one, ahead=True)
    it.submitted(one)
    it.deliver(two, ahead=True)
    assert (orders(it), it.owed) == ([Order.SUBMIT, Order.ACKNOWLEDGE, Order.ACKNOWLEDGE], None)
    it.deliver(three, ahead=True)
    assert (orders(it), it.owed) == ([], three)
    it.done(one, 9)
    it.submitted(two)
    assert (orders(it), it.owed) == ([Order.BEGIN, Order.REPORT, Order.SUBMIT], three)


def test_the_task_takes_batches_over_that_wait_in_the_core() -> None:
    it, (one, two) = opened(one_at_a_time=True), map(batch, range(2))
    it.quick = True
    it.deliver(one, ahead=True)
    it.submitted(one)
    it.deliver(two)
    it.unfinished(one)
    it.orders.clear()
    it.done(one, 9)
    assert (orders(it), it.work) == ([Order.BEGIN, Order.AWAIT, Order.REPORT], "awaiting")


# Late.


@pytest.mark.parametrize("due", [False, True])
def test_a_batch_is_acknowledged_late_and_reported_when_it_is_done(due: bool) -> None:
    it, (one,) = working()
    assert it.deadline(due=due, memory=True)
    assert orders(it) == [Order.CHECKPOINT if due else Order.ACKNOWLEDGE, Order.AWAIT]
    assert not it.deadline(due=due, memory=True)
    it.done(one, 99)
    assert orders(it) == [Order.REPORT]
    if due:
        it.checkpointed()
        assert orders(it) == [Order.ACKNOWLEDGE]
    assert it.phase == "idle"


def test_a_batch_that_the_task_awaits_is_acknowledged_late_too_but_not_without_memory() -> None:
    it, (one,) = working()
    it.unfinished(one)
    it.orders.clear()
    assert not it.deadline(due=False, memory=False)
    assert it.deadline(due=False, memory=True)
    assert orders(it) == [Order.ACKNOWLEDGE]


def test_a_late_batch_whose_checkpoint_is_stored_before_it_is_done_is_reported_later() -> None:
    it, (one,) = working()
    it.deadline(due=True, memory=True)
    it.checkpointed()
    assert Order.REPORT not in orders(it)
    it.done(one, 99)
    assert orders(it) == [Order.REPORT]


# Endings.


def test_what_another_connection_claims_is_given_up_and_asked_for_in_vain() -> None:
    it, (one,) = working()
    it.superseded()
    assert (orders(it), it.phase, it.owed) == ([Order.GIVE_UP, Order.ACKNOWLEDGE], "superseded", None)
    assert it.give_up() == [one]
    assert (it.incomplete, it.work) == (True, "over")
    assert not it.deliver(batch(2))
    it.signal(Signal.LOSE)
    assert orders(it) == [Order.ACKNOWLEDGE] * 2
    it.signal(Signal.END)
    assert orders(it) == [Order.FAIL]
    it.signal(Signal.FORGET)
    assert (orders(it), it.phase) == ([Order.GIVE_UP], "released")


def test_a_checkpoint_that_is_outstanding_meanwhile_is_waited_for() -> None:
    it, (one,) = working()
    it.done(one, 9, due=True)
    it.superseded()
    it.orders.clear()
    it.checkpointed()
    assert (orders(it), it.phase) == ([Order.ACKNOWLEDGE, Order.REPORT], "superseded")


@pytest.mark.parametrize("signal", [Signal.DRAIN, Signal.LOSE, Signal.END])
def test_a_request_is_acknowledged_when_it_is_carried_out(signal: Signal) -> None:
    it = opened()
    it.signal(signal)
    assert it.in_request
    if signal is Signal.LOSE:
        it.signal(Signal.READY)
    else:
        it.signal(Signal.READY_DUE)
        assert orders(it) == [Order.CHECKPOINT]
        it.checkpointed()
    assert (orders(it), it.in_request) == ([Order.ACKNOWLEDGE], False)
    it.signal(Signal.FORGET)
    assert (Order.RELEASE in orders(it)) is (signal is Signal.DRAIN)


def test_an_end_that_is_not_durable_is_the_new_owners() -> None:
    it = opened()
    it.signal(Signal.END)
    it.superseded()
    assert (orders(it), it.phase) == ([Order.GIVE_UP, Order.FAIL], "superseded")


def test_nothing_given_up_leaves_the_shard_complete() -> None:
    it = opened()
    assert (it.give_up(), it.incomplete) == ([], False)


def test_a_failure_gives_everything_up_and_closes_the_source_once() -> None:
    it, _ = working(2)
    it.signal(Signal.FAILURE)
    it.signal(Signal.FAILURE)
    assert (orders(it), it.phase) == ([Order.GIVE_UP, Order.FAIL], "failed")


def test_a_stop_finishes_what_is_in_flight_and_makes_it_durable_at_its_end() -> None:
    it, (one, two) = working(2)
    it.stop()
    assert (orders(it), it.phase) == ([Order.AWAIT], "finishing")
    assert not it.must_flush
    it.done(one, 9)
    assert it.must_flush
    it.signal(Signal.FLUSH)
    it.done(two, 9, due=True)
    it.checkpointed()
    assert (it.phase, it.work) == ("stopped", "empty")
    it.orders.clear()
    assert not it.deliver(batch(3))
    assert orders(it) == []


def test_a_stop_leaves_requests_to_themselves_and_an_opening_shard_without_batches() -> None:
    it = opened()
    it.signal(Signal.LOSE)
    it.stop()
    assert it.phase == "losing"
    it = Consumption()
    it.signal(Signal.CLAIM)
    it.stop()
    it.signal(Signal.OPENED)
    assert (orders(it), it.phase) == ([Order.ACKNOWLEDGE], "stopped")


# Against a naive model.


class AgainstNaive(RuleBasedStateMachine):
    """Plays the shell. The model is a list of the batches in flight, and the one that the source waits for."""

    one_at_a_time = False

    def __init__(self) -> None:
        super().__init__()
        self.it = opened(one_at_a_time=self.one_at_a_time)
        self.it.quick = True
        self.now = 0
        self.delivered: list[InFlight] = []
        self.accepted: list[InFlight] = []
        self.flight: list[InFlight] = []
        self.waits: InFlight | None = None
        self.asked = self.over = False
        self.throttled: InFlight | None = None
        self.kinds: dict[int, str] = {}

    def carry_out(self) -> None:
        while self.it.orders:
            order, it = self.it.orders.pop(0)
            if order is Order.ACKNOWLEDGE:
                assert it is self.waits, "the source waits for exactly that batch"
                self.waits, self.asked = None, False
            elif order is Order.CHECKPOINT:
                assert not self.asked
                self.asked = True
            elif order is Order.SUBMIT:
                assert it is not None
                self.submit(it)
            elif order is Order.ACCEPT:
                assert it is not None
                self.accept(it, room=True)
            elif order is Order.GIVE_UP:
                assert self.it.give_up() == self.flight
                self.flight, self.over = [], True
            elif order is Order.AWAIT:
                assert self.it.work in {Work.AWAITING, Work.THROTTLED}

    def submit(self, it: InFlight) -> None:
        assert it is self.flight[0] or not self.one_at_a_time, "the ones before it are accepted"
        if self.kinds[id(it)] == "coroutine":
            self.it.unfinished(it)
        elif self.kinds[id(it)] == "sync" and it is self.flight[0]:
            self.accept(it, room=True)
        elif self.kinds[id(it)] == "sync":
            self.it.unfinished(it)
        else:
            it.begun = "a future"
            self.it.submitted(it)

    def accept(self, it: InFlight, *, room: bool, due: bool = False) -> None:
        assert it is self.flight[0], "the first one that is not accepted"
        assert not self.over
        if it is not self.throttled:
            self.accepted.append(it)
        if room:
            self.flight.pop(0)
            self.throttled = None
            self.it.done(it, self.now, due=due and self.waits is it, memory=True)
        else:
            self.throttled = it
            self.it.throttled(it)

    @precondition(lambda self: self.waits is None)
    @rule(kind=st.sampled_from(["future", "sync", "coroutine"]), free=st.booleans(), ahead=st.booleans())
    def deliver(self, kind: str, free: bool, ahead: bool) -> None:
        one = batch(len(self.delivered), at=self.now)
        self.kinds[id(one)] = kind
        unread, stopped = self.it.phase is Phase.SUPERSEDED, self.it.phase is Phase.STOPPED
        if self.it.phase not in {Phase.IDLE, Phase.SUPERSEDED, Phase.STOPPED}:
            return
        if not (unread or stopped):
            self.delivered.append(one)
            self.flight.append(one)
            self.waits = one
        assert self.it.deliver(one, free=free, ahead=ahead and self.it.quick) is not (unread or stopped)
        self.carry_out()

    @precondition(lambda self: self.flight)
    @rule(place=st.integers(0, 9))
    def settle(self, place: int) -> None:
        it = self.flight[min(place, len(self.flight) - 1)]
        if it.stage is Stage.SUBMITTED:
            self.it.processed(it)
            self.carry_out()

    @precondition(lambda self: self.flight and self.it.work in {Work.AWAITING, Work.THROTTLED})
    @rule(room=st.booleans(), due=st.booleans())
    def task(self, room: bool, due: bool) -> None:
        first = self.flight[0]
        if room or first is not self.throttled:
            self.accept(first, room=room, due=due)
            self.carry_out()

    @rule(seconds=st.sampled_from([10, 60]))
    def time(self, seconds: int) -> None:
        self.now += seconds

    @rule(due=st.booleans(), memory=st.booleans())
    def deadline(self, due: bool, memory: bool) -> None:
        possible = self.waits is not None and not self.asked and self.throttled is None and memory
        assert self.it.deadline(due=due, memory=memory) is (possible and not self.over)
        self.carry_out()

    @precondition(lambda self: self.asked)
    @rule()
    def checkpointed(self) -> None:
        self.it.checkpointed()
        self.carry_out()

    @precondition(lambda self: not self.over)
    @rule(how=st.sampled_from(["superseded", "stop", "nothing", "nothing", "nothing"]))
    def end(self, how: str) -> None:
        if how == "superseded":
            self.it.superseded()
            self.carry_out()
        elif how == "stop":
            self.it.stop()
            self.carry_out()

    @invariant()
    def the_model_agrees(self) -> None:
        assert self.it.batches == self.flight
        assert self.it.bytes == sum(each.size for each in self.flight)
        assert self.accepted == self.delivered[: len(self.accepted)], "in order, each once"
        if not self.over:
            assert self.it.owed is self.waits
            assert (self.it.work is Work.EMPTY) is (not self.flight)
            assert self.flight == self.delivered[len(self.delivered) - len(self.flight) :]
        assert len(self.flight) - (self.waits is not None) <= core.MOST_AHEAD


class OneAtATime(AgainstNaive):
    """The same with a handler that keeps state."""

    one_at_a_time = True


TestAgainstNaive = pytest.mark.hypothesis(AgainstNaive.TestCase)
TestOneAtATime = pytest.mark.hypothesis(OneAtATime.TestCase)
