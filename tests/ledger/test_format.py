"""Changes and dead letters as bytes: what comes out is what went in, and damage is a ValueError."""

from __future__ import annotations

import zlib
from dataclasses import replace

import orjson
import pytest

from mldserver.ledger.book import Book, Changes, LedgerTotals, LetterItem
from mldserver.ledger.contract import (
    BatchProgress,
    ServerState,
    ShardState,
    StateFile,
    StoreState,
    WindowEntry,
    WindowState,
)
from mldserver.ledger.format import (
    changes_of,
    letter_of,
    letter_row,
    pack_changes,
    pack_letters,
    rows_of,
    unpack_changes,
    unpack_letters,
)
from mldserver.stores import ALL_KEYS, KeyRange
from tests.ledger.samples import BATCH, HUGE, W1, late, letter, more, seg

pytestmark = pytest.mark.quick

ENTRY = WindowEntry(
    W1,
    WindowState.PUBLISHED,
    0,
    10_000,
    revision=2,
    attempt=3,
    segments=(seg("s1", revision=1), more("s2", revision=2)),
    pending=(more("s3"),),
    published_ms=7,
    files=("f1",),
    rows_in=10,
    rows_out=2,
)
EVERYTHING = Changes(
    LedgerTotals(9, 4, 5, 6, BatchProgress(1, 2, 3), "f1", draining=True),
    {
        "a": ShardState("a", 1, HUGE, 2, 3, 4, ("x", "y"), "one", True),
        "b": None,
        "c": ShardState("c", 1, store="root"),
    },
    {
        W1: ENTRY,
        BATCH: WindowEntry(BATCH, WindowState.SET_ASIDE, error="no"),
        "gone": None,
    },
    {"one": ServerState("one", 1, 2, False, "a", "behind", "f1", life=3), "two": None},
    {"l1": late("l1"), "l2": None},
    {"7": LetterItem(3, wanted=0b100, gone=0b011), "8": None},
    {"f1": "text", "f2": None},
    {
        "root": StoreState("root", 7, next_due_ms=5),
        "part": StoreState("part", 8, 10, 2**127, closed=True),
        "gone": None,
    },
    {
        "p1": StateFile("p1", {"root": (ALL_KEYS,), "elsewhere": (ALL_KEYS,)}, 3, 4),
        "p2": StateFile("p2", {"part": (KeyRange(10, 11), KeyRange(13, 2**127))}, 5, 6),
        "p3": StateFile("p3", {}, 7, 8, gone_ms=9),
        "p4": None,
    },
)


def test_changes_come_back_as_they_went_in() -> None:
    changes = unpack_changes(pack_changes(EVERYTHING, {}), {})
    assert changes == EVERYTHING
    server = changes.servers["one"]
    assert server is not None
    assert server.life == 3, "which no comparison looks at"


def test_no_changes_are_changes_too() -> None:
    assert unpack_changes(pack_changes(Changes(), {}), {}) == Changes()
    assert not Changes()


def test_a_window_that_grows_is_told_by_its_new_segments_only() -> None:
    before = {W1: replace(ENTRY, segments=tuple(seg(f"s{n}", revision=1) for n in range(1_000)))}
    grown = replace(before[W1], segments=(*before[W1].segments, seg("new", revision=1)))
    packed = pack_changes(Changes(windows={W1: grown}), before)
    assert len(packed) < 250
    assert unpack_changes(packed, before) == Changes(windows={W1: grown})
    with pytest.raises(ValueError, match="goes on from 1000 segments, and had 3"):
        unpack_changes(packed, {W1: ENTRY})


def test_a_book_is_made_again_from_everything_in_it() -> None:
    book, again = Book(), Book()
    book.apply(EVERYTHING)
    again.apply(unpack_changes(pack_changes(book.everything(), {}), {}))
    assert again.state() == book.state()
    assert (again.paths.keys(), again.unfinished, again.retained_bytes) == ({"s1", "s2", "s3"}, set(), 1500)
    assert (again.version, again.totals) == (1, EVERYTHING.totals)


def test_changes_without_keyed_state_are_rows_as_format_6_had_them() -> None:
    rows = rows_of(Changes(shards={"a": ShardState("a", 1)}), {})
    assert sorted(rows) == ["late", "letters", "servers", "shapes", "shards", "windows"]
    assert rows["shards"] == {"a": [1, None, None, None, None, (), None, False]}


def test_a_store_without_timers_and_a_letter_without_one_are_read_as_earlier_versions_wrote_them() -> None:
    rows = rows_of(Changes(stores={"s": StoreState("s", 1)}), {})["stores"]
    assert rows == {"s": [1, "0", f"{2**128 - 1:x}", False]}
    assert letter_of(letter_row(letter(1))[:-2]) == letter(1)
    assert letter_of([*letter_row(letter(1))[:-2], None, None]) == letter(1), "as SQLite fills new columns"


def test_a_flush_into_a_thousand_stores_names_each_range_once() -> None:
    stores = {str(n): StoreState(str(n), 1, n << 100, (n + 1 << 100) - 1) for n in range(1_000)}
    file = StateFile("f", {key: (store.key_range,) for key, store in stores.items()}, 1, 1)
    changes = Changes(stores=stores, state_files={"f": file})
    assert rows_of(changes, {})["state_files"] == {"f": [1, 1, None, dict.fromkeys(stores)]}
    assert unpack_changes(pack_changes(changes, {}), {}) == changes


def test_a_file_that_is_needed_for_the_range_of_an_unknown_store_is_refused() -> None:
    rows = rows_of(EVERYTHING, {}) | {"stores": {}}
    with pytest.raises(ValueError, match="root"):
        changes_of(rows, {})


@pytest.mark.parametrize(
    "data",
    [b"", b"x", *(zlib.compress(each) for each in (b"", b"[]", b"{}", b"null", b'{"shards": {"a": [1]}}'))],
)
def test_bytes_that_are_no_changes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        unpack_changes(data, {})


def test_letters_come_back_as_they_went_in() -> None:
    letters = (
        letter(1),
        letter(2, partition_key=None, arrival_ms=None, data=b""),
        letter(3, data=b"\0" * 99, parked_behind=HUGE, handler_version="7"),
        letter(4, timer="alarm/name", due_ms=7),
    )
    assert unpack_letters(pack_letters(letters)) == letters
    assert unpack_letters(pack_letters(())) == ()


@pytest.mark.parametrize(
    "data",
    [b"", b"x", *(zlib.compress(b"\0\0\0\x04" + orjson.dumps(each)) for each in (None, [[1]], "no"))],
)
def test_bytes_that_are_no_letters_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        unpack_letters(data)
