"""The dead letters that a ledger holds: looked through, taken out, and sent through the handler once more.

A letter that is to be *redriven* is marked in the ledger, by a tool. A server finds the mark, runs the handler, and
registers what that gave together with the letter's end, in one flush (``Flush.redriven``): two servers that take the
same letter, or one that dies in between, count it once. What fails again is a new letter of the same flush.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from mldserver.records import DeadLetter, Sequence

__all__ = ["LETTERS_AT_ONCE", "LetterBook", "StoredLetter"]

LETTERS_AT_ONCE: Final = 40
"""How many letters one transaction may take out: each may be two of the 100 operations of DynamoDB's (AWS limit)."""


@dataclass(frozen=True, slots=True)
class StoredLetter:
    """A dead letter, as a ledger holds it."""

    id: str
    """Its name in this ledger; never given again."""
    letter: DeadLetter
    wanted: bool = False
    """A server is to redrive it."""


class LetterBook(Protocol):
    """The part of a ``Ledger`` that knows dead letters. Tools may call all of it."""

    async def dead_letters(self, limit: int = 100) -> tuple[DeadLetter, ...]:
        """Return stored dead letters, oldest first."""
        ...

    async def letters(
        self, *, after: str | None = None, limit: int = 100, wanted: bool = False
    ) -> tuple[StoredLetter, ...]:
        """Return a page of letters in order of storage: those behind the id ``after``; ``wanted``: only marked ones."""
        ...

    async def parked_keys(self, shard_id: str) -> dict[str, Sequence]:
        """Return the partition keys of a shard's stored dead letters, each with the sequence of the first.

        The first in the shard's order, not in that of storage: a letter that failed again is stored anew.

        Later records of these keys wait (``on_key_failure = park``). Letters without a key park nothing.
        """
        ...

    async def redrive(self, ids: tuple[str, ...], *, wanted: bool = True) -> frozenset[str]:
        """Mark letters to be redriven, or (``wanted=False``) take the mark away; return those that are there."""
        ...

    async def purge(self, ids: tuple[str, ...]) -> frozenset[str]:
        """Delete letters for good, at most LETTERS_AT_ONCE; return those that were there."""
        ...

    async def add_letters(self, letters: tuple[DeadLetter, ...], *, wanted: bool = False) -> None:
        """Store letters that come from elsewhere, marked or not."""
        ...
