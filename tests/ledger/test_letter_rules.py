"""Dead letters in a store against a naive model, whatever is done in whatever order."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mldserver.effects import Effects
from mldserver.ledger.contract import Flush
from tests.ledger.samples import letter
from tests.support.store import SqliteStore

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


@settings(max_examples=settings().max_examples // 3)
@given(STEPS)
def test_a_store_keeps_the_letters_that_its_book_tells_of(steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "l"
        store, model = SqliteStore(path, pipeline="p", server_id="one"), Model()
        store.open(now_ms=0)
        store._db.execute("PRAGMA synchronous = OFF")
        try:
            for what, first, second in steps:
                play(store, model, what, first, second)
                agree(store, path, model)
        finally:
            store.close()


class Model:
    """Each letter that ever was, in order of storage."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.wanted: dict[str, bool] = {}
        """Those that are there, and whether they are to be redriven."""

    def learn(self, store: SqliteStore, wanted: bool = False) -> None:
        """Take in the names of letters that were stored just now."""
        fresh = [each.id for each in store.letters(limit=1000) if each.id not in self.names]
        self.names += fresh
        self.wanted |= dict.fromkeys(fresh, wanted)


def play(store: SqliteStore, model: Model, what: str, first: Any, second: Any) -> None:
    if what == "store":
        store.add_letters(tuple(letter(len(model.names) + n) for n in range(first)), wanted=second)
        model.learn(store, second)
        return
    chosen = tuple(model.names[place] for place in dict.fromkeys(first) if place < len(model.names))
    there = {each for each in chosen if each in model.wanted}
    if what == "mark":
        assert store.redrive(chosen, wanted=second) == there
        model.wanted |= dict.fromkeys(there, second)
    elif what == "purge":
        assert store.purge(chosen) == there
        model.wanted = {each: wanted for each, wanted in model.wanted.items() if each not in there}
    else:
        letters = tuple(letter(len(model.names) + n) for n in range(second))
        result = store.register(Flush((), effects=Effects(dead_letters=letters), redriven=chosen), now_ms=0)
        assert result.gone_letters == {each for each in chosen if not model.wanted.get(each)}
        if result.registered:
            model.wanted = {each: wanted for each, wanted in model.wanted.items() if each not in chosen}
            model.learn(store)


def agree(store: SqliteStore, path: Path, model: Model) -> None:
    """Compare what is told, also to one who reads it afresh, with the model."""
    tool = SqliteStore(path, pipeline="p", server_id="tool")
    for ledger in (store, tool):
        state = ledger.peek()
        assert (state.dead_letters, state.redrives) == (len(model.wanted), sum(model.wanted.values()))
        assert [(each.id, each.wanted) for each in ledger.letters(limit=1000)] == list(model.wanted.items())
        wanted = [each for each, marked in model.wanted.items() if marked]
        assert [each.id for each in ledger.letters(limit=1000, wanted=True)] == wanted
        assert [each.letter.sequence.sub for each in ledger.letters(limit=1000)] == [
            model.names.index(each) for each in model.wanted
        ]
    tool.close()
