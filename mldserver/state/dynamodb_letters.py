"""Rules of dead letters over a draft. They mean what ``LetterBook`` says.

The letters of one transaction are one item, which is never changed: the book says which of them are marked and which
are gone, and the item goes with the last. A letter's id is the item's version and its place in there: ``17.0``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mldserver.state.dynamodb_book import LetterItem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mldserver.records import DeadLetter
    from mldserver.state.dynamodb_book import Draft

__all__ = ["letter_id", "mark", "missing", "remove", "store"]


def letter_id(version: int, place: int) -> str:
    """Return the id of a letter."""
    return f"{version}.{place}"


def store(draft: Draft, letters: tuple[DeadLetter, ...], *, wanted: bool = False) -> None:
    """Add letters, once a draft."""
    if not letters:
        return
    draft.dead_letters = letters
    marked = frozenset(range(len(letters))) if wanted else frozenset()
    draft.letters.put(str(draft.book.version + 1), LetterItem(len(letters), marked))
    _count(draft, len(letters))


def mark(draft: Draft, ids: Iterable[str], *, wanted: bool) -> frozenset[str]:
    """Mark letters, or take the mark away; return those that are there."""
    there = set()
    for each in ids:
        found = _find(draft, each)
        if found is None:
            continue
        key, item, place = found
        draft.letters.put(
            key, replace(item, wanted=item.wanted | {place} if wanted else item.wanted - {place})
        )
        there.add(each)
    return frozenset(there)


def missing(draft: Draft, ids: Iterable[str]) -> frozenset[str]:
    """Return the letters that are not there any more, or not to be redriven."""
    lacking = set()
    for each in ids:
        found = _find(draft, each)
        if found is None or found[2] not in found[1].wanted:
            lacking.add(each)
    return frozenset(lacking)


def remove(draft: Draft, ids: Iterable[str]) -> frozenset[str]:
    """Delete letters; return those that were there."""
    gone = set()
    for each in ids:
        found = _find(draft, each)
        if found is None:
            continue
        key, item, place = found
        item = replace(item, wanted=item.wanted - {place}, gone=item.gone | {place})
        if len(item.gone) == item.count:
            draft.letters.drop(key)
            draft.spent.append(int(key))
        else:
            draft.letters.put(key, item)
        gone.add(each)
    _count(draft, -len(gone))
    return frozenset(gone)


def _find(draft: Draft, given: str) -> tuple[str, LetterItem, int] | None:
    key, _, place = given.partition(".")
    item = draft.letters.get(key)
    if item is None or not (place.isascii() and place.isdigit()):
        return None
    number = int(place)
    return None if number >= item.count or number in item.gone else (key, item, number)


def _count(draft: Draft, more: int) -> None:
    if more:
        draft.totals = replace(draft.totals, dead_letters=draft.totals.dead_letters + more)
