"""Where ``batches`` windows stand, in the ledger's file. Statements inside a caller's transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldserver.state import batches
from mldserver.state.ledger import BatchProgress

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

__all__ = ["go_behind", "read", "write"]


def read(db: sqlite3.Connection) -> BatchProgress:
    """Return where they stand."""
    row = db.execute("SELECT batch_number, batch_rows, batch_opened_ms FROM meta").fetchone()
    return BatchProgress(*row)


def write(db: sqlite3.Connection, progress: BatchProgress) -> None:
    """Note where they stand now."""
    db.execute(
        "UPDATE meta SET batch_number = ?, batch_rows = ?, batch_opened_ms = ?",
        (progress.number, progress.rows, progress.opened_ms),
    )


def go_behind(db: sqlite3.Connection, window_ids: Iterable[str]) -> None:
    """Go on behind windows that are cut."""
    write(db, batches.behind(read(db), window_ids))
