"""When workers are replaced."""

from __future__ import annotations

import pytest

from mldserver.workers.wire import BeatMessage as Beat
from mldserver.workers.worker import RESTLESS_ABOVE, Cause, Deaths, Limits, judge

LIMITS = Limits(worker_kill_after_ms=1000, worker_memory=100)


def test_first_deaths_are_replaced_at_once_and_later_ones_wait_longer_and_longer() -> None:
    deaths = Deaths()
    assert [deaths.died(0, useful=False) for _ in range(8)] == [0, 0, 0.2, 0.4, 0.8, 1.6, 3.2, 15]


def test_a_worker_that_works_between_its_deaths_never_waits_and_never_counts_as_failed() -> None:
    deaths = Deaths()
    assert {deaths.died(now, useful=True) for now in range(100)} == {0}
    assert not deaths.failed


def test_a_worker_that_dies_often_is_restless_whatever_it_does_in_between() -> None:
    deaths = Deaths()
    for number in range(6):
        assert deaths.lately(number) <= RESTLESS_ABOVE
        deaths.died(number, useful=True)
    assert deaths.lately(6) > RESTLESS_ABOVE
    assert deaths.lately(30_005) == pytest.approx(3, rel=0.01)


def test_deaths_that_are_meant_count_for_nothing() -> None:
    deaths = Deaths()
    assert {deaths.died(now, useful=True, meant=True) for now in range(100)} == {0}
    assert (deaths.failed, deaths.lately(100)) == (False, 0)


def test_lives_that_come_to_nothing_make_it_failed_until_one_works() -> None:
    deaths = Deaths()
    for number in range(8):
        assert not deaths.failed
        deaths.died(number * 1_000_000, useful=False)
    assert deaths.failed
    assert deaths.died(9_000_000, useful=False) == 15
    assert deaths.died(9_000_000, useful=True) == 0
    assert not deaths.failed
    assert deaths.died(9_000_001, useful=False) == 0


@pytest.mark.parametrize(
    ("beat", "silent", "cause"),
    [
        (None, 1000, None),
        (None, 1001, Cause.SILENT),
        (Beat(1000, 1000, 100), 0, None),
        (Beat(1001, 0, 0), 0, Cause.CALL),
        (Beat(0, 1001, 0), 0, Cause.BLOCKED),
        (Beat(0, 0, 101), 0, Cause.GROWN),
        (Beat(0, 0, 151), 0, Cause.MEMORY),
    ],
)
def test_what_a_worker_must_go_for(beat: Beat | None, silent: int, cause: Cause | None) -> None:
    assert judge(beat, silent, LIMITS) is cause


def test_without_limits_anything_goes() -> None:
    limits = Limits(None, None)
    assert judge(None, 10**9, limits) is None
    assert judge(Beat(10**9, 10**9, 10**12), 10**9, limits) is None
