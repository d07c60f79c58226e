"""Which calls a batch takes when some fail, and how records end; held against a naive way to do the same."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.handler.failure import Failure, Requested
from mldserver.records import Sequence
from mldserver.runtime.failure_policy import Ending, FailurePolicy, OnFailure, OnKeyFailure, failure_rule
from mldserver.runtime.plan import Again, BatchPlan, End, Step

pytestmark = [pytest.mark.quick, pytest.mark.core]

BOOM = Failure("OSError: boom", names=("builtins.OSError",))
KEY = Failure("KeyError: 'x'", names=("builtins.KeyError",))
HALTING = Failure("Stop", names=("mine.Stop",))
FATAL = Failure("Fatal", requested=Requested.FATAL)
DISCARD = Failure("Discard", requested=Requested.DISCARD)
PARK = {"on_key_failure": OnKeyFailure.PARK}
NOW = 10_000


def fresh(count: int, keys: Any = None) -> list[Any]:
    """Return records 0, 1, 2 … whose sequences are 100, 101, 102 …"""
    keys = keys or [f"key-{index}" for index in range(count)]
    return [SimpleNamespace(partition_key=keys[n], sequence=Sequence(100 + n)) for n in range(count)]


def plan(count: int, keys: Any = None, arrivals: Any = None, **policy: Any) -> BatchPlan:
    arrivals_ms = [(arrivals or {}).get(index, NOW) for index in range(count)]
    return BatchPlan(range(count), FailurePolicy(**policy), fresh(count, keys), arrivals_ms)


def at_work(calls: BatchPlan) -> Step:
    step = calls.step()
    assert step is not None
    return step


def test_an_empty_batch_needs_no_call() -> None:
    empty = plan(0)
    assert (empty.step(), empty.attempts) == (None, 1)


def test_a_batch_without_failures_is_one_call() -> None:
    calls = plan(3)
    assert calls.step() == Step(range(3))
    assert calls.step() is None
    assert calls.attempts == 1


SHAPE = Failure("BadRows: 2 items for 3 records", names=("BadRows",), whole_call=True)


def test_a_call_of_the_wrong_shape_ends_all_its_records_and_is_not_halved() -> None:
    calls = plan(3)
    assert calls.failed(at_work(calls), SHAPE, NOW) is None
    assert calls.step() is None
    assert calls.ends == dict.fromkeys(range(3), End(Ending.DEAD_LETTER, SHAPE, 1))


def test_a_half_of_the_wrong_shape_ends_all_its_records() -> None:
    calls = plan(4)
    calls.failed(at_work(calls), FATAL, NOW)
    half = at_work(calls)
    assert half == Step(range(2), halved=True)
    assert calls.failed(half, SHAPE, NOW) is None
    assert [at_work(calls).indices, calls.step()] == [range(2, 4), None]
    assert set(calls.ends) == {0, 1}


def test_a_half_of_the_wrong_shape_that_a_rule_retries_stays_as_it_is() -> None:
    calls = plan(4, failure_rules=(failure_rule("BadRows=retry"),), attempts=3)
    calls.failed(at_work(calls), FATAL, NOW)
    half = at_work(calls)
    assert calls.failed(half, SHAPE, NOW) == Again(0, SHAPE, 2)
    assert calls.step() == Step(range(2), 2, halved=True)


def test_a_call_of_the_wrong_shape_stops_the_shard_under_halt() -> None:
    calls = plan(3, on_failure=OnFailure.HALT)
    assert calls.failed(at_work(calls), SHAPE, NOW) is None
    assert (calls.halted, calls.ends) == (Again(0, SHAPE, 1), {})


def test_a_failing_record_alone_is_called_again_and_the_rest_follows_it() -> None:
    calls = plan(4)
    assert calls.failed_at(at_work(calls), 1, BOOM, NOW) == Again(1, BOOM, 1)
    assert calls.step() == Step(range(1, 2), 1)
    assert calls.step() == Step(range(2, 4))
    assert calls.step() is None
    assert (calls.ends, calls.attempts) == ({}, 2)


def test_a_record_that_keeps_failing_ends_after_its_attempts_and_the_rest_goes_on() -> None:
    calls = plan(2, attempts=2)
    assert calls.failed_at(at_work(calls), 0, BOOM, NOW) == Again(0, BOOM, 1)
    assert calls.failed_at(at_work(calls), 0, BOOM, NOW) is None
    assert calls.ends == {0: End(Ending.DEAD_LETTER, BOOM, 2)}
    assert calls.step() == Step(range(1, 2))
    assert calls.attempts == 2


def test_the_wait_that_a_handler_asks_for_goes_into_the_next_call() -> None:
    busy = Failure("Retry", requested=Requested.RETRY, after_seconds=5.0)
    calls = plan(2)
    calls.failed_at(at_work(calls), 1, busy, NOW)
    assert calls.step() == Step(range(1, 2), 1, 5.0)
    whole = plan(2)
    whole.failed(at_work(whole), busy, NOW)
    assert whole.step() == Step(range(2), 1, 5.0)


def test_a_call_waits_as_long_as_the_one_that_wants_most_unless_one_asks_for_nothing() -> None:
    waits = [msgspec.structs.replace(BOOM, after_seconds=seconds) for seconds in (1.0, 4.0, None)]
    two, three = plan(3), plan(3)
    two.faulty(at_work(two), dict(enumerate(waits[:2])), NOW)
    three.faulty(at_work(three), dict(enumerate(waits)), NOW)
    assert two.step() == Step([0, 1], 1, 4.0)
    assert three.step() == Step([0, 1, 2], 1, None)


def search(calls: BatchPlan, bad: Any, failure: Failure = BOOM) -> Any:
    """Make the calls of a hook that takes whole batches; return them, and the records that succeeded, in order."""
    made, done = [], []
    while (step := calls.step()) is not None:
        made.append((list(step.indices), step.failures))
        if bad & set(step.indices):
            calls.failed(step, failure, NOW)
        else:
            done += step.indices
    return made, done


def test_a_failing_batch_is_called_again_and_then_halved_down_to_the_failing_record() -> None:
    calls = plan(8, attempts=2)
    everything = list(range(8))
    made, done = search(calls, {2})
    assert made == [
        (everything, 0),
        (everything, 1),
        ([0, 1, 2, 3], 0),
        ([0, 1], 0),
        ([2], 0),
        ([3, 4, 5, 6, 7], 0),
    ]
    assert calls.ends == {2: End(Ending.DEAD_LETTER, BOOM, 4)}
    assert (calls.attempts, done) == (4, [0, 1, 3, 4, 5, 6, 7])


@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.parametrize("bad", [0, 1, 4_999, 5_000, 7_777, 9_998, 9_999])
def test_one_bad_record_among_ten_thousand_takes_fourteen_calls_to_find(attempts: int, bad: int) -> None:
    calls = plan(10_000, attempts=attempts)
    made, done = search(calls, {bad})
    searching = made[attempts:]
    assert len(searching) <= math.ceil(math.log2(10_000)) + 2 == 16
    assert len(searching) >= 13
    found = next(place for place, (indices, _) in enumerate(searching) if indices == [bad])
    # Fourteen to know which one it is, and perhaps one of its own to see it fail alone.
    assert found + 1 <= 15
    assert len(searching) - (found + 1) == (1 if bad < 9_999 else 0)
    assert done == [index for index in range(10_000) if index != bad]
    assert calls.ends.keys() == {bad}


def test_what_lies_behind_a_second_bad_record_is_called_as_it_was_halved() -> None:
    made, done = search(plan(7, attempts=1), {0, 1})
    assert [indices for indices, _ in made] == [
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2],
        [0],
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3],
        [1],
        [2, 3],
        [4, 5, 6],
    ]
    assert done == [2, 3, 4, 5, 6]


def test_a_half_with_records_at_fault_may_be_what_failed_so_the_other_half_is_called() -> None:
    calls = plan(4, attempts=1)
    calls.failed(at_work(calls), BOOM, NOW)
    calls.faulty(at_work(calls), {0: FATAL}, NOW)
    assert calls.step() == Step(range(2, 4), halved=True)


def test_when_every_record_is_bad_the_search_takes_two_calls_a_record() -> None:
    made, done = search(plan(1_000, attempts=1), set(range(1_000)))
    assert done == []
    assert len(made) <= 2 * 1_000 + 10


def test_a_failure_that_went_away_is_no_records_fault() -> None:
    calls, failing = plan(4, attempts=1), 2
    made = []
    while (step := calls.step()) is not None:
        made.append(list(step.indices))
        if failing:
            failing -= 1
            calls.failed(step, BOOM, NOW)
    assert made == [[0, 1, 2, 3], [0, 1], [0], [1], [2, 3]]
    assert calls.ends == {}


def test_a_record_that_was_found_is_called_again_while_its_own_failure_has_attempts_left() -> None:
    calls = plan(2, attempts=1, failure_rules=(failure_rule("KeyError=retry:4"),))
    calls.failed(at_work(calls), BOOM, NOW)
    assert calls.failed(at_work(calls), KEY, NOW) == Again(0, KEY, 2)
    assert calls.step() == Step(range(1), 2, None, halved=True)
    assert calls.step() == Step(range(1, 2), halved=True)


@pytest.mark.parametrize(("failure", "ending"), [(FATAL, Ending.DEAD_LETTER), (DISCARD, Ending.DISCARD)])
def test_a_whole_batch_that_is_fatal_or_to_discard_is_searched_at_once(failure: Any, ending: Any) -> None:
    calls = plan(4)
    made, _ = search(calls, {1}, failure)
    assert made == [([0, 1, 2, 3], 0), ([0, 1], 0), ([0], 0), ([1], 0), ([2, 3], 0)]
    assert calls.ends == {1: End(ending, failure, 3)}


def test_a_batch_whose_oldest_record_is_too_old_is_not_called_again_as_a_whole() -> None:
    calls = plan(2, arrivals={0: NOW - 500}, max_age_ms=500)
    calls.failed(at_work(calls), BOOM, NOW)
    assert calls.step() == Step(range(1), halved=True)
    assert calls.failed(Step(range(1), halved=True), BOOM, NOW) is None
    # Young enough, and not called so often.
    assert calls.failed(at_work(calls), BOOM, NOW) == Again(1, BOOM, 2)


def test_a_timer_is_set_again_however_long_ago_it_was_due() -> None:
    calls = BatchPlan(range(1), FailurePolicy(max_age_ms=500), fresh(1), [NOW - 9_000], fires=True)
    calls.failed(at_work(calls), BOOM, NOW)
    assert calls.ends == {0: End(Ending.AGAIN, BOOM, 1)}


def test_records_at_fault_are_called_again_together_and_then_end() -> None:
    calls = plan(4, attempts=2)
    assert calls.faulty(at_work(calls), {3: BOOM, 1: BOOM}, NOW) == [Again(1, BOOM, 1), Again(3, BOOM, 1)]
    step = at_work(calls)
    assert step == Step([1, 3], 1)
    assert calls.faulty(step, {3: BOOM}, NOW) == []
    assert calls.step() is None
    assert (calls.ends, calls.attempts) == ({3: End(Ending.DEAD_LETTER, BOOM, 2)}, 2)


def test_records_at_fault_end_each_by_its_own_failure() -> None:
    calls = plan(4, on_failure=OnFailure.SKIP)
    assert calls.faulty(at_work(calls), {0: BOOM, 1: FATAL, 3: DISCARD}, NOW) == [Again(0, BOOM, 1)]
    assert {index: end.ending for index, end in calls.ends.items()} == {1: Ending.SKIP, 3: Ending.DISCARD}
    assert calls.step() == Step([0], 1)


def test_records_at_fault_in_a_half_that_had_their_attempts_end_at_once() -> None:
    calls = plan(2, attempts=1)
    calls.failed(at_work(calls), BOOM, NOW)
    assert calls.faulty(at_work(calls), {0: BOOM}, NOW) == []
    assert calls.ends == {0: End(Ending.DEAD_LETTER, BOOM, 2)}
    assert calls.step() == Step(range(1, 2), halved=True)


def test_records_that_an_error_names_end_and_the_others_are_called_without_them() -> None:
    calls = plan(4)
    assert calls.named(at_work(calls), [2, 0, 2], FATAL, NOW) == []
    assert calls.ends.keys() == {0, 2}
    assert calls.step() == Step([1, 3])
    assert (calls.step(), calls.attempts) == (None, 1)


def test_when_an_error_names_all_records_no_call_is_left() -> None:
    calls = plan(2)
    calls.named(at_work(calls), [0, 1], DISCARD, NOW)
    assert (calls.step(), len(calls.ends)) == (None, 2)


def test_records_that_cannot_be_called_at_all_end_before_the_first_call() -> None:
    calls = plan(3, failure_rules=(failure_rule("OSError=retry:9"),))
    calls.condemn({1: BOOM}, NOW)
    assert calls.step() == Step([0, 2])
    assert calls.ends == {1: End(Ending.DEAD_LETTER, BOOM, 1)}
    none_left = plan(1, failure_rules=(failure_rule("OSError=skip"),))
    none_left.condemn({0: BOOM}, NOW)
    assert (none_left.step(), none_left.ends[0].ending) == (None, Ending.SKIP)


@pytest.mark.parametrize("how", ["failed", "failed_at", "faulty"])
def test_under_halt_nothing_ends_and_the_first_failure_for_good_stops_the_plan(how: Any) -> None:
    calls = plan(3, on_failure=OnFailure.HALT)
    for attempt in (1, 2, 3):
        step = at_work(calls)
        if how == "failed":
            calls.failed(step, BOOM, NOW)
        elif how == "failed_at":
            calls.failed_at(step, 0, BOOM, NOW)
        else:
            calls.faulty(step, {0: BOOM, 1: BOOM}, NOW)
        assert (calls.halted is None) == (attempt < 3)
    assert calls.step() is None
    assert (calls.halted, calls.ends) == (Again(0, BOOM, 3), {})


def test_under_halt_a_record_that_cannot_be_called_stops_the_plan() -> None:
    calls = plan(2, on_failure=OnFailure.HALT)
    calls.condemn({1: BOOM}, NOW)
    assert (calls.step(), calls.halted) == (None, Again(1, BOOM, 1))


def test_a_rule_that_says_halt_stops_the_plan_at_once_and_others_do_not_need_to() -> None:
    rules = (failure_rule("mine.Stop=halt"), failure_rule("KeyError=skip"))
    calls = plan(3, failure_rules=rules)
    calls.failed(at_work(calls), HALTING, NOW)
    assert (calls.step(), calls.halted) == (None, Again(0, HALTING, 1))
    halting = plan(4, failure_rules=rules, on_failure=OnFailure.HALT)
    assert search(halting, {1}, KEY)[1] == [0, 2, 3]
    assert (halting.ends, halting.halted) == ({1: End(Ending.SKIP, KEY, 3)}, None)


def test_records_behind_a_dead_letter_of_their_key_are_parked() -> None:
    calls = plan(6, list("abcaba"), attempts=1, **PARK)
    calls.failed_at(at_work(calls), 0, BOOM, NOW)
    assert calls.step() == Step([1, 2, 4])
    assert {index: (end.ending, end.attempts, end.behind) for index, end in calls.ends.items()} == {
        0: (Ending.DEAD_LETTER, 1, None),
        3: (Ending.DEAD_LETTER, 0, Sequence(100)),
        5: (Ending.DEAD_LETTER, 0, Sequence(100)),
    }
    assert calls.ends[3].failure.error == "Parked: it waits behind 100, a dead letter of its partition key"
    assert calls.parked == {"a": Sequence(100)}


@pytest.mark.parametrize("failure", [DISCARD, KEY])
def test_nothing_is_parked_behind_a_record_that_left_no_dead_letter(failure: Any) -> None:
    calls = plan(2, "aa", failure_rules=(failure_rule("KeyError=skip"),), **PARK)
    calls.failed_at(at_work(calls), 0, failure, NOW)
    assert (calls.step(), calls.parked) == (Step(range(1, 2)), {})


def test_records_without_a_key_are_not_parked() -> None:
    calls = plan(2, [None, None], attempts=1, **PARK)
    calls.failed_at(at_work(calls), 0, BOOM, NOW)
    assert (calls.step(), calls.parked) == (Step(range(1, 2)), {})


def test_records_of_keys_that_are_parked_from_earlier_are_not_called() -> None:
    calls = plan(3, "aba", **PARK)
    calls.park({"z": Sequence(8)})
    calls.park({"a": Sequence(7)})
    assert calls.step() == Step([1])
    assert [calls.ends[index].behind for index in (0, 2)] == [Sequence(7), Sequence(7)]
    assert (calls.parked, calls.attempts) == ({}, 1)


def test_records_that_were_done_in_the_same_call_are_not_parked_those_that_wait_are() -> None:
    calls = plan(4, "aaaa", **PARK)
    again = calls.faulty(at_work(calls), {0: FATAL, 3: BOOM}, NOW)
    assert (again, calls.step()) == ([], None)
    assert {index: end.behind for index, end in calls.ends.items()} == {0: None, 3: Sequence(100)}


def test_a_half_that_lost_its_parked_records_is_called_before_it_is_suspected() -> None:
    calls = plan(4, "aaba", attempts=1, **PARK)
    made, done = search(calls, {0, 3})
    assert made == [([0, 1, 2, 3], 0), ([0, 1], 0), ([0], 0), ([2], 0)]
    assert done == [2]


ERRORS = (BOOM, KEY, FATAL, DISCARD)


@st.composite
def stories(draw: Any) -> Any:
    """Draw records (key, age, failures before it succeeds, or None: for ever) and a policy."""
    count = draw(st.integers(1, 12))
    record = st.tuples(
        st.sampled_from(["a", "b", None]),
        st.integers(0, 3).map(lambda n: n * 400),
        st.lists(st.sampled_from(ERRORS), max_size=5),
        st.sampled_from(ERRORS) | st.none(),
    )
    policy = FailurePolicy(
        attempts=draw(st.integers(1, 4)),
        on_failure=draw(st.sampled_from(OnFailure)),
        max_age_ms=draw(st.none() | st.just(800)),
        failure_rules=draw(st.sampled_from([(), ("KeyError=skip",), ("OSError=retry:3", "KeyError=halt")]).map(
            lambda rules: tuple(map(failure_rule, rules))
        )),
        on_key_failure=draw(st.sampled_from(OnKeyFailure)),
    )  # fmt: skip
    return [draw(record) for _ in range(count)], policy


class Script:
    """What each call for a record comes to."""

    def __init__(self, records: Any) -> None:
        self.left = [list(failures) for _, _, failures, _ in records]
        self.last = [last for *_, last in records]
        self.calls: list[int] = []

    def call(self, index: int) -> Failure | None:
        self.calls.append(index)
        return self.left[index].pop(0) if self.left[index] else self.last[index]


def naively(records: Any, policy: FailurePolicy) -> Any:
    """One record after the other; each until it succeeds or ends."""
    script, ends, parked, done = Script(records), {}, {}, []
    for index, (key, age, _, _) in enumerate(records):
        if key in parked:
            ends[index] = (Ending.DEAD_LETTER, 0, parked[key])
            continue
        calls = 0
        while (failure := script.call(index)) is not None:
            calls += 1
            ending = policy.ending(failure, calls=calls, age_ms=age)
            if ending is Ending.HALT:
                return script.calls, ends, done, index
            if ending is not None:
                ends[index] = (ending, calls, None)
                if ending is Ending.DEAD_LETTER and policy.parks and key is not None:
                    parked[key] = Sequence(100 + index)
                break
        else:
            done.append(index)
    return script.calls, ends, done, None


def facts_of(records: Any) -> tuple[list[Any], list[int]]:
    return fresh(len(records), [key for key, *_ in records]), [NOW - age for _, age, *_ in records]


@given(stories())
def test_one_record_a_call_is_what_one_would_do_naively(story: Any) -> None:
    records, policy = story
    script, done = Script(records), []
    calls = BatchPlan(range(len(records)), policy, *facts_of(records))
    while (step := calls.step()) is not None:
        for place, index in enumerate(step.indices):
            failure = script.call(index)
            if failure is not None:
                calls.failed_at(step, place, failure, NOW)
                break
            done.append(index)
    ends = {index: (end.ending, end.attempts, end.behind) for index, end in calls.ends.items()}
    halted = None if calls.halted is None else calls.halted.index
    expected_calls, expected_ends, expected_done, expected_halt = naively(records, policy)
    assert (script.calls, done, halted) == (expected_calls, expected_done, expected_halt)
    if halted is None:
        assert ends == expected_ends


@given(stories(), st.data())
def test_a_whole_batch_a_call_decides_every_record_once_and_in_order_of_its_key(
    story: Any, data: Any
) -> None:
    records, policy = story
    script, decided = Script(records), []
    calls = BatchPlan(range(len(records)), policy, *facts_of(records))
    made = 0
    while (step := calls.step()) is not None:
        made += 1
        assert not set(step.indices) & set(decided)
        assert list(step.indices) == sorted(step.indices)
        failing = {index: failure for index in step.indices if (failure := script.call(index)) is not None}
        how = data.draw(st.sampled_from(["whole", "faulty", "named"])) if failing else "done"
        first = next(iter(failing.items()), None)
        if (
            first is not None
            and how == "named"
            and first[1].requested in {Requested.FATAL, Requested.DISCARD}
        ):
            calls.named(step, [first[0]], first[1], NOW)
        elif first is not None and how in {"whole", "named"}:
            calls.failed(step, first[1], NOW)
        else:
            calls.faulty(step, failing, NOW)
            decided += [index for index in step.indices if index not in failing]
    if calls.halted is None:
        assert sorted([*decided, *calls.ends]) == list(range(len(records)))
    for end in calls.ends.values():
        assert (end.behind is None) or policy.parks
    for key, sequence in calls.parked.items():
        # What was decided before the dead letter of its key, or together with it, is no overtaking.
        assert records[sequence.number - 100][0] == key
        assert calls.ends[sequence.number - 100].ending is Ending.DEAD_LETTER
    assert made <= 60 + 8 * len(records)


def test_a_batch_of_errors_that_repeat_costs_two_calls_a_record_and_not_one_wait() -> None:
    missing = Failure("KeyError: 'x'", names=("builtins.KeyError", "builtins.LookupError"))
    calls = plan(1_000)
    steps = []
    while (step := calls.step()) is not None:
        steps.append(step)
        assert calls.failed(step, missing, NOW) is None or len(step.indices) > 1
    assert len(steps) < 2 * 1_000 + 20
    assert not any(step.failures for step in steps)
    assert set(calls.ends) == set(range(1_000))
    assert max(ended.attempts for ended in calls.ends.values()) <= 2 * math.ceil(math.log2(1_000)) + 1
