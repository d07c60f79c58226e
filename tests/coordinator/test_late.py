from __future__ import annotations

from dataclasses import replace

import pytest

from mldserver.coordinator.core.windows import _REMEMBERED, CoordinatorRules, CutWindows, WindowKey
from mldserver.ledger.contract import (
    FlushResult,
    LedgerState,
    Segment,
    SegmentKind,
    WindowEntry,
    WindowState,
)
from tests.support.operations import counting_python

A, B = WindowKey("a", 0, 10), WindowKey("b", 10, 20)
WAITING = (Segment("late", "a", 1, 1, 0, 10, SegmentKind.RECOMPUTE),)


def ledger(*windows: WindowEntry, cut_below_ms: int | None = None) -> LedgerState:
    return LedgerState(windows={each.window_id: each for each in windows}, cut_below_ms=cut_below_ms)


def cut_windows(*, recompute: bool = True) -> CutWindows:
    return CutWindows(CoordinatorRules(late="recompute" if recompute else "separate", recompute_delay_ms=100))


def test_rows_of_a_window_that_nobody_cut_are_its_own() -> None:
    windows = cut_windows()
    assert windows.kind(A) is SegmentKind.WINDOW
    windows.learn(ledger(WindowEntry("a", WindowState.OPEN)), 0)
    assert windows.kind(A) is SegmentKind.WINDOW


@pytest.mark.parametrize("recompute", [True, False])
def test_rows_of_a_cut_window_wait_for_its_next_revision_if_the_policy_says_so(recompute: bool) -> None:
    windows = cut_windows(recompute=recompute)
    windows.cut(["a"])
    assert windows.kind(A) is (SegmentKind.RECOMPUTE if recompute else SegmentKind.LATE)
    assert windows.kind(B) is SegmentKind.WINDOW


def test_rows_of_a_window_that_is_not_retained_go_to_the_late_dataset() -> None:
    windows = cut_windows()
    windows.learn(ledger(WindowEntry("a", WindowState.PUBLISHED, retained=False)), 0)
    assert windows.kind(A) is SegmentKind.LATE
    windows.cut(["b"])
    windows.expired(["b"])
    assert windows.kind(B) is SegmentKind.LATE


def test_rows_of_a_window_that_was_skipped_go_to_the_late_dataset() -> None:
    windows = cut_windows()
    windows.registered(["a"], 0)
    windows.learn(ledger(WindowEntry("a", WindowState.PUBLISHED, error="no", pending=WAITING)), 0)
    assert windows.kind(A) is SegmentKind.LATE
    assert windows.waiting == 0


def test_a_window_that_the_ledger_has_forgotten_is_late_by_its_end() -> None:
    windows = cut_windows()
    windows.learn(ledger(cut_below_ms=10), 0)
    assert windows.kind(A) is SegmentKind.LATE
    assert windows.kind(B) is SegmentKind.WINDOW
    assert windows.kind(WindowKey("batch-1")) is SegmentKind.WINDOW


def test_refusals_teach_step_by_step() -> None:
    windows = cut_windows()
    windows.refused(FlushResult(cut_windows=frozenset({"a"})))
    assert windows.kind(A) is SegmentKind.RECOMPUTE
    windows.refused(FlushResult(expired_windows=frozenset({"a"})))
    assert windows.kind(A) is SegmentKind.LATE
    windows.refused(FlushResult(cut_windows=frozenset({"a"})))
    assert windows.kind(A) is SegmentKind.LATE, "what is known better stays"


def test_a_window_that_the_ledger_tells_of_no_more_is_still_known_to_be_cut() -> None:
    windows = cut_windows()
    windows.cut(["a"])
    for _ in range(2):
        windows.learn(ledger(), 0)
    assert windows.kind(A) is SegmentKind.LATE


def test_only_so_many_of_them_are_remembered() -> None:
    windows = cut_windows()
    windows.cut(["a", *(f"w{n}" for n in range(_REMEMBERED - 1)), "b"])
    windows.learn(ledger(), 0)
    assert windows.kind(A) is SegmentKind.WINDOW, "the ledger will refuse its rows"
    assert windows.kind(B) is SegmentKind.LATE


def test_late_rows_are_gathered_from_the_first_one_on() -> None:
    windows = cut_windows()
    windows.registered(["a"], 1000)
    windows.registered(["b", "a"], 1050)
    assert windows.waiting == 2
    assert windows.due(1099, at_once=False) == ()
    assert windows.due(1100, at_once=False) == ("a",)
    assert windows.due(1150, at_once=False) == ("a", "b")
    assert windows.due(0, at_once=True) == ("a", "b")


def test_a_window_that_was_cut_again_waits_no_more() -> None:
    windows = cut_windows()
    windows.registered(["a"], 0)
    windows.cut(["a"])
    assert (windows.waiting, windows.due(10**6, at_once=True)) == (0, ())
    assert windows.kind(A) is SegmentKind.RECOMPUTE


@pytest.mark.parametrize(
    ("state", "waits"),
    [
        (WindowState.CUT, True),
        (WindowState.COMMITTED, True),
        (WindowState.PUBLISHED, True),
        (WindowState.SET_ASIDE, False),
    ],
)
def test_rows_that_wait_in_the_ledger_are_found_unless_their_window_was_set_aside(
    state: WindowState, waits: bool
) -> None:
    windows = cut_windows()
    windows.registered(["a", "b"], 0)
    windows.learn(ledger(WindowEntry("a", state, pending=WAITING), WindowEntry("b", state)), 50)
    assert windows.due(10**6, at_once=False) == (("a",) if waits else ())
    windows.learn(ledger(WindowEntry("a", state, pending=WAITING)), 60)
    assert windows.due(100, at_once=False) == (("a",) if waits else ()), "they do not start to wait anew"


def test_rows_that_are_found_at_a_start_wait_for_the_delay() -> None:
    windows = cut_windows()
    windows.learn(ledger(WindowEntry("a", WindowState.PUBLISHED, pending=WAITING)), 1000)
    assert windows.due(1099, at_once=False) == ()
    assert windows.due(1100, at_once=False) == ("a",)


def test_news_cost_no_more_however_many_windows_are_known() -> None:
    counts = []
    for known in (100, 5_000):
        windows = cut_windows()
        windows.learn(ledger(*(WindowEntry(f"w{n}", WindowState.PUBLISHED) for n in range(known))), 0)
        news = replace(ledger(WindowEntry("w3", WindowState.PUBLISHED, pending=WAITING)), since=7)
        with counting_python() as operations:
            windows.learn(news, 0)
        counts.append(operations.count)
    assert counts[0] == counts[1]
