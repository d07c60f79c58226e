"""Positions: checkpointed <= durable <= accepted, and exactly once whatever the borders of batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.coordinator.core.sessions import ShardPosition, skips_records
from mldserver.errors import InternalError
from mldserver.records import Sequence

S = Sequence


@pytest.mark.parametrize(
    ("start", "position", "ended", "skips"),
    [
        (S(5), S(5), False, False),
        (S(4), S(5), False, False),
        (S(5, 1), S(5, 2), False, False),
        (S(5, 3), S(5, 2), False, True),
        (S(6), S(5), False, True),
        (S(10**50), S(9 * 10**49), False, True),
        (S(6), None, False, True),
        ("TRIM_HORIZON", S(5), False, False),
        ("TRIM_HORIZON", None, False, False),
        ("LATEST", None, False, False),
        ("LATEST", S(5), False, True),
        ("AT_TIMESTAMP", S(5), False, False),
        (None, S(5), False, False),
        ("SHARD_END", S(5), False, True),
        ("SHARD_END", S(5), True, False),
        (S(6), S(5), True, False),
        ("LATEST", S(5), True, False),
    ],
)
def test_a_start_beyond_the_position_skips_records(
    start: Sequence | str | None, position: Sequence | None, ended: bool, skips: bool
) -> None:
    assert skips_records(start, position, ended=ended) is skips


def test_what_the_ledger_holds_was_accepted_before() -> None:
    place = ShardPosition(S(7))
    assert (place.accepted, place.durable, place.due()) == (S(7), S(7), None)


def test_a_checkpoint_never_passes_what_this_connection_delivered_however_far_the_ledger_is() -> None:
    place = ShardPosition(S(7))
    place.deliver(None)
    assert place.due() is None
    place.deliver(S(5))
    assert place.due() == S(5)
    place.deliver(S(4))
    assert place.due() == S(5)
    place.deliver(S(9))
    assert place.due() == S(7)


def whole_aggregates_only(*ends: Sequence) -> ShardPosition:
    """Return a position to which batches with these ends were delivered, and accepted."""
    place = ShardPosition(None, within_aggregates=False)
    for end in ends:
        place.deliver(end)
        place.accept(end)
    return place


def test_where_a_checkpoint_covers_whole_aggregates_only_it_lies_at_the_end_of_a_batch() -> None:
    place = whole_aggregates_only(S(5, 2), S(7), S(9, 1))
    seen = []
    for durable in (S(5), S(5, 2), S(6), S(7), S(9), S(9, 1)):
        place.register(durable)
        seen.append(place.due())
    assert seen == [None, S(5, 2), S(5, 2), S(7), S(7), S(9, 1)]
    place.store(S(9, 1))
    assert place.due() is None


def test_a_place_within_an_aggregate_is_kept_back_until_that_is_delivered_again() -> None:
    place = ShardPosition(S(5), within_aggregates=False)
    place.deliver(S(4))
    assert place.due() == S(4)
    place.deliver(S(5, 2))
    assert place.due() == S(4)


def test_of_very_many_batches_some_ends_are_forgotten_but_never_the_last() -> None:
    place = whole_aggregates_only(*map(S, range(1, 4001)))
    place.register(S(3000))
    due = place.due()
    assert due is not None
    assert S(2900) < due <= S(3000)
    place.register(S(4000))
    assert place.due() == S(4000)


def test_nothing_is_due_before_anything_is_durable() -> None:
    place = ShardPosition(None)
    place.accept(S(3))
    assert place.due() is None


def test_an_empty_batch_and_one_delivered_again_change_nothing() -> None:
    place = ShardPosition(S(7))
    place.accept(None)
    place.accept(S(6))
    assert place.accepted == S(7)


def test_a_position_is_due_until_the_daemon_has_stored_it() -> None:
    place = ShardPosition(None)
    place.deliver(S(9))
    place.accept(S(3))
    place.register(S(3))
    assert place.due() == S(3)
    place.store(S(3))
    assert place.due() is None
    place.accept(S(9))
    place.register(S(9))
    assert place.due() == S(9)


def test_a_registered_position_that_is_not_ahead_changes_nothing() -> None:
    place = ShardPosition(S(7))
    place.register(None)
    place.register(S(2))
    assert place.durable == S(7)


def test_an_older_checkpoint_does_not_take_a_newer_one_back() -> None:
    place = ShardPosition(S(7))
    place.store(S(7))
    place.store(S(3))
    assert place.checkpointed == S(7)


def test_a_position_never_passes_what_was_accepted() -> None:
    with pytest.raises(InternalError, match="would pass what was accepted"):
        ShardPosition(None).register(S(1))
    place = ShardPosition(S(1))
    with pytest.raises(InternalError, match="would pass what was accepted, 1"):
        place.register(S(2))


def test_a_checkpoint_never_passes_the_durable_position() -> None:
    with pytest.raises(InternalError, match="ahead of the durable position"):
        ShardPosition(None).store(S(1))
    place = ShardPosition(S(1))
    place.accept(S(2))
    with pytest.raises(InternalError, match="ahead of the durable position 1"):
        place.store(S(2))


def test_a_handler_that_keeps_its_position_claims_what_was_accepted_and_each_step_once() -> None:
    place = ShardPosition(None)
    assert place.claim(S(1)) is None
    place.accept(S(5))
    assert [place.claim(at) for at in (None, S(2), S(2), S(1), S(9), S(5))] == [
        None,
        S(2),
        None,
        None,
        S(5),
        None,
    ]
    assert ShardPosition(S(3)).claim(S(3)) is None


@given(
    st.lists(
        st.tuples(st.sampled_from(["batch", "flush", "checkpoint", "reopen"]), st.integers(1, 6)), max_size=40
    )
)
def test_every_record_is_durable_exactly_once_however_it_is_delivered_again(
    steps: list[tuple[str, int]],
) -> None:
    ledger: list[int] = []
    stored, durable = 0, None
    place, following, buffer = ShardPosition(None), 1, []
    for step, size in steps:
        if step == "batch":
            batch = list(range(following, following + size))
            following += size
            after = place.accepted.number if place.accepted else 0
            buffer += [record for record in batch if record > after]
            place.deliver(S(batch[-1]))
            place.accept(S(batch[-1]))
        elif step == "flush":
            ledger += buffer
            buffer = []
            durable = place.accepted
            place.register(durable)
        elif step == "checkpoint" and (due := place.due()) is not None:
            assert due.number < following, "beyond what was delivered"
            place.store(due)
            stored = due.number
        elif step == "reopen":  # the daemon goes on after its checkpoint, with borders of its own
            place, following, buffer = ShardPosition(durable), stored + 1, []
        order = [each or S(0) for each in (place.checkpointed, place.durable, place.accepted)]
        assert order == sorted(order)
        assert ledger == list(range(1, len(ledger) + 1))
        assert stored <= len(ledger)
