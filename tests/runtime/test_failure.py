"""The failure policy's core: what is called next, and what becomes of failures."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.runtime.failure import (
    BatchPlan,
    Dead,
    Failure,
    FailurePolicy,
    OnFailure,
    Retry,
    Step,
    describe,
)

BOOM = Failure("ValueError: boom")
HALT = FailurePolicy(on_failure=OnFailure.HALT)


def plan(count: Any, **policy: Any) -> Any:
    return BatchPlan(count, FailurePolicy(**policy))


def test_delays_double_from_the_base_to_the_cap_and_jitter_takes_away_up_to_half() -> None:
    policy = FailurePolicy(base_seconds=0.1, cap_seconds=1.0)
    assert [policy.delay(n, 1.0) for n in (1, 2, 3, 4, 5, 10_000)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert policy.delay(2, 0.0) == 0.1


@pytest.mark.parametrize(
    "wrong", [{"attempts": 0}, {"base_seconds": -1}, {"base_seconds": 2, "cap_seconds": 1}]
)
def test_impossible_policies_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="must"):
        FailurePolicy(**wrong)


def test_an_empty_batch_needs_no_call() -> None:
    empty = plan(0)
    assert (empty.step(), empty.attempts) == (None, 1)


def test_a_batch_without_failures_is_one_call() -> None:
    calls = plan(3)
    assert calls.step() == Step(range(3))
    assert calls.step() is None
    assert calls.attempts == 1


def test_a_failing_record_alone_is_called_again_and_the_rest_follows_it() -> None:
    calls = plan(4)
    step = calls.step()
    assert calls.failed_at(step, 1, BOOM) == Retry(1, BOOM, 1)
    assert calls.step() == Step(range(1, 2), 1, delayed=True)
    assert calls.step() == Step(range(2, 4))
    assert calls.step() is None
    assert (calls.dead, calls.attempts) == ({}, 2)


def test_a_record_that_keeps_failing_is_dead_after_its_attempts_and_the_rest_goes_on() -> None:
    calls = plan(2, attempts=2)
    assert calls.failed_at(calls.step(), 0, BOOM) == Retry(0, BOOM, 1)
    assert calls.failed_at(calls.step(), 0, BOOM) is None
    assert calls.dead == {0: Dead(BOOM, 2)}
    assert calls.step() == Step(range(1, 2))
    assert calls.attempts == 2


def test_a_failing_batch_is_called_again_and_then_halved_down_to_the_failing_record() -> None:
    calls, seen = plan(4, attempts=2), []
    while (step := calls.step()) is not None:
        seen.append((list(step.indices), step.delayed))
        if 2 in step.indices:
            calls.failed(step, BOOM)
    assert seen == [
        ([0, 1, 2, 3], False),
        ([0, 1, 2, 3], True),
        ([0, 1], False),
        ([2, 3], False),
        ([2], False),
        ([3], False),
    ]
    assert calls.dead == {2: Dead(BOOM, 4)}
    assert calls.attempts == 4


def test_records_whose_rows_cannot_be_taken_are_called_again_together_then_dead() -> None:
    calls = plan(4, attempts=2)
    assert calls.faulty(calls.step(), {3: BOOM, 1: BOOM}) == [Retry(1, BOOM, 1), Retry(3, BOOM, 1)]
    step = calls.step()
    assert step == Step([1, 3], 1, delayed=True)
    assert calls.faulty(step, {3: BOOM}) == []
    assert calls.step() is None
    assert (calls.dead, calls.attempts) == ({3: Dead(BOOM, 2)}, 2)


def test_records_at_fault_in_a_half_are_dead_at_once() -> None:
    calls = plan(2, attempts=1)
    calls.failed(calls.step(), BOOM)
    assert calls.faulty(calls.step(), {0: BOOM}) == []
    assert calls.dead == {0: Dead(BOOM, 2)}


def test_records_that_cannot_be_called_at_all_are_dead_before_the_first_call() -> None:
    calls = plan(3)
    calls.condemn({1: BOOM})
    assert calls.step() == Step([0, 2])
    assert calls.dead == {1: Dead(BOOM, 1)}
    none_left = plan(1)
    none_left.condemn({0: BOOM})
    assert none_left.step() is None


@pytest.mark.parametrize("how", ["failed", "failed_at", "faulty"])
def test_under_halt_nothing_dies_and_the_first_failure_for_good_ends_the_plan(how: Any) -> None:
    calls = BatchPlan(3, HALT)
    for attempt in (1, 2, 3):
        step = calls.step()
        assert step is not None
        if how == "failed":
            calls.failed(step, BOOM)
        elif how == "failed_at":
            calls.failed_at(step, 0, BOOM)
        else:
            calls.faulty(step, {0: BOOM, 1: BOOM})
        assert (calls.halted is None) == (attempt < 3)
    assert calls.step() is None
    assert (calls.halted, calls.dead) == (Retry(0, BOOM, 3), {})


def test_under_halt_a_record_that_cannot_be_called_ends_the_plan() -> None:
    calls = BatchPlan(2, HALT)
    calls.condemn({1: BOOM})
    assert (calls.step(), calls.halted) == (None, Retry(1, BOOM, 1))


@given(st.integers(1, 40), st.sets(st.integers(0, 39)), st.integers(1, 4), st.booleans())
def test_exactly_the_failing_records_die_and_every_other_succeeds_exactly_once(
    count: Any, bad: Any, attempts: Any, whole: Any
) -> None:
    calls = plan(count, attempts=attempts)
    succeeded = []
    while (step := calls.step()) is not None:
        failing = [place for place, index in enumerate(step.indices) if index in bad]
        if whole and failing:
            calls.failed(step, BOOM)
        elif failing:
            succeeded += step.indices[: failing[0]]
            calls.failed_at(step, failing[0], BOOM)
        else:
            succeeded += step.indices
    assert set(calls.dead) == bad & set(range(count))
    assert succeeded == [index for index in range(count) if index not in bad]
    assert all(dead.attempts >= attempts for dead in calls.dead.values())


def raised(error: Any) -> Any:
    try:
        raise error  # noqa: TRY301  # the traceback is the point
    except BaseException as caught:  # noqa: BLE001  # the tests raise what handlers may raise
        return caught


def test_an_error_is_told_by_type_and_message_with_the_users_frames() -> None:
    failure = describe(raised(KeyError("carrier")))
    assert failure.error == "KeyError: 'carrier'"
    assert "in raised" in failure.traceback
    assert "raise error" in failure.traceback


def test_an_error_without_a_message_is_told_by_its_type() -> None:
    assert describe(raised(StopIteration())).error == "StopIteration"


def test_an_error_that_was_never_raised_has_no_frames() -> None:
    assert describe(ValueError("x")).traceback == "ValueError: x\n"


def test_an_error_that_cannot_print_itself_is_told_all_the_same() -> None:
    class Rude(Exception):
        def __str__(self) -> None:
            raise RuntimeError

    failure = describe(raised(Rude()))
    assert failure.error.endswith("Rude: (its message cannot be printed)")
    assert "Rude" in failure.traceback


def test_an_error_whose_traceback_cannot_be_printed_is_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr("mldserver.runtime.failure.traceback.format_exception", fail)
    assert describe(ValueError("x")).traceback == "ValueError: x\n"


def test_long_tracebacks_are_cut_in_the_middle() -> None:
    text = describe(ValueError("x" * 100_000)).traceback
    assert len(text) < 21_000
    assert "\n…\n" in text


def test_the_servers_own_frames_are_left_out() -> None:
    def handler() -> None:
        raise ValueError("x")

    from mldserver.runtime.calls import _settled

    def generator() -> Any:
        handler()
        yield

    text = describe(_caught(lambda: _settled(generator()))).traceback
    assert "in handler" in text
    refused = _caught(lambda: FailurePolicy(attempts=0))
    deepest = refused.__traceback__
    while deepest.tb_next is not None:
        deepest = deepest.tb_next
    assert "in __post_init__" in describe(refused.with_traceback(deepest)).traceback


def _caught(function: Any) -> Any:
    try:
        function()
    except Exception as error:  # noqa: BLE001  # see raised
        return error
    raise AssertionError
