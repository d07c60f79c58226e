"""Windows that are computed one after the other: cut in order, found by the window behind, and the last one remembered."""

from __future__ import annotations

import pytest

from mldserver.ledger import rules
from mldserver.ledger.contract import Commit, Flush, Segment, SegmentKind, WindowState
from mldserver.ledger.row_rules import register
from tests.ledger.test_rules import Steps

pytestmark = [pytest.mark.quick, pytest.mark.core]


@pytest.fixture
def steps() -> Steps:
    return Steps()


def rows(steps: Steps, *ends: int) -> None:
    """Register rows for windows of 10 ms, which are called by their ends."""
    segments = (Segment(f"s{end}-{len(steps.book.paths)}", f"w{end}", 1, 9, end - 10, end) for end in ends)
    assert steps(register, Flush((), tuple(segments)), 1).registered


def cut(steps: Steps, *ends: int, until: int | None = None) -> list[str]:
    return [
        entry.window_id for entry in steps(rules.cut, [f"w{end}" for end in ends], "one", all_until_ms=until)
    ]


def publish(steps: Steps, *ends: int) -> None:
    for end in ends:
        attempt = steps(rules.begin_attempts, (f"w{end}",), "one")[f"w{end}"]
        steps(rules.commit, (Commit(f"w{end}", attempt, "stage", (), 0),), "one")
        steps(rules.published, {f"w{end}": attempt}, "one", retain=False, now_ms=end)


def before(steps: Steps, end: int) -> tuple[str | None, bool]:
    entry, waits = rules.preceding(steps.book.windows, f"w{end}")
    return entry and entry.window_id, waits


def test_all_windows_that_end_by_then_are_cut_in_order_and_no_other_opens_any_more(steps: Steps) -> None:
    rows(steps, 40, 20, 30, 60)
    assert cut(steps, 40, until=40) == ["w20", "w30", "w40"]
    assert steps.book.totals.cut_below_ms == 40
    late = Segment("late", "w10", 1, 9, 0, 10)
    assert steps(register, Flush((), (late,)), 1).cut_windows == {"w10"}
    assert cut(steps, 60) == ["w60"]
    assert steps.book.totals.cut_below_ms == 40, "only windows in order raise it"
    rows(steps, 50)
    assert cut(steps, 50, until=30) == ["w50"]
    assert steps.book.totals.cut_below_ms == 40, "it never goes back"


def test_the_window_before_is_the_last_one_that_was_published(steps: Steps) -> None:
    rows(steps, 20, 10, 30, 40, 50)
    cut(steps, until=40)
    assert before(steps, 10) == (None, False)
    assert before(steps, 30) == (None, True)
    publish(steps, 10, 20)
    assert [before(steps, end) for end in (10, 20, 30, 40)] == [
        *((None, False), ("w10", False), ("w20", False)),
        ("w20", True),
    ]
    assert before(steps, 99) == (None, False), "it is unknown"


def test_windows_that_were_set_aside_skipped_or_have_no_bounds_do_not_count(steps: Steps) -> None:
    rows(steps, 10, 20, 30, 40)
    steps(register, Flush((), (Segment("b", "batch-000000000000", 1, 9),)), 1)
    cut(steps, until=40)
    publish(steps, 10)
    for window in ("w20", "w30"):
        steps(rules.set_aside, window, "no", "one")
    assert before(steps, 40) == ("w10", False)
    assert steps(rules.decide, "w30", "skip", 5)
    assert steps.book.windows["w30"].state is WindowState.PUBLISHED
    assert before(steps, 40) == ("w10", False)
    assert rules.preceding(steps.book.windows, "batch-000000000000") == (None, False)


def test_the_last_published_window_is_kept_if_that_is_wanted(steps: Steps) -> None:
    rows(steps, 10, 20, 30, 900)
    cut(steps, 900, until=30)
    publish(steps, 10, 20, 30, 900)
    old = {"windows_before_ms": 500, "shards_before_ms": 0, "keep_shards": frozenset[str](), "limit": 9}
    assert steps(rules.prune, **old, ends_before_ms=100, keep_last=True) == 2
    assert steps.book.windows.keys() == {"w30", "w900"}, "a window far ahead is not the last one"
    assert steps(rules.prune, **old, ends_before_ms=100) == 1


def test_late_rows_of_windows_in_order_are_of_a_kind_that_is_not_refused(steps: Steps) -> None:
    rows(steps, 20)
    cut(steps, 20, until=20)
    late = Segment("late", "w10", 1, 9, 0, 10, SegmentKind.LATE)
    assert steps(register, Flush((), (late,)), 1).registered
