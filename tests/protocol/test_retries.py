"""How often, and after what pause, a checkpoint is repeated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.protocol.connection import BATCH_RETRIES, CHECKPOINT_ERRORS, END_RETRIES, RetryPolicy
from mldserver.protocol.states import Input

pytestmark = [pytest.mark.quick, pytest.mark.core]


def test_pauses_double_up_to_the_cap() -> None:
    policy = RetryPolicy(attempts=9, base_seconds=1, cap_seconds=5)
    assert [policy.delay(failed, 1.0) for failed in (1, 2, 3, 4, 10_000)] == [1, 2, 4, 5, 5]


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_chance_takes_off_at_most_half(failed: int, chance: float) -> None:
    full = BATCH_RETRIES.delay(failed, 1.0)
    assert full / 2 <= BATCH_RETRIES.delay(failed, chance) <= full <= BATCH_RETRIES.cap_seconds


def test_a_shards_end_is_tried_for_longer_than_a_batch() -> None:
    assert END_RETRIES.attempts > BATCH_RETRIES.attempts
    assert 120 < sum(END_RETRIES.delay(failed, 1.0) for failed in range(1, END_RETRIES.attempts)) < 180


def test_errors_have_their_meaning_by_name() -> None:
    assert CHECKPOINT_ERRORS == {
        "ShutdownException": Input.GONE,
        "ThrottlingException": Input.BUSY,
        "KinesisClientLibDependencyException": Input.BUSY,
    }
