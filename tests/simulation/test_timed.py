"""The model of timers finds firings that are doubled, lost, early, late behind others, or of timers that were cancelled."""

from __future__ import annotations

from typing import Any

import pytest
from support.timed import Act, Call, Fired, Firing, Recorded, Rules, check_timers

T = 1_800_000_000_000
ALARM = Firing("key", "alarm", 1)


def record(n: int, *acts: Act, at: int = 0, **more: Any) -> Recorded:
    return Recorded(n, acts, T + at, T + at, **more)


def fired(
    timer: str = "alarm", n: int = 1, *, at: int = 100, link: int = 0, attempt: int = 0, **more: Any
) -> Fired:
    return Fired(Firing("key", timer, n, link), T + at, attempt, **more)


def sets(timer: str = "alarm", *, after: int = 100, **more: Any) -> Act:
    return Act(timer, after=after, **more)


def broken(*calls: Call, rules: Rules | None = None) -> list[str]:
    return check_timers({"key": enumerate(calls, 1)}, rules or Rules())


def test_a_timer_fires_once() -> None:
    assert broken(record(1, sets()), record(2, at=50), fired(), record(3, at=101)) == []


def test_a_timer_that_is_set_again_fires_at_its_new_time_only() -> None:
    calls = record(1, sets()), record(2, sets(after=300), at=50)
    assert broken(*calls, fired(n=2, at=350)) == []
    assert broken(*calls, fired(), fired(n=2, at=350))
    assert broken(*calls, fired(n=2, at=100))


def test_a_cancelled_timer_does_not_fire() -> None:
    calls = record(1, sets()), record(2, Act("alarm"), at=50)
    assert broken(*calls) == []
    assert broken(*calls, fired())


def test_a_record_that_comes_after_the_due_time_may_be_called_on_either_side() -> None:
    late = record(2, Act("alarm"), at=101)
    assert broken(record(1, sets()), late) == []
    assert broken(record(1, sets()), fired(), late) == []


@pytest.mark.parametrize("early_ms", [0, 50])
def test_a_record_that_had_arrived_at_the_due_time_comes_first(early_ms: int) -> None:
    rules = Rules(early_ms=early_ms)
    assert broken(record(1, sets()), fired(), record(2, at=100 - early_ms), rules=rules)
    assert broken(record(1, sets()), fired(), record(2, at=101 - early_ms), rules=rules) == []
    assert broken(record(1, sets()), fired(), record(2, at=50, again=True)) == []


def test_a_timer_that_is_set_in_the_past_fires_though_later_records_are_there() -> None:
    assert broken(record(1, Act("alarm", due=T - 5)), fired(at=-5), record(2)) == []


@pytest.mark.parametrize(
    "calls",
    [
        [record(1, sets())],  # lost
        [record(1, sets()), fired(), fired()],
        [record(1), fired()],
        [fired(), record(1, sets())],
        [record(1, sets()), fired(at=99)],
        [record(1, sets()), fired(at=101)],
        [record(1, sets()), fired(attempt=1)],
        [record(1, sets(fails=1)), fired(at=90, attempt=1)],
        [record(1, sets()), fired(n=2)],
        [record(1, sets("alarm/a")), fired()],
    ],
)
def test_other_firings_are_named(calls: list[Call]) -> None:
    assert broken(*calls)


def test_numbers_with_a_gap_or_twice_are_named() -> None:
    calls = record(1, sets()), fired()
    assert check_timers({"key": zip((1, 3), calls, strict=True)}, Rules())
    assert check_timers({"key": zip((1, 1), calls, strict=True)}, Rules())


def test_timers_of_a_key_fire_in_the_order_of_their_due_times_and_then_as_they_were_set() -> None:
    both = record(1, sets("alarm/b"), sets("alarm/a"), sets("alarm/c", after=50))
    assert broken(both, fired("alarm/c", at=50), fired("alarm/b"), fired("alarm/a")) == []
    assert broken(both, fired("alarm/c", at=50), fired("alarm/a"), fired("alarm/b"))
    assert broken(both, fired("alarm/b"), fired("alarm/a"), fired("alarm/c", at=50))


def test_a_callback_may_set_its_timer_again() -> None:
    chain = record(1, sets(again=(20, 30)))
    assert broken(chain, fired(), fired(at=120, link=1), fired(at=150, link=2)) == []
    assert broken(chain, fired(), fired(at=120, link=1))
    assert broken(chain, fired(), fired(at=120, link=1), record(2, Act("alarm"), at=121)) == []


def test_a_callback_may_cancel_another_timer() -> None:
    calls = record(1, sets(drops="alarm/a"), sets("alarm/a")), fired()
    assert broken(*calls) == []
    assert broken(*calls, fired("alarm/a"))


def test_a_timer_that_a_callback_sets_in_the_past_fires_before_those_that_are_due_later() -> None:
    calls = record(1, sets(again=(-50,)), sets("alarm/a")), fired()
    again = fired(at=50, link=1)
    assert broken(*calls, again, fired("alarm/a")) == []
    assert broken(*calls, fired("alarm/a"), again)


def test_a_callback_that_fails_is_called_later_and_holds_up_no_other() -> None:
    calls = record(1, sets(fails=2)), record(2, sets("alarm/a"), at=1), fired("alarm/a", n=2, at=101)
    assert broken(*calls, fired(at=400, attempt=2)) == []
    assert broken(*calls)
    assert broken(*calls, fired(at=400, attempt=3))


def test_a_timer_that_fails_for_good_is_a_dead_letter() -> None:
    call = record(1, sets(fails=-1))
    assert broken(call, rules=Rules(letters={ALARM})) == []
    assert broken(call)
    assert broken(call, rules=Rules(keeps_letters=False)) == []
    assert broken(record(1), rules=Rules(letters={ALARM}))


def test_a_dead_letter_runs_again_beside_a_timer_that_has_taken_its_place() -> None:
    calls = record(1, sets(fails=5)), record(2, sets(), at=200), fired(again=True), fired(n=2, at=300)
    assert broken(*calls, rules=Rules(letters={ALARM})) == []
    assert broken(*calls[:3], rules=Rules(letters={ALARM}))


def test_late_timers_of_one_callback_may_be_skipped() -> None:
    call = record(1, sets("brief"))
    assert broken(call) == []
    assert broken(call, rules=Rules(skips=False))


def test_a_call_finds_the_pending_timers_of_its_key() -> None:
    first = record(1, sets("alarm/b"), sets("alarm/a", after=50), seen=[])
    assert broken(first, fired("alarm/a", at=50, seen=["alarm/b:1.0"]), fired("alarm/b", seen=[])) == []
    both = record(2, Act("alarm/a"), Act("alarm/b"), at=1, seen=["alarm/a:1.0", "alarm/b:1.0"])
    assert broken(first, both) == []


@pytest.mark.parametrize(
    "seen",
    [
        ["alarm/b:1.0", "alarm/a:1.0"],
        ["alarm/a:1.0"],
        ["alarm/a:1.0", "alarm/b:1.1"],
        ["alarm/a:1.0", "alarm/b:1.0", "alarm/b:1.0"],
        ["alarm/a:1.0", "alarm/b:1.0", "alarm:1.0"],
    ],
)
def test_other_timers_are_named(seen: list[str]) -> None:
    first = record(1, sets("alarm/b"), sets("alarm/a", after=50))
    assert broken(first, record(2, Act("alarm/a"), Act("alarm/b"), at=1, seen=seen))
