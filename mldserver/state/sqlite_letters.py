"""Dead letters in the ledger's file: rules over its table, inside a caller's transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mldserver.records import Sequence
from mldserver.state import rows
from mldserver.state.letters import StoredLetter

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from mldserver.records import DeadLetter

__all__ = ["mark", "missing", "page", "parked_keys", "remove", "store"]

_INSERT: Final = (
    "INSERT INTO dead_letters (shard_id, sequence, sub_sequence, partition_key, data, arrival_ms, attempts,"
    " error, traceback, handler, at_ms, parked_behind, handler_version, wanted) VALUES "
)
_ROW: Final = "(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_AT_ONCE: Final = 100
"""Letters of one statement. With a statement for each, the ledger's thread would let go of the interpreter, and wait for
its turn again, as often as there are letters."""


def store(db: sqlite3.Connection, letters: tuple[DeadLetter, ...], *, wanted: bool = False) -> None:
    """Add letters."""
    for first in range(0, len(letters), _AT_ONCE):
        some = letters[first : first + _AT_ONCE]
        db.execute(
            _INSERT + ", ".join([_ROW] * len(some)),
            [value for letter in some for value in (*rows.dead_letter_row(letter), wanted)],
        )
    _count(db, len(letters))


def page(db: sqlite3.Connection, after: str | None, limit: int, *, wanted: bool) -> tuple[StoredLetter, ...]:
    """Return letters in order of storage."""
    found = db.execute(
        "SELECT * FROM dead_letters WHERE id > ? AND wanted >= ? ORDER BY id LIMIT ?",
        (_number(after), wanted, max(limit, 0)),
    )
    return tuple(
        StoredLetter(str(row["id"]), rows.dead_letter(row), wanted=bool(row["wanted"])) for row in found
    )


def parked_keys(db: sqlite3.Connection, shard_id: str) -> dict[str, Sequence]:
    """Return the keys of a shard's letters, each with the sequence of the first."""
    found = db.execute(
        # SQLite takes the other columns from the row that has the minimum: of texts that sort as the numbers do.
        "SELECT partition_key, sequence, sub_sequence,"
        " min(printf('%03d%s%020d', length(sequence), sequence, sub_sequence)) FROM dead_letters"
        " WHERE shard_id = ? AND partition_key IS NOT NULL GROUP BY partition_key",
        (shard_id,),
    )
    return {key: Sequence(int(number), sub) for key, number, sub, _ in found}


def mark(db: sqlite3.Connection, ids: Iterable[str], *, wanted: bool) -> frozenset[str]:
    """Mark letters, or take the mark away; return those that are there."""
    return frozenset(
        each
        for each in ids
        if db.execute("UPDATE dead_letters SET wanted = ? WHERE id = ?", (wanted, _number(each))).rowcount
    )


def remove(db: sqlite3.Connection, ids: Iterable[str]) -> frozenset[str]:
    """Delete letters; return those that were there."""
    gone = frozenset(
        each for each in ids if db.execute("DELETE FROM dead_letters WHERE id = ?", (_number(each),)).rowcount
    )
    _count(db, -len(gone))
    return gone


def missing(db: sqlite3.Connection, ids: Iterable[str]) -> frozenset[str]:
    """Return the letters that are not there any more, or not to be redriven."""
    return frozenset(
        each
        for each in ids
        if db.execute("SELECT 1 FROM dead_letters WHERE id = ? AND wanted", (_number(each),)).fetchone()
        is None
    )


def _number(given: str | None) -> int:
    """Return the row of an id; 0, which no row has, for a text that is none."""
    return int(given) if given and given.isascii() and given.isdigit() and len(given) < 19 else 0  # noqa: PLR2004  # SQLite's largest has 19


def _count(db: sqlite3.Connection, more: int) -> None:
    db.execute("UPDATE meta SET dead_letters = dead_letters + ?", (more,))
