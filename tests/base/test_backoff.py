"""How long it takes until something is tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mldserver.base.backoff import Backoff, backoff


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
