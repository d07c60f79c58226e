"""Which window a row belongs to, which may close, and where rows go that come for one that is cut."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.coordinator.core.open_windows import (
    _REMEMBERED,
    MOST_AHEAD,
    CoordinatorRules,
    CutWindows,
    OpenWindows,
    WindowKey,
    assign,
    windows_with,
)
from mldserver.ledger.contract import (
    BatchProgress,
    FlushResult,
    LedgerState,
    Segment,
    SegmentKind,
    WindowEntry,
    WindowState,
    batch_id,
)
from mldserver.windows import (
    TimeWindows,
    Window,
    as_window,
    batches,
    do_overlap,
    duration_ms,
    pane_starts,
    sliding,
    time_window_id,
    tumbling,
)
from tests.support.operations import counting_python

pytestmark = [pytest.mark.quick, pytest.mark.core]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HOUR = 3_600_000


def events(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def key(start: int, size: int = HOUR) -> WindowKey:
    return WindowKey(time_window_id(start), start, start + size)


# Durations.


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("10 minutes", 600_000),
        ("1 hour", HOUR),
        ("500ms", 500),
        ("500 MS", 500),
        ("1 millisecond", 1),
        ("1.5 s", 1500),
        ("2 mins", 120_000),
        ("1 m", 60_000),
        ("2days", 172_800_000),
        (" 1 week ", 604_800_000),
        (2, 2000),
        (0.25, 250),
        (timedelta(seconds=3), 3000),
        (0, 0),
    ],
)
def test_a_duration_is_told_in_words_seconds_or_as_a_timedelta(value: object, expected: int) -> None:
    assert duration_ms(value) == expected


@pytest.mark.parametrize("value", ["", "soon", "10", "10 items", "3 ss", "-1 s", "1e3 s", "ten s", "5 s 3 s"])
def test_text_that_is_no_duration_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        duration_ms(value)


@pytest.mark.parametrize("value", [-1, timedelta(seconds=-1)])
def test_a_negative_duration_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        duration_ms(value)


@pytest.mark.parametrize("value", [math.inf, math.nan, "9" * 400 + " h", 1e300, timedelta.max])
def test_a_duration_beyond_all_calendars_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="cannot be that long"):
        duration_ms(value)


def test_a_window_is_declared_with_its_column_lateness_and_disorder() -> None:
    spec = tumbling("1 hour", on="at", lateness="10 minutes", disorder=5)
    assert spec == TimeWindows(HOUR, "at", 600_000, 5000)
    assert tumbling(1) == TimeWindows(1000)


def test_sliding_windows_are_declared_with_how_often_they_begin() -> None:
    spec = sliding("1 hour", every="5 minutes", on="at", lateness="10 minutes", disorder=5)
    assert spec == TimeWindows(HOUR, "at", 600_000, 5000, 300_000)
    assert (spec.pane_ms, spec.panes, do_overlap(spec)) == (300_000, 12, True)
    alone = sliding("1 hour", every="1 hour")
    assert (alone, alone.panes, do_overlap(alone)) == (tumbling("1 hour"), 1, False)
    assert not do_overlap(batches())
    assert sliding(100, every=1).panes == 100


@pytest.mark.parametrize(
    ("size", "every", "fault"),
    [
        ("1 hour", "7 minutes", "1 h is not one of 7 min"),
        ("1 hour", "2 hours", "1 h is not one of 2 h"),
        ("1 hour", 0, "1 h is not one of 0 ms"),
        ("1 day", "1 minute", "at most 100 times every"),
        (0, 1, "above zero"),
    ],
)
def test_sliding_windows_that_do_not_fit_are_refused(size: str | int, every: str | int, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        sliding(size, every=every)


def test_a_window_without_size_and_a_batch_without_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="above zero"):
        tumbling("0 s")
    with pytest.raises(ValueError, match="at least 1"):
        batches(max_rows=0)
    assert batches(max_rows=1, max_age="2 s").max_age_ms == 2000


# Names.


def test_a_windows_name_is_its_start_in_utc() -> None:
    assert time_window_id(0) == "1970-01-01T00-00-00Z"
    assert time_window_id(1_357_034_400_250) == "2013-01-01T10-00-00.250Z"
    assert time_window_id(-1) == "1969-12-31T23-59-59.999Z"
    assert time_window_id(-62_000_000_000_000) == "0005-04-19T09-46-40Z"


def test_a_start_outside_the_calendar_has_a_name_and_bounds_all_the_same() -> None:
    far = 9 * 10**15
    assert time_window_id(far) == "ms+0009000000000000000"
    assert time_window_id(-far) == "ms-0009000000000000000"
    window = as_window("w", -far, far, revision=1, pipeline="")
    assert (window.start, window.end) == (
        datetime.min.replace(tzinfo=UTC),
        datetime.max.replace(tzinfo=UTC),
    )


@given(st.lists(st.integers(-9 * 10**15, 9 * 10**15), unique=True, max_size=20))
def test_names_are_unique_and_safe_as_folders(starts: list[int]) -> None:
    names = [time_window_id(start) for start in starts]
    assert len(set(names)) == len(names)
    assert all(set(name) <= set("0123456789TZms+-.") for name in names)


def test_the_handler_sees_aware_bounds_and_none_for_batches() -> None:
    assert as_window("w", 0, HOUR, revision=2, pipeline="p") == Window(
        "w", EPOCH, EPOCH + timedelta(hours=1), 2, "p"
    )
    assert as_window("b", None, None, revision=1, pipeline="p") == Window("b", None, None, 1, "p")


# Assignment.


@given(
    st.lists(st.integers(-(10**13), 10**13), max_size=20),
    st.sampled_from([1, 7, 1000, 60_000, HOUR, 24 * HOUR, 7 * 24 * HOUR]),
)
def test_tumbling_windows_equal_naive_arithmetic_on_datetimes_also_before_1970(
    times: list[int], size: int
) -> None:
    spec = TimeWindows(size)
    assigned = assign(spec, events(*times), progress=BatchProgress(), now_ms=0)
    for place, ms in enumerate(times):
        at, start = EPOCH + timedelta(milliseconds=ms), EPOCH
        start += ((at - EPOCH) // timedelta(milliseconds=size)) * timedelta(milliseconds=size)
        assert start <= at < start + timedelta(milliseconds=size)
        own = assigned.keys[assigned.index[place]]
        assert own.start_ms == (start - EPOCH) // timedelta(milliseconds=1)
        assert own.end_ms == own.start_ms + size
        assert own.id == time_window_id(own.start_ms)
    starts = [own.start_ms for own in assigned.keys]
    assert starts == sorted(set(starts))
    assert len(assigned.keys) == len(set(assigned.index.tolist()))


@given(
    st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=20),
    st.sampled_from([(40, 10), (1000, 500), (60_000, 1000)]),
)
def test_sliding_windows_equal_a_search_among_all_starts(times: list[int], sizes: tuple[int, int]) -> None:
    size, every = sizes
    spec = TimeWindows(size, every_ms=every)
    assigned = assign(spec, events(*times), progress=BatchProgress(), now_ms=0)
    for place, ms in enumerate(times):
        found = windows_with(assigned.keys[assigned.index[place]], spec)
        first = (ms - size) // every - 1
        starts = [
            every * n for n in range(first, first + size // every + 3) if every * n <= ms < every * n + size
        ]
        assert [(each.start_ms, each.end_ms) for each in found] == [(at, at + size) for at in starts]
        assert [each.id for each in found] == [time_window_id(at) for at in starts]


def test_windows_that_do_not_overlap_share_no_rows() -> None:
    for spec in (TimeWindows(1000), batches(), None):
        for window in (key(0, 1000), WindowKey(batch_id(7))):
            assert windows_with(window, spec) == (window,)
    assert windows_with(WindowKey(batch_id(7)), TimeWindows(40, every_ms=10)) == (WindowKey(batch_id(7)),)


def test_windows_are_half_open() -> None:
    assert pane_starts(events(-1, 0, HOUR - 1, HOUR), TimeWindows(HOUR)).tolist() == [-HOUR, 0, 0, HOUR]


def test_tumbling_windows_leave_the_progress_of_batches_alone() -> None:
    progress = BatchProgress(4, 2, 1)
    assert assign(TimeWindows(HOUR), events(1), progress=progress, now_ms=9).progress == progress


def test_no_rows_open_no_batch() -> None:
    progress = BatchProgress(4, 2, 1)
    assigned = assign(batches(max_rows=3), events(), progress=progress, now_ms=9)
    assert (assigned.keys, assigned.progress, len(assigned.index)) == ((), progress, 0)


def test_a_batch_is_as_old_as_its_first_row() -> None:
    spec = batches(max_rows=3)
    first = assign(spec, events(0), progress=BatchProgress(), now_ms=100).progress
    assert first == BatchProgress(0, 1, 100)
    second = assign(spec, events(0), progress=first, now_ms=200).progress
    assert second == BatchProgress(0, 2, 100)
    third = assign(spec, events(0, 0), progress=second, now_ms=300).progress
    assert third == BatchProgress(1, 1, 300)
    assert assign(spec, events(0, 0), progress=third, now_ms=400).progress == BatchProgress(2)


def test_a_batch_that_is_longer_than_a_lowered_bound_takes_no_more_rows() -> None:
    assigned = assign(batches(max_rows=2), events(0, 0, 0), progress=BatchProgress(4, 9, 1), now_ms=5)
    assert [own.id for own in assigned.keys] == [batch_id(5), batch_id(6)]
    assert assigned.progress == BatchProgress(6, 1, 5)


@given(
    st.integers(1, 7),
    st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.booleans()), max_size=20),
)
def test_batches_never_exceed_their_rows_and_lose_none_also_when_a_plan_is_thrown_away(
    max_rows: int, flushes: list[tuple[int, bool, bool]]
) -> None:
    spec = batches(max_rows=max_rows)
    windows = OpenWindows(spec)
    content: dict[str, int] = {}
    cut: set[str] = set()
    total = 0
    for rows, thrown_away, cut_all in flushes:
        assigned = assign(spec, events(*[0] * rows), progress=windows.progress, now_ms=1)
        again = assign(spec, events(*[0] * rows), progress=windows.progress, now_ms=1)
        assert (assigned.keys, assigned.progress) == (again.keys, again.progress)
        if thrown_away:
            continue
        assert assigned.index.tolist() == sorted(assigned.index.tolist())
        for place in assigned.index.tolist():
            own = assigned.keys[place].id
            assert own not in cut
            content[own] = content.get(own, 0) + 1
        assert all(content[own.id] for own in assigned.keys)
        windows.progress = assigned.progress
        windows.opened(assigned.keys)
        total += rows
        closable = windows.closable(watermark_ms=None, now_ms=1, wall_ms=1, close_all=cut_all)
        if not cut_all:
            assert all(content[own] == max_rows for own in closable)
        windows.cut(closable)
        cut.update(closable)
    assert sum(content.values()) == total
    assert all(rows <= max_rows for rows in content.values())


# Which may close.


def test_a_window_closes_when_the_watermark_reaches_its_end_and_lateness() -> None:
    windows = OpenWindows(tumbling("1 hour", lateness="1 minute"))
    windows.opened([key(0)])
    assert windows.closable(watermark_ms=None, now_ms=0, wall_ms=0) == ()
    assert windows.closable(watermark_ms=HOUR + 59_999, now_ms=0, wall_ms=0) == ()
    assert windows.closable(watermark_ms=HOUR + 60_000, now_ms=0, wall_ms=0) == (key(0).id,)


def test_the_share_of_a_window_that_has_passed_is_known_from_the_watermark_lateness_included() -> None:
    windows = OpenWindows(TimeWindows(1600, lateness_ms=200))
    sliding_windows = OpenWindows(TimeWindows(4000, lateness_ms=200, every_ms=1000))
    assert sliding_windows.passed(1700) == 0.5, "of a pane"
    told = [windows.passed(ms) for ms in (None, -200, 100, 199, 200, 1000, 1799, 1800)]
    assert told == [0.0, 0.75, 0.9375, 1599 / 1600, 0.0, 0.5, 1599 / 1600, 0.0]
    assert not OpenWindows(batches(max_rows=5, max_age=1)).passed(1799), "it closes by its rows or its age"


def test_a_window_is_overdue_when_its_end_and_lateness_are_over_by_the_clock() -> None:
    windows = OpenWindows(TimeWindows(1000, lateness_ms=200))
    assert not windows.overdue(10**15)
    windows.opened([WindowKey("future", 10**15, 10**15 + 1000), WindowKey("past", 0, 1000)])
    assert (windows.overdue(1200), windows.overdue(1201)) == (False, True)
    windows.cut(["past"])
    assert not windows.overdue(10**12), "one from the future waits for nobody"
    old = OpenWindows(batches(max_rows=5, max_age=1))
    old.opened([WindowKey(batch_id(0))])
    assert not old.overdue(10**15), "its age closes it"


def test_the_end_of_the_last_window_leaves_those_out_that_are_far_ahead() -> None:
    windows = OpenWindows(TimeWindows(1000))
    windows.ahead_from_ms = 5000
    keys = [key(0, 1000), key(3000, 1000), key(10**9, 1000)]
    windows.opened([*keys, WindowKey(batch_id(7))])
    assert windows.latest_end_ms(each.id for each in keys) == 4000
    assert windows.latest_end_ms([keys[2].id, batch_id(7)]) is None


def test_panes_of_sliding_windows_are_bounded_as_windows_are() -> None:
    windows = OpenWindows(TimeWindows(4000, every_ms=1000))
    windows.ahead_from_ms = 5000
    far = [key(10**9 + 10_000 * n, 4000) for n in range(MOST_AHEAD + 5)]
    windows.opened(each for pane in far[:-7] for each in windows_with(pane, windows.spec))
    assert windows.leave_out_ahead(far, 1) == {each.id for each in far[-5:]}
    entry = WindowEntry(far[0].id, WindowState.OPEN, segments=(Segment("s", far[0].id, 1, 400),))
    windows.add(entry)
    assert windows.leave_out_ahead(far[:1], 101) == frozenset()
    assert windows.leave_out_ahead(far[:1], 100) == {far[0].id}


def test_windows_far_ahead_of_the_stream_are_bounded_in_number_and_in_bytes() -> None:
    windows = OpenWindows(TimeWindows(1000))
    near, far = key(0, 1000), [key(10**9 + 1000 * n, 1000) for n in range(MOST_AHEAD + 5)]
    assert not windows.is_ahead(far[0]), "it is not known where the stream is"
    windows.ahead_from_ms = 5000
    assert [windows.is_ahead(each) for each in (near, far[0], key(5000, 1000), key(6000, 1000))] == [
        False,
        True,
        False,
        True,
    ]
    assert not windows.is_ahead(WindowKey(batch_id(7)))
    assert windows.leave_out_ahead([near], 0) == frozenset()
    assert windows.leave_out_ahead([near, *far], 1) == {each.id for each in far[MOST_AHEAD:]}
    windows.opened([near, *far[:MOST_AHEAD]])
    assert windows.leave_out_ahead([near, *far], 1) == {each.id for each in far[MOST_AHEAD:]}
    for each, size in ((near, 10**9), (far[0], 60), (far[1], 40)):
        segment = Segment("path", each.id, 1, size, each.start_ms, each.end_ms)
        windows.add(WindowEntry(each.id, WindowState.OPEN, each.start_ms, each.end_ms, segments=(segment,)))
    assert windows.leave_out_ahead([near, far[0]], 101) == frozenset()
    assert windows.leave_out_ahead([near, far[0]], 100) == {far[0].id}
    windows.cut([far[1].id])
    assert windows.leave_out_ahead([near, far[0], far[1]], 100) == frozenset()


def test_windows_close_oldest_first_also_where_names_do_not_sort() -> None:
    windows = OpenWindows(TimeWindows(500))
    starts = [1000, 500, 0, -500, -9 * 10**15]
    windows.opened(key(start, 500) for start in starts)
    expected = tuple(time_window_id(start) for start in sorted(starts))
    assert windows.closable(watermark_ms=10_000, now_ms=0, wall_ms=0) == expected
    assert windows.closable(watermark_ms=None, now_ms=0, wall_ms=0, close_all=True) == expected


def test_a_window_is_open_until_it_is_cut() -> None:
    windows = OpenWindows(TimeWindows(HOUR))
    windows.opened([key(0), key(HOUR)])
    windows.opened([key(0)])
    assert len(windows) == 2
    assert key(0).id in windows
    windows.cut([key(0).id, "unknown"])
    assert key(0).id not in windows
    assert windows.closable(watermark_ms=9 * HOUR, now_ms=0, wall_ms=0) == (key(HOUR).id,)


def test_the_ends_of_open_windows_are_known() -> None:
    windows = OpenWindows(TimeWindows(HOUR))
    windows.opened([key(0), key(HOUR)])
    assert windows.ends_ms() == [HOUR, 2 * HOUR]
    runs = OpenWindows(batches(max_rows=10))
    runs.opened([WindowKey(batch_id(0))])
    assert runs.ends_ms() == []


def test_a_batch_closes_when_it_is_full_or_old() -> None:
    windows = OpenWindows(batches(max_rows=2, max_age=1), BatchProgress(1, 1, 5000))
    windows.opened([WindowKey(batch_id(0)), WindowKey(batch_id(1))])
    assert windows.closable(watermark_ms=None, now_ms=5999, wall_ms=5999) == (batch_id(0),)
    assert windows.closable(watermark_ms=None, now_ms=6000, wall_ms=6000) == (batch_id(0), batch_id(1))


def test_the_age_of_a_batch_is_steady_time_wherever_the_time_of_day_is_set() -> None:
    hour = 3_600_000
    windows = OpenWindows(batches(max_rows=2, max_age=10), BatchProgress(0, 1, 5000))
    windows.opened([WindowKey(batch_id(0))])
    assert windows.closable(watermark_ms=None, now_ms=100, wall_ms=6000) == (), "a second old already"
    assert windows.closable(watermark_ms=None, now_ms=9099, wall_ms=15_000 + hour) == ()
    assert windows.closable(watermark_ms=None, now_ms=9100, wall_ms=15_000 - hour) == (batch_id(0),)
    windows.progress = BatchProgress(1, 1, 15_000)
    windows.opened([WindowKey(batch_id(1))])
    assert windows.closable(watermark_ms=None, now_ms=9100, wall_ms=15_000 - hour) == (batch_id(0),)
    assert windows.closable(watermark_ms=None, now_ms=19_100, wall_ms=0) == (batch_id(0), batch_id(1))


def test_cutting_the_batch_in_progress_starts_the_next_one() -> None:
    windows = OpenWindows(batches(max_rows=2), BatchProgress(1, 1, 5000))
    windows.opened([WindowKey(batch_id(0)), WindowKey(batch_id(1))])
    windows.cut([batch_id(0)])
    assert windows.progress == BatchProgress(1, 1, 5000)
    windows.cut([batch_id(1)])
    assert windows.progress == BatchProgress(2)


def test_a_batch_in_progress_without_a_first_row_is_not_old() -> None:
    windows = OpenWindows(batches(max_rows=2, max_age=1))
    windows.opened([WindowKey(batch_id(0))])
    assert windows.closable(watermark_ms=None, now_ms=10, wall_ms=10**12) == ()


A, B = WindowKey("a", 0, 10), WindowKey("b", 10, 20)
WAITING = (Segment("late", "a", 1, 1, 0, 10, SegmentKind.RECOMPUTE),)


def ledger(*windows: WindowEntry, cut_below_ms: int | None = None) -> LedgerState:
    return LedgerState(windows={each.window_id: each for each in windows}, cut_below_ms=cut_below_ms)


def cut_windows(*, recompute: bool = True) -> CutWindows:
    return CutWindows(CoordinatorRules(late="recompute" if recompute else "separate", recompute_delay_ms=100))


def test_rows_of_a_window_that_nobody_cut_are_its_own() -> None:
    windows = cut_windows()
    assert windows.kind(A) is SegmentKind.WINDOW
    windows.update(ledger(WindowEntry("a", WindowState.OPEN)), 0)
    assert windows.kind(A) is SegmentKind.WINDOW


@pytest.mark.parametrize("recompute", [True, False])
def test_rows_of_a_cut_window_wait_for_its_next_revision_if_the_policy_says_so(recompute: bool) -> None:
    windows = cut_windows(recompute=recompute)
    windows.cut(["a"])
    assert windows.kind(A) is (SegmentKind.RECOMPUTE if recompute else SegmentKind.LATE)
    assert windows.kind(B) is SegmentKind.WINDOW


def test_rows_of_a_window_that_is_not_retained_go_to_the_late_dataset() -> None:
    windows = cut_windows()
    windows.update(ledger(WindowEntry("a", WindowState.PUBLISHED, retained=False)), 0)
    assert windows.kind(A) is SegmentKind.LATE
    windows.cut(["b"])
    windows.expired(["b"])
    assert windows.kind(B) is SegmentKind.LATE


def test_rows_of_a_window_that_was_skipped_go_to_the_late_dataset() -> None:
    windows = cut_windows()
    windows.registered(["a"], 0)
    windows.update(ledger(WindowEntry("a", WindowState.PUBLISHED, error="no", pending=WAITING)), 0)
    assert windows.kind(A) is SegmentKind.LATE
    assert windows.due_ms == {}


def test_a_window_that_is_cut_after_it_expired_stays_expired() -> None:
    windows = cut_windows()
    windows.expired(["a"])
    windows.cut(["a"])
    assert windows.kind(A) is SegmentKind.LATE


def test_a_window_that_the_ledger_has_forgotten_is_late_by_its_end() -> None:
    windows = cut_windows()
    windows.update(ledger(cut_below_ms=10), 0)
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
        windows.update(ledger(), 0)
    assert windows.kind(A) is SegmentKind.LATE


def test_only_so_many_of_them_are_remembered() -> None:
    windows = cut_windows()
    windows.cut(["a", *(f"w{n}" for n in range(_REMEMBERED - 1)), "b"])
    windows.update(ledger(), 0)
    assert windows.kind(A) is SegmentKind.WINDOW, "the ledger will refuse its rows"
    assert windows.kind(B) is SegmentKind.LATE


def test_late_rows_are_gathered_from_the_first_one_on() -> None:
    windows = cut_windows()
    windows.registered(["a"], 1000)
    windows.registered(["b", "a"], 1050)
    assert len(windows.due_ms) == 2
    assert windows.due(1099, at_once=False) == ()
    assert windows.due(1100, at_once=False) == ("a",)
    assert windows.due(1150, at_once=False) == ("a", "b")
    assert windows.due(0, at_once=True) == ("a", "b")


def test_a_window_that_was_cut_again_waits_no_more() -> None:
    windows = cut_windows()
    windows.registered(["a"], 0)
    windows.cut(["a"])
    assert (windows.due_ms, windows.due(10**6, at_once=True)) == ({}, ())
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
    windows.update(ledger(WindowEntry("a", state, pending=WAITING), WindowEntry("b", state)), 50)
    assert windows.due(10**6, at_once=False) == (("a",) if waits else ())
    windows.update(ledger(WindowEntry("a", state, pending=WAITING)), 60)
    assert windows.due(100, at_once=False) == (("a",) if waits else ()), "they do not start to wait anew"


def test_rows_that_are_found_at_a_start_wait_for_the_delay() -> None:
    windows = cut_windows()
    windows.update(ledger(WindowEntry("a", WindowState.PUBLISHED, pending=WAITING)), 1000)
    assert windows.due(1099, at_once=False) == ()
    assert windows.due(1100, at_once=False) == ("a",)


def test_news_cost_no_more_however_many_windows_are_known() -> None:
    counts = []
    for known in (100, 5_000):
        windows = cut_windows()
        windows.update(ledger(*(WindowEntry(f"w{n}", WindowState.PUBLISHED) for n in range(known))), 0)
        news = replace(ledger(WindowEntry("w3", WindowState.PUBLISHED, pending=WAITING)), since=7)
        with counting_python() as operations:
            windows.update(news, 0)
        counts.append(operations.count)
    assert counts[0] == counts[1]
