"""How long it takes until something is tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mldserver.base.backoff import Backoff


def test_waits_double_up_to_the_cap() -> None:
    backoff = Backoff(base=1, cap=10)
    assert [backoff.failed() for _ in range(6)] == [1, 2, 4, 8, 10, 10]


def test_the_first_failures_may_be_free() -> None:
    backoff = Backoff(base=1, cap=10, free=2)
    assert [backoff.failed() for _ in range(5)] == [0, 0, 1, 2, 4]


def test_what_works_is_forgiven() -> None:
    backoff = Backoff(base=1, cap=60)
    assert [backoff.failed() for _ in range(3)] == [1, 2, 4]
    backoff.worked()
    assert backoff.failed() == 1


@given(st.lists(st.floats(0, 1), max_size=100))
def test_jitter_stays_in_the_upper_half(chances: list[float]) -> None:
    backoff = Backoff(base=2, cap=60)
    for chance in chances:
        assert 1 <= backoff.failed(chance) <= 60
