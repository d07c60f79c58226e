"""How long it takes until something is tried again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.base.backoff import Backoff, TokenBucket, backoff

pytestmark = pytest.mark.quick


def test_waits_double_up_to_the_cap() -> None:
    waits = Backoff(base=1, cap=10)
    assert [waits.failed() for _ in range(6)] == [1, 2, 4, 8, 10, 10]


def test_the_first_failures_may_be_free() -> None:
    waits = Backoff(base=1, cap=10, free=2)
    assert [waits.failed() for _ in range(5)] == [0, 0, 1, 2, 4]


def test_however_much_has_failed_no_wait_is_longer_than_the_cap() -> None:
    assert backoff(5000, 0.1, 4) == 4


def test_what_works_is_forgiven() -> None:
    waits = Backoff(base=1, cap=60)
    assert [waits.failed() for _ in range(3)] == [1, 2, 4]
    waits.worked()
    assert waits.failed() == 1


@given(st.lists(st.floats(0, 1), max_size=100))
def test_jitter_stays_in_the_upper_half(chances: list[float]) -> None:
    waits = Backoff(base=2, cap=60)
    for chance in chances:
        assert 1 <= waits.failed(chance) <= 60


def test_a_bucket_keeps_its_rate() -> None:
    bucket = TokenBucket(4)
    assert [bucket.reserve(1000) for _ in range(4)] == [0, 0.25, 0.5, 0.75]
    assert bucket.reserve(1900) == 0.1


def test_a_bucket_lets_a_few_calls_through_at_once_after_a_pause() -> None:
    bucket = TokenBucket(4, burst=3)
    assert [bucket.reserve(0) for _ in range(4)] == [0, 0, 0, 0.25]
    assert [bucket.reserve(500) for _ in range(3)] == [0, 0.25, 0.5]
    assert [bucket.reserve(60_000) for _ in range(4)] == [0, 0, 0, 0.25]


@given(st.lists(st.integers(0, 2000), min_size=1), st.integers(1, 20), st.integers(1, 6))
def test_no_span_of_time_sees_more_calls_than_the_rate_and_the_burst(
    pauses: list[int], per_second: int, burst: int
) -> None:
    bucket = TokenBucket(per_second, burst=burst)
    now_ms, calls = 0, []
    for pause in pauses:
        now_ms += pause
        calls.append(now_ms + 1000 * bucket.reserve(now_ms))
    for first, begin in enumerate(calls):
        for last, end in enumerate(calls[first:], first):
            assert last - first + 1 <= burst + (end - begin) * per_second / 1000 + 1e-6
