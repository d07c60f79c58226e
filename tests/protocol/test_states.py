"""The table as a whole: nothing forgotten, nothing that could not happen."""

from __future__ import annotations

import itertools

import pytest

from mldserver.protocol.states import TABLE, WORKING, Action, Input, State

pytestmark = [pytest.mark.quick, pytest.mark.core]

REQUESTS = {
    Input.INITIALIZE,
    Input.PROCESS_RECORDS,
    Input.SHUTDOWN_REQUESTED,
    Input.SHARD_ENDED,
    Input.LEASE_LOST,
}
REPLIES = {Input.STORED, Input.GONE, Input.BUSY, Input.EXHAUSTED, Input.REFUSED}
LIVING = [state for state in State if state is not State.CLOSED]
ROWS = [(state, event, row) for state, rows in TABLE.items() for event, row in rows.items()]


def test_every_state_has_a_row_of_the_table_and_the_closed_one_is_empty() -> None:
    assert set(TABLE) == set(State)
    assert TABLE[State.CLOSED] == {}


def test_every_input_and_every_action_is_used() -> None:
    assert {event for _, event, _ in ROWS} == set(Input)
    assert {action for _, _, row in ROWS for action in row.actions} == set(Action)


@pytest.mark.parametrize("state", LIVING)
def test_the_peer_may_go_and_either_side_may_fail_in_every_living_state(state: State) -> None:
    for event in (Input.EOF, Input.FAULT, Input.ABORT, Input.CLOSE, Input.PARTIAL_LINE_TIMEOUT):
        assert TABLE[state][event].to is State.CLOSED


@pytest.mark.parametrize("state", LIVING)
def test_the_daemon_replies_exactly_where_a_checkpoint_is_outstanding(state: State) -> None:
    outstanding = state.endswith("_checkpoint")
    assert (set(TABLE[state]) & REPLIES == REPLIES) is outstanding
    assert bool(set(TABLE[state]) & REPLIES) is outstanding


@pytest.mark.parametrize("state", LIVING)
def test_the_daemon_asks_only_where_it_is_its_turn(state: State) -> None:
    its_turn = state in {State.AWAITING_INITIALIZE, State.IDLE, State.DRAINED}
    assert bool(set(TABLE[state]) & REQUESTS) is its_turn
    assert (state in WORKING) is (not its_turn and not state.endswith("_checkpoint"))


def test_each_request_is_delivered_and_each_status_leaves_the_request_for_good() -> None:
    for state, event, row in ROWS:
        assert (Action.DELIVER in row.actions) is (event in REQUESTS)
        if Action.SEND_STATUS in row.actions:
            assert event in {Input.ANSWER, Input.ANSWER_GONE}
            assert Input.ANSWER not in TABLE[row.to], f"{state} could be answered twice"


def test_checkpoints_are_sent_only_where_the_daemon_allows_them() -> None:
    sending = {state for state, _, row in ROWS if Action.SEND_CHECKPOINT in row.actions}
    families = {State.PROCESSING, State.DRAINING, State.ENDING}
    assert sending == families | {State(f"{family}_backoff") for family in families}


def test_a_shards_end_is_answered_only_after_its_checkpoint_or_without_a_lease() -> None:
    for state in (State.ENDING, State.ENDING_CHECKPOINT, State.ENDING_BACKOFF):
        assert Input.ANSWER not in TABLE[state]
    into_ended = {event for _, event, row in ROWS if row.to is State.ENDED}
    assert into_ended == {Input.STORED, Input.GONE, Input.CHECKPOINT_GONE}


def test_every_error_at_a_shards_end_is_repeated_but_the_lost_lease() -> None:
    rows = TABLE[State.ENDING_CHECKPOINT]
    assert rows[Input.BUSY].to is rows[Input.REFUSED].to is State.ENDING_BACKOFF
    assert Action.FAIL_END in rows[Input.EXHAUSTED].actions


def test_what_fails_also_closes_and_what_closes_leads_to_closed() -> None:
    for _, _, row in ROWS:
        assert (Action.CLOSE in row.actions) is (row.to is State.CLOSED)
        if row.actions and row.to is State.CLOSED:
            assert row.actions[-1] is Action.CLOSE


def test_every_state_can_be_reached_and_left() -> None:
    reached = {State.AWAITING_INITIALIZE}
    for _ in State:
        reached |= {row.to for state in reached for row in TABLE[state].values()}
    assert reached == set(State)


def test_the_rows_of_batch_and_drain_differ_only_in_where_they_lead() -> None:
    for suffix in ("", "_checkpoint", "_backoff"):
        batch, drain = TABLE[State(f"processing{suffix}")], TABLE[State(f"draining{suffix}")]
        assert set(batch) == set(drain)
    pairs = itertools.pairwise((State.PROCESSING, State.IDLE, State.DRAINING, State.DRAINED))
    assert [TABLE[a][Input.ANSWER].to is b for a, b in list(pairs)[::2]] == [True, True]
