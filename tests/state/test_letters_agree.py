"""The two kinds of ledger do the same to dead letters, whatever is done in whatever order."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mldserver.state import dynamodb_flushes, dynamodb_letters
from mldserver.state.dynamodb_book import Book, Draft
from mldserver.state.ledger import Flush
from mldserver.state.store import SqliteStore
from tests.state.samples import letter

PLACES = st.lists(st.integers(0, 12), max_size=4).map(tuple)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(1, 3), st.booleans()),
        st.tuples(st.just("mark"), PLACES, st.booleans()),
        st.tuples(st.just("purge"), PLACES, st.none()),
        st.tuples(st.just("flush"), PLACES, st.integers(0, 2)),
    ),
    max_size=12,
)


class InBook:
    """The rules of DynamoDB's ledger over a book, without DynamoDB."""

    def __init__(self) -> None:
        self.book = Book()
        self.items: dict[int, int] = {}
        """The items that there would be, and how many letters are in each."""

    def do(self, rule: Any) -> Any:
        draft = Draft(self.book)
        told = rule(draft)
        if draft.changes():
            if draft.dead_letters:
                self.items[self.book.version + 1] = len(draft.dead_letters)
            for spent in draft.spent:
                del self.items[spent]
            self.book.apply(draft.changes())
        return told

    def state(self) -> tuple[int, int]:
        state = self.book.state()
        return state.dead_letters, state.redrives


@settings(max_examples=settings().max_examples // 3)
@given(STEPS)
def test_both_ledgers_do_the_same_to_letters(steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store, other = SqliteStore(Path(folder) / "l", pipeline="p", server_id="one"), InBook()
        store.open(now_ms=0)
        names: list[tuple[str, str]] = []
        """Each letter's ids in the two, in order of storage; those that are gone stay."""
        try:
            for what, first, second in steps:
                play(store, other, names, what, first, second)
                agree(store, other, names)
        finally:
            store.close()


def play(
    store: SqliteStore, other: InBook, names: list[tuple[str, str]], what: str, first: Any, second: Any
) -> None:
    if what == "store":
        letters = tuple(letter(len(names) + number) for number in range(first))
        store.add_letters(letters, wanted=second)
        other.do(lambda draft: dynamodb_letters.store(draft, letters, wanted=second))
        named(names, other, len(letters))
        return
    chosen = [names[place] for place in dict.fromkeys(first) if place < len(names)]
    here, there = tuple(one for one, _ in chosen), tuple(two for _, two in chosen)
    if what == "mark":
        told = store.redrive(here, wanted=second)
        same = other.do(lambda draft: dynamodb_letters.mark(draft, there, wanted=second))
    elif what == "purge":
        told = store.purge(here)
        same = other.do(lambda draft: dynamodb_letters.remove(draft, there))
    else:
        letters = tuple(letter(len(names) + number) for number in range(second))
        result = store.register(Flush((), dead_letters=letters, redriven=here), now_ms=0)
        flush = Flush((), dead_letters=letters, redriven=there)
        answer = other.do(lambda draft: dynamodb_flushes.register(draft, flush, 0))
        told, same = result.gone_letters, answer.gone_letters
        named(names, other, len(letters) if result.registered else 0)
    assert {two for one, two in chosen if one in told} == set(same)


def named(names: list[tuple[str, str]], other: InBook, count: int) -> None:
    known = len(names)
    for place in range(count):
        two = dynamodb_letters.letter_id(other.book.version, place)
        names.append((str(known + place + 1), two))


def agree(store: SqliteStore, other: InBook, names: list[tuple[str, str]]) -> None:
    state = store.peek()
    assert (state.dead_letters, state.redrives) == other.state()
    here = {each.id: each.wanted for each in store.letters(limit=1000)}
    there = {
        dynamodb_letters.letter_id(int(key), place): place in item.wanted
        for key, item in other.book.letters.items()
        for place in range(item.count)
        if place not in item.gone
    }
    assert {two: here[one] for one, two in names if one in here} == there
    assert {str(version) for version in other.items} == other.book.letters.keys()
