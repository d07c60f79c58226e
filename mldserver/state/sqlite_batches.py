"""Where ``batches`` windows stand, in the ledger's file. Statements inside a caller's transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldserver.state import batches
from mldserver.state.ledger import BatchProgress

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from mldserver.state.ledger import BatchStep

__all__ = ["go_behind", "move_on", "no_room", "read"]


def read(db: sqlite3.Connection) -> BatchProgress:
    """Return where they stand."""
    row = db.execute("SELECT batch_number, batch_rows, batch_opened_ms FROM meta").fetchone()
    return BatchProgress(*row)


def _write(db: sqlite3.Connection, progress: BatchProgress) -> None:
    """Note where they stand now."""
    db.execute(
        "UPDATE meta SET batch_number = ?, batch_rows = ?, batch_opened_ms = ?",
        (progress.number, progress.rows, progress.opened_ms),
    )


def no_room(db: sqlite3.Connection, step: BatchStep | None) -> BatchProgress | None:
    """Return where they stand when a flush has no room there."""
    stands = read(db)
    return stands if step is not None and batches.moved_on(stands, step) is None else None


def move_on(db: sqlite3.Connection, step: BatchStep) -> None:
    """Take a flush's rows in."""
    progress = batches.moved_on(read(db), step)
    assert progress is not None, "a flush without room is refused"
    _write(db, progress)


def go_behind(db: sqlite3.Connection, window_ids: Iterable[str]) -> None:
    """Go on behind windows that are cut."""
    _write(db, batches.behind(read(db), window_ids))
