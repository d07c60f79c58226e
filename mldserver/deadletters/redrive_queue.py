"""The letters that are to be redriven, in portions: of one shard, in its order, and not too many at a time.

The ledger gives letters in the order in which they were stored. That is their shard's, but for letters that failed again
(stored anew behind those that wait) and for those that were taken out of files. So where there are more than a page of
them, all are looked through first, without keeping their payloads, and then read again in their shards' order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final, TypeVar

from mldserver.ledger.contract import LETTERS_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator

    from mldserver.ledger.contract import StoredLetter
    from mldserver.ledger.operations import Ledger
    from mldserver.records import Sequence

_T = TypeVar("_T")

PAGE: Final = 500
"""Letters that are asked for at a time."""
_PORTION_BYTES: Final = 8 * 1024 * 1024
"""Payloads that run together, unless one alone is larger."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A wanted letter, without its payload."""

    id: str
    place: tuple[str, Sequence]
    """Shard and sequence."""
    bytes: int
    number: int
    """How many wanted letters were stored before it."""
    before: str | None
    """The id of the last one of them."""


def portions(letters: Iterable[StoredLetter]) -> Iterator[tuple[StoredLetter, ...]]:
    """Yield letters as they run together."""
    return _cut(
        letters,
        place=lambda stored: (stored.letter.shard_id, stored.letter.sequence),
        size=lambda stored: len(stored.letter.data),
    )


async def wanted_portions(book: Ledger) -> AsyncGenerator[tuple[StoredLetter, ...], None]:
    """Yield the letters that are wanted now as they run together; those that are gone meanwhile are left out."""
    page = await book.letters(limit=PAGE, wanted=True)
    if len(page) < PAGE:
        for portion in portions(page):
            yield portion
        return
    seen = await _look_through(book, page)
    for part in _cut(seen, place=lambda seen: seen.place, size=lambda seen: seen.bytes):
        letters = await _read(book, part)
        for portion in portions(letters):
            yield portion


def _cut(
    items: Iterable[_T], *, place: Callable[[_T], tuple[str, Sequence]], size: Callable[[_T], int]
) -> Iterator[tuple[_T, ...]]:
    for _, of_shard in groupby(sorted(items, key=place), key=lambda item: place(item)[0]):
        portion: list[_T] = []
        total = 0
        for item in of_shard:
            total += size(item)
            if portion and (total > _PORTION_BYTES or len(portion) == LETTERS_AT_ONCE):
                yield tuple(portion)
                portion, total = [], size(item)
            portion.append(item)
        yield tuple(portion)


async def _look_through(book: Ledger, page: tuple[StoredLetter, ...]) -> list[_Seen]:
    """Return all that are wanted; ``page``: the first of them."""
    seen: list[_Seen] = []
    while page:
        for stored in page:
            letter, before = stored.letter, seen[-1].id if seen else None
            place = (letter.shard_id, letter.sequence)
            seen.append(_Seen(stored.id, place, len(letter.data), len(seen), before))
        page = await book.letters(after=page[-1].id, limit=PAGE, wanted=True)
    return seen


async def _read(book: Ledger, part: tuple[_Seen, ...]) -> list[StoredLetter]:
    """Return the letters that were seen; those that were stored one after the other are read together."""
    ids = {seen.id for seen in part}
    letters: list[StoredLetter] = []
    in_order = sorted(part, key=lambda seen: seen.number)
    for _, run in groupby(enumerate(in_order), key=lambda at: at[1].number - at[0]):
        members = [seen for _, seen in run]
        page = await book.letters(after=members[0].before, limit=len(members), wanted=True)
        letters += [stored for stored in page if stored.id in ids]
    return letters
