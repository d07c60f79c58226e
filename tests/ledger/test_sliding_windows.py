"""Sliding windows in the ledger: a segment is registered once, and every window with its rows lists it."""

from __future__ import annotations

import pytest

from mldserver.errors import InternalError
from mldserver.ledger import rules
from mldserver.ledger.contract import Commit, Flush, FlushResult, Segment, SegmentKind, WindowState
from mldserver.ledger.row_rules import register
from mldserver.windows import time_window_id
from tests.ledger.test_rules import Steps

pytestmark = [pytest.mark.quick, pytest.mark.core]

SIZE_MS, EVERY_MS = 40, 10


@pytest.fixture
def steps() -> Steps:
    return Steps()


def pane(path: str, start_ms: int, kind: SegmentKind = SegmentKind.WINDOW) -> Segment:
    """Return a segment of a pane: it names the last window with its rows, which starts with the pane."""
    return Segment(path, time_window_id(start_ms), 2, 100, start_ms, start_ms + SIZE_MS, kind)


def put(steps: Steps, *segments: Segment) -> FlushResult:
    result: FlushResult = steps(register, Flush((), segments, every_ms=EVERY_MS), 1)
    return result


def listed(steps: Steps) -> dict[int | None, list[str]]:
    """Return the paths that each window lists, by its start."""
    return {
        entry.start_ms: [each.path for each in (*entry.segments, *entry.pending)]
        for entry in sorted(steps.book.windows.values(), key=lambda entry: entry.start_ms or 0)
    }


def publish(steps: Steps, start_ms: int, *, retain: bool = True) -> list[str]:
    """Cut, compute and publish a window; return the paths of the segments that are free then."""
    window = time_window_id(start_ms)
    assert steps(rules.cut, (window,), "one")
    attempt = steps(rules.begin_attempts, (window,), "one")[window]
    assert steps(rules.commit, (Commit(window, attempt, "stage", (), 0),), "one")
    free = steps(rules.published, {window: attempt}, "one", retain=retain, now_ms=start_ms + 1000)
    return [segment.path for segment in free]


def test_each_window_that_overlaps_a_pane_lists_its_segment_under_its_own_bounds(steps: Steps) -> None:
    assert put(steps, pane("a", 100), pane("b", 120)).registered
    assert listed(steps) == {
        70: ["a"],
        80: ["a"],
        90: ["a", "b"],
        100: ["a", "b"],
        110: ["b"],
        120: ["b"],
    }
    entry = steps.book.windows[time_window_id(90)]
    assert (entry.state, entry.end_ms, entry.rows_in) == (WindowState.OPEN, 130, 4)
    assert {(each.window_id, each.start_ms, each.end_ms) for each in entry.segments} == {
        (entry.window_id, 90, 130)
    }


def test_a_file_counts_once_however_many_windows_list_it(steps: Steps) -> None:
    put(steps, pane("a", 100))
    state = steps.book.state()
    assert (state.segment_bytes, state.open_bytes, steps.book.retained_bytes) == (100, 100, 0)
    publish(steps, 70)
    state = steps.book.state()
    assert (state.segment_bytes, state.open_bytes, steps.book.retained_bytes) == (100, 100, 0)
    for start_ms in (80, 90, 100):
        publish(steps, start_ms)
    state = steps.book.state()
    assert (state.segment_bytes, state.open_bytes, steps.book.retained_bytes) == (100, 0, 100)


def test_a_segment_is_free_when_the_last_window_that_lists_it_is_published(steps: Steps) -> None:
    put(steps, pane("a", 100), pane("b", 110))
    assert [publish(steps, start_ms, retain=False) for start_ms in (70, 80, 90)] == [[], [], []]
    assert publish(steps, 100, retain=False) == ["a"]
    assert publish(steps, 110, retain=False) == ["b"]
    assert not steps.book.paths


def test_windows_that_expire_together_free_the_segments_that_only_they_list(steps: Steps) -> None:
    put(steps, pane("a", 100), pane("b", 110))
    for start_ms in (70, 80, 90, 100):
        publish(steps, start_ms)
    free = steps(rules.expire, published_before_ms=10_000, keep_bytes=1000, limit=10)
    assert [segment.path for segment in free] == ["a"]
    assert listed(steps) == {70: [], 80: [], 90: [], 100: [], 110: ["b"]}


def test_rows_are_late_if_they_are_too_late_for_one_of_their_windows(steps: Steps) -> None:
    put(steps, pane("a", 100))
    publish(steps, 70)
    assert put(steps, pane("b", 100)).cut_windows == {time_window_id(70)}
    assert put(steps, pane("b", 110)).registered, "the window from 70 to 110 has none of these"


def test_late_rows_wait_where_their_window_is_cut_and_are_in_time_for_the_others(steps: Steps) -> None:
    put(steps, pane("a", 100))
    publish(steps, 70)
    steps(rules.cut, (time_window_id(80),), "one")
    assert put(steps, pane("b", 100, SegmentKind.RECOMPUTE)).registered
    entries = [steps.book.windows[time_window_id(start_ms)] for start_ms in (70, 80, 90, 100)]
    assert [[each.path for each in entry.pending] for entry in entries] == [["b"], ["b"], [], []]
    assert [[each.path for each in entry.segments] for entry in entries] == [
        ["a"],
        ["a"],
        ["a", "b"],
        ["a", "b"],
    ]
    assert {each.kind for entry in entries[2:] for each in entry.segments} == {SegmentKind.WINDOW}
    (again,) = steps(rules.cut, (time_window_id(70),), "one")
    assert (again.revision, [each.path for each in again.segments]) == (2, ["a", "b"])


def test_late_rows_open_the_windows_that_no_row_has_opened(steps: Steps) -> None:
    put(steps, pane("a", 130))
    publish(steps, 100)
    assert put(steps, pane("b", 110, SegmentKind.RECOMPUTE)).registered
    assert listed(steps) == {80: ["b"], 90: ["b"], 100: ["a", "b"], 110: ["a", "b"], 120: ["a"], 130: ["a"]}


def test_late_rows_of_a_window_that_is_over_go_beside_all_of_them(steps: Steps) -> None:
    put(steps, pane("a", 100))
    publish(steps, 70, retain=False)
    late = pane("b", 100, SegmentKind.RECOMPUTE)
    assert put(steps, late).expired_windows == {time_window_id(70)}
    steps(rules.prune, windows_before_ms=5000, shards_before_ms=0, keep_shards=frozenset(), limit=9)
    assert put(steps, late).expired_windows == {time_window_id(70)}, "though it is forgotten"
    assert put(steps, pane("b", 100)).cut_windows == {time_window_id(70)}
    assert put(steps, pane("b", 100, SegmentKind.LATE)).registered
    assert listed(steps) == {80: ["a"], 90: ["a"], 100: ["a"]}


def test_a_path_that_is_registered_twice_is_a_bug(steps: Steps) -> None:
    put(steps, pane("a", 100))
    with pytest.raises(InternalError, match="registered already"):
        put(steps, pane("a", 110))
    with pytest.raises(InternalError, match="registered already"):
        put(steps, pane("b", 110), pane("b", 120))
