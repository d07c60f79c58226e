from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mldserver.kcl.restart import Backoff


def test_waits_double_up_to_the_cap() -> None:
    backoff = Backoff(base=1, cap=10)
    assert [backoff.delay(ran=0, chance=1) for _ in range(6)] == [1, 2, 4, 8, 10, 10]


def test_a_healthy_run_is_forgiven() -> None:
    backoff = Backoff(base=1, cap=60, healthy=100)
    assert [backoff.delay(ran=1, chance=1) for _ in range(3)] == [1, 2, 4]
    assert backoff.delay(ran=100, chance=1) == 1


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1))))
def test_jitter_stays_in_the_upper_half(runs: list[tuple[float, float]]) -> None:
    backoff = Backoff(base=2, cap=60)
    for ran, chance in runs:
        assert 1 <= backoff.delay(ran=ran, chance=chance) <= 60
