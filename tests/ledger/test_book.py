"""What a book keeps of all windows together: it goes with each change, and costs no more the more windows there are."""

from __future__ import annotations

import pytest

from mldserver.ledger.book import Book, Changes
from mldserver.ledger.contract import Segment, WindowEntry, WindowState
from tests.support.operations import counting_python

pytestmark = [pytest.mark.quick, pytest.mark.core]


def entry(name: str, state: WindowState, *sizes: int, pending: int = 0, retained: bool = True) -> WindowEntry:
    segments = tuple(Segment(f"{name}-{n}", name, 1, size) for n, size in enumerate(sizes))
    waiting = (Segment(f"{name}-p", name, 1, pending),) if pending else ()
    return WindowEntry(name, state, segments=segments, pending=waiting, retained=retained)


def book_of(*entries: WindowEntry) -> Book:
    book = Book()
    turn(book, *entries)
    return book


def turn(book: Book, *entries: WindowEntry) -> None:
    book.apply(Changes(windows={each.window_id: each for each in entries}))


def told(book: Book, since: int = 0) -> tuple[int, int, set[str]]:
    state = book.state(since)
    assert state.under_way == {name: book.windows[name] for name in state.under_way}
    return state.segment_bytes, state.open_bytes, set(state.under_way)


def test_the_segments_of_all_windows_count_and_those_of_open_ones_apart() -> None:
    book = book_of(entry("a", WindowState.OPEN, 1, 2), entry("b", WindowState.PUBLISHED, 10, pending=5))
    assert told(book) == (18, 3, set())
    assert book.retained_bytes == 15


def test_a_change_counts_for_the_windows_that_it_names_and_leaves_the_rest() -> None:
    book = book_of(entry("a", WindowState.OPEN, 1), entry("b", WindowState.CUT, 10))
    turn(book, entry("a", WindowState.CUT, 1, 1))
    assert told(book) == (12, 0, {"a", "b"})
    turn(book, entry("b", WindowState.PUBLISHED, retained=False))
    assert told(book) == (2, 0, {"a"})
    turn(book, entry("c", WindowState.SET_ASIDE, 7))
    assert told(book) == (9, 0, {"a"})
    assert told(book, since=3) == (9, 0, {"a"}), "of all windows, though the news are one"


def test_windows_that_go_count_no_more() -> None:
    book = book_of(entry("a", WindowState.OPEN, 1), entry("b", WindowState.COMMITTED, 10))
    book.apply(Changes(windows={"a": None, "b": None}))
    assert told(book) == (0, 0, set())
    assert not book.paths


def test_a_copy_of_everything_at_a_version_tells_the_same_and_has_no_news_before_it() -> None:
    book = book_of(entry("a", WindowState.OPEN, 1), entry("b", WindowState.CUT, 10))
    copy = Book()
    copy.apply(book.everything())
    copy.restored(7)
    assert told(copy) == told(book)
    assert set(copy.state(6).windows) == {"a", "b"}, "the news since 6 are not known: all is told"
    assert copy.state(7).windows == {}


def test_news_cost_no_more_however_many_windows_are_known() -> None:
    counts = []
    for windows in (100, 5_000):
        book = book_of(*(entry(f"w{number}", WindowState.SET_ASIDE, 5) for number in range(windows)))
        with counting_python() as operations:
            turn(book, entry("w3", WindowState.SET_ASIDE, 5, pending=1))
            news = book.state(1)
        assert set(news.windows) == {"w3"}
        counts.append(operations.count)
    assert counts[0] == counts[1]
