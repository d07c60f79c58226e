"""Rules of dead letters over a draft. They mean what ``Ledger`` says.

The letters of one transaction are one item, which is never changed: the book says which of them are marked and which
are gone, and the item goes with the last. A letter's id is the item's version and its place in there: ``17.0``.

A letter that is to be *redriven* is marked, by a tool. A server finds the mark, runs the handler, and registers what that
gave together with the letter's end, in one flush (``Flush.redriven``): two servers that take the same letter, or one that
dies in between, count it once. What fails again is a new letter of the same flush.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from mldserver.ledger.book import LetterItem
from mldserver.ledger.contract import StoredLetter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mldserver.ledger.book import Book, Draft
    from mldserver.records import DeadLetter

__all__ = ["mark", "missing", "page", "places", "remove", "store", "stored"]


def store(draft: Draft, letters: tuple[DeadLetter, ...], *, wanted: bool = False) -> None:
    """Add letters, once a draft."""
    if not letters:
        return
    draft.dead_letters = letters
    item = LetterItem(len(letters))
    draft.letters.put(str(draft.book.version + 1), replace(item, wanted=item.there) if wanted else item)
    draft.totals = replace(draft.totals, dead_letters=draft.totals.dead_letters + len(letters))


def mark(draft: Draft, ids: Iterable[str], *, wanted: bool) -> frozenset[str]:
    """Mark letters, or take the mark away; return those that are there."""
    marked = set()
    for letter_id in ids:
        if (place := _find(draft, letter_id)) is not None:
            key, item, bit = place
            draft.letters.put(key, replace(item, wanted=item.wanted | bit if wanted else item.wanted & ~bit))
            marked.add(letter_id)
    return frozenset(marked)


def missing(draft: Draft, ids: Iterable[str]) -> frozenset[str]:
    """Return the letters that are not there any more, or not to be redriven."""
    letters = {letter_id: _find(draft, letter_id) for letter_id in ids}
    return frozenset(
        letter_id for letter_id, place in letters.items() if place is None or not place[1].wanted & place[2]
    )


def remove(draft: Draft, ids: Iterable[str]) -> frozenset[str]:
    """Delete letters; return those that were there."""
    gone = set()
    for letter_id in ids:
        if (place := _find(draft, letter_id)) is None:
            continue
        key, item, bit = place
        item = replace(item, wanted=item.wanted & ~bit, gone=item.gone | bit)
        if item.there:
            draft.letters.put(key, item)
        else:
            draft.letters.drop(key)
            draft.spent.append(int(key))
        gone.add(letter_id)
    if gone:
        draft.totals = replace(draft.totals, dead_letters=draft.totals.dead_letters - len(gone))
    return frozenset(gone)


def page(book: Book, after: str | None, limit: int, *, wanted: bool) -> Iterator[tuple[int, list[int]]]:
    """Yield a page of letters in order of storage: items by their version, and the places in each.

    ``after``: those behind this id. ``wanted``: only marked ones.
    """
    version, _, place = (after or "0.0").partition(".")
    behind = (int(version), int(place)) if after and version.isdigit() and place.isdigit() else (0, -1)
    for number in sorted(int(key) for key in book.letters):
        if number < behind[0] or limit <= 0:
            continue
        item = book.letters[str(number)]
        first = behind[1] + 1 if number == behind[0] else 0
        selected = list(islice(places(item.wanted if wanted else item.there, first), limit))
        limit -= len(selected)
        if selected:
            yield number, selected


def places(bits: int, first: int = 0) -> Iterator[int]:
    """Yield the places of an item whose bits are set, from one on."""
    bits = bits >> first << first
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def stored(book: Book, version: int, place: int, letter: DeadLetter) -> StoredLetter:
    """Return a letter as the book tells of it."""
    wanted = book.letters[str(version)].wanted >> place & 1
    return StoredLetter(f"{version}.{place}", letter, wanted=bool(wanted))


def _find(draft: Draft, letter_id: str) -> tuple[str, LetterItem, int] | None:
    """Return a letter's item with its key, and its bit there; None when it is gone, or never was."""
    key, _, place = letter_id.partition(".")
    item = draft.letters.get(key)
    if item is None or not (place.isascii() and place.isdigit()):
        return None
    bit = 1 << int(place) if int(place) < item.count else 0
    return (key, item, bit) if item.there & bit else None
