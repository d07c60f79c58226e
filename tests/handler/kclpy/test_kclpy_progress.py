"""How far a processor has checkpointed: the core's rules, and the checkpointer in front of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.handler.kclpy.amazon_kclpy import (
    Checkpointer,
    CheckpointError,
    CheckpointRefused,
    ProcessorProgress,
)
from mldserver.records import Sequence

pytestmark = pytest.mark.quick

MINUTE = 60_000
S = Sequence


def given_to(last: int | None, start: str | None = None) -> ProcessorProgress:
    progress = ProcessorProgress(start)
    progress.deliver(None if last is None else S(last))
    return progress


def refused(progress: ProcessorProgress, number: object, sub: object = None) -> str:
    with pytest.raises(CheckpointRefused) as refusal:
        progress.checkpoint(number, sub)
    return str(refusal.value)


def test_nothing_is_checkpointed_before_the_processor_says_so() -> None:
    assert given_to(7).position is None


def test_a_checkpoint_without_a_number_is_at_the_last_record_delivered() -> None:
    progress = given_to(7)
    progress.checkpoint()
    assert progress.position == S(7)


def test_a_checkpoint_before_anything_was_delivered_changes_nothing() -> None:
    progress = given_to(None)
    progress.checkpoint()
    assert progress.position is None
    assert progress.end_checkpointed


@pytest.mark.parametrize(
    ("number", "sub", "position"),
    [("5", None, S(5)), (5, None, S(5)), ("5", 2, S(5, 2)), ("0005", 0, S(5)), ("7", None, S(7))],
)
def test_a_checkpoint_may_name_a_record_by_text_or_number_and_by_its_place_in_an_aggregate(
    number: object, sub: object, position: S
) -> None:
    progress = given_to(7)
    progress.checkpoint(number, sub)
    assert progress.position == position


@pytest.mark.parametrize(
    ("number", "sub"),
    [
        ("8", None),
        ("7", 1),
        ("TRIM_HORIZON", None),
        ("", None),
        ("-1", None),
        ("\u0665", None),
        (True, None),
        ("9" * 130, None),
        (10.0, None),
        ("5", -1),
        ("5", "2"),
        ("5", True),
    ],
)
def test_what_was_not_delivered_or_is_no_sequence_number_is_an_illegal_argument(
    number: object, sub: object
) -> None:
    progress = given_to(7)
    assert refused(progress, number, sub) == "IllegalArgumentException"
    assert progress.position is None


def test_a_checkpoint_before_the_last_one_is_an_illegal_argument() -> None:
    progress = given_to(7)
    progress.checkpoint("5", 3)
    assert refused(progress, "5") == "IllegalArgumentException"
    progress.checkpoint("5", 3)
    assert progress.position == S(5, 3)


def test_where_the_daemon_starts_bounds_the_first_checkpoint() -> None:
    progress = given_to(7, start="4")
    assert refused(progress, "3") == "IllegalArgumentException"
    progress.checkpoint("5")
    sentinel = given_to(7, start="TRIM_HORIZON")
    sentinel.checkpoint("1")
    assert (progress.position, sentinel.position) == (S(5), S(1))


def test_where_the_daemon_starts_may_be_inside_an_aggregate() -> None:
    progress = ProcessorProgress("4", 2)
    progress.deliver(S(4, 6))
    assert refused(progress, "4", 1) == "IllegalArgumentException"
    progress.checkpoint("4", 3)
    assert progress.position == S(4, 3)


def test_the_place_where_the_daemon_started_may_be_checkpointed_before_any_record_came() -> None:
    progress = given_to(None, start="4")
    progress.checkpoint("4")
    assert progress.position is None
    assert refused(progress, "5") == "IllegalArgumentException"


def test_a_checkpoint_in_a_call_for_a_part_covers_that_part_alone() -> None:
    progress = given_to(10)
    progress.deliver(S(5))  # the batch failed, and comes again in halves
    progress.checkpoint()
    assert progress.position == S(5)


def test_a_record_remembered_from_a_call_that_failed_counts_up_to_the_end_of_the_present_call() -> None:
    progress = given_to(10)
    progress.deliver(S(5))
    progress.checkpoint("8")
    assert progress.position == S(5)
    progress.end_call()
    progress.checkpoint("8")
    assert progress.position == S(8)


def test_an_earlier_part_does_not_take_a_checkpoint_back() -> None:
    progress = given_to(10)
    progress.checkpoint("8")
    progress.deliver(S(5))
    progress.checkpoint()
    assert progress.position == S(8)


def test_the_end_is_checkpointed_by_a_checkpoint_that_covers_everything_since_it_was_announced() -> None:
    progress = given_to(7)
    progress.checkpoint()
    progress.end_call()
    assert not progress.end_checkpointed
    progress.checkpoint("7")
    assert progress.end_checkpointed
    behind = given_to(7)
    behind.end_call()
    behind.checkpoint("6")
    assert not behind.end_checkpointed


def test_nothing_can_be_checkpointed_once_the_lease_is_gone() -> None:
    progress = given_to(7)
    progress.closed = True
    assert refused(progress, None) == "ShutdownException"


@given(st.lists(st.tuples(st.sampled_from(["deliver", "checkpoint", "settle"]), st.integers(0, 12))))
def test_a_position_never_goes_back_and_never_passes_what_was_delivered(steps: list[tuple[str, int]]) -> None:
    progress = ProcessorProgress("3")
    before: S | None = None
    for step, number in steps:
        if step == "deliver":
            progress.deliver(S(number) if number else None)
        elif step == "settle":
            progress.end_call()
        else:
            try:
                progress.checkpoint(number or None)
            except CheckpointRefused:
                assert progress.position == before
        assert before is None or (progress.position is not None and progress.position >= before)
        before = progress.position
        assert before is None or (progress.delivered is not None and before <= progress.delivered)


def test_the_checkpointer_raises_the_error_that_the_processor_knows() -> None:
    class Theirs(Exception):
        def __init__(self, value: str) -> None:
            self.value = value

    progress = given_to(7)
    with pytest.raises(Theirs) as refusal:
        Checkpointer(progress, Theirs).checkpoint("9")
    assert refusal.value.value == "IllegalArgumentException"
    with pytest.raises(CheckpointError) as ours:
        Checkpointer(progress, CheckpointError).checkpoint("9")
    assert (ours.value.value, str(ours.value)) == ("IllegalArgumentException", "'IllegalArgumentException'")


def test_a_processor_that_takes_records_and_never_checkpoints_is_overdue_every_ten_minutes() -> None:
    progress = ProcessorProgress()
    assert progress.overdue_ms(0) is None
    progress.deliver(S(1))
    looks = [progress.overdue_ms(minute * MINUTE) for minute in (5, 14, 15, 20, 24, 25)]
    assert looks == [None, None, 10 * MINUTE, None, None, 20 * MINUTE]


def test_a_checkpoint_puts_off_the_next_reminder() -> None:
    progress = ProcessorProgress()
    progress.deliver(S(2))
    assert progress.overdue_ms(0) is None
    progress.checkpoint("1")
    assert progress.overdue_ms(9 * MINUTE) is None
    assert progress.overdue_ms(12 * MINUTE) is None
    assert progress.overdue_ms(19 * MINUTE) == 10 * MINUTE
    progress.checkpoint()
    assert progress.overdue_ms(40 * MINUTE) is None
    progress.deliver(S(3))
    assert progress.overdue_ms(60 * MINUTE) is None
    assert progress.overdue_ms(69 * MINUTE) is None
