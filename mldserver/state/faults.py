"""SQLite's errors in the words of the ledger."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Final

from mldserver.errors import InternalError, LedgerError, LedgerUnusable, MldserverError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["damaged", "translate"]

_ROLLED_BACK: Final = "The transaction was rolled back."
_DAMAGED: Final = (
    "The ledger is damaged",
    "It is never repaired silently: bring back a backup with `mldserver ledger restore`.",
)
_UNWRITABLE: Final = (
    "The ledger cannot be opened for writing",
    "Check the file, its folder and their permissions.",
)
_FAULTS: Final[dict[int, tuple[str, str]]] = {
    sqlite3.SQLITE_FULL: (
        "The disk that holds the ledger is full",
        "Make room: the next transaction succeeds as soon as there is some.",
    ),
    sqlite3.SQLITE_IOERR: (
        "The disk that holds the ledger failed",
        "Look at the disk and at the system's log.",
    ),
    sqlite3.SQLITE_BUSY: (
        "Another program holds the ledger's write lock",
        "Close tools that have the ledger's file open for writing.",
    ),
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_READONLY: _UNWRITABLE,
    sqlite3.SQLITE_CANTOPEN: _UNWRITABLE,
    sqlite3.SQLITE_PERM: _UNWRITABLE,
}
"""By primary result code: what happened, and what to do about it."""


def translate(error: sqlite3.Error, path: Path, *, did: str = _ROLLED_BACK) -> MldserverError:
    """Return the ledger's own error for one of SQLite's: LedgerError, or InternalError for a broken constraint."""
    # Errors that Python's sqlite3 module raises by itself carry no code.
    code: int | None = getattr(error, "sqlite_errorcode", None)
    where = {"path": str(path), "sqlite": getattr(error, "sqlite_errorname", None)}
    if isinstance(error, sqlite3.IntegrityError):
        return InternalError(
            f"The ledger's rules were broken: {error}.",
            did=did,
            advice="Report this with the log: it is a bug.",
            **where,
        )
    what, advice = _FAULTS.get(code & 0xFF if code is not None else -1, ("SQLite refused", ""))
    kind = LedgerUnusable if (what, advice) == _DAMAGED else LedgerError
    return kind(f"{what}: {error}.", did=did, advice=advice, **where)


def damaged(found: str, path: Path, *, sqlite: str | None = None) -> LedgerError:
    """Return the error for a ledger whose content cannot be: ``found`` says what is there, ``sqlite`` in its words."""
    what, advice = _DAMAGED
    return LedgerUnusable(f"{what}: {found}.", advice=advice, path=str(path), sqlite=sqlite)
