from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mldserver.coordinator.core.late import CutWindows
from mldserver.coordinator.core.open_windows import SegmentUsage
from mldserver.coordinator.core.rules import CoordinatorRules
from mldserver.ledger.contract import LedgerState, Segment, WindowEntry, WindowState
from tests.support.operations import counting_python

if TYPE_CHECKING:
    from collections.abc import Callable


def entry(name: str, state: WindowState, *sizes: int, pending: int = 0, retained: bool = True) -> WindowEntry:
    segments = tuple(Segment(f"{name}-{n}", name, 1, size) for n, size in enumerate(sizes))
    waiting = (Segment(f"{name}-p", name, 1, pending),) if pending else ()
    return WindowEntry(name, state, segments=segments, pending=waiting, retained=retained)


def state(*entries: WindowEntry, since: int = 0) -> LedgerState:
    return LedgerState(windows={each.window_id: each for each in entries}, since=since)


def told(picture: SegmentUsage) -> tuple[int, int, set[str]]:
    return picture.segment_bytes, picture.open_bytes, set(picture.under_way)


def test_the_segments_of_all_windows_count_and_those_of_open_ones_apart() -> None:
    picture = SegmentUsage()
    picture.learn(state(entry("a", WindowState.OPEN, 1, 2), entry("b", WindowState.PUBLISHED, 10, pending=5)))
    assert told(picture) == (18, 3, set())


def test_news_change_what_they_name_and_leave_the_rest() -> None:
    picture = SegmentUsage()
    picture.learn(state(entry("a", WindowState.OPEN, 1), entry("b", WindowState.CUT, 10)))
    picture.learn(state(entry("a", WindowState.CUT, 1, 1), since=3))
    assert told(picture) == (12, 0, {"a", "b"})
    picture.learn(state(entry("b", WindowState.PUBLISHED, retained=False), since=4))
    assert told(picture) == (2, 0, {"a"})
    picture.learn(state(since=5))
    assert told(picture) == (2, 0, {"a"})


def test_a_whole_state_replaces_everything() -> None:
    picture = SegmentUsage()
    picture.learn(state(entry("a", WindowState.OPEN, 1), entry("b", WindowState.COMMITTED, 10)))
    picture.learn(state(entry("c", WindowState.SET_ASIDE, 7)))
    assert told(picture) == (7, 0, set())


LEARNERS: dict[str, Callable[[], Any]] = {
    "picture": SegmentUsage,
    "late rows": lambda: CutWindows(CoordinatorRules()),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_news_cost_no_more_however_many_windows_are_known(name: str) -> None:
    counts = []
    for windows in (100, 5_000):
        learner = LEARNERS[name]()
        more = () if name == "picture" else (0,)
        known = [entry(f"w{number}", WindowState.PUBLISHED, 5) for number in range(windows)]
        learner.learn(state(*known), *more)
        news = state(entry("w3", WindowState.PUBLISHED, 5, pending=1), since=7)
        with counting_python() as operations:
            learner.learn(news, *more)
        counts.append(operations.count)
    assert counts[0] == counts[1]
