"""Whose a ledger's file is, for tools that were given a folder and no name."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["pipeline_of"]


def pipeline_of(path: Path) -> str | None:
    """Return the name of the pipeline that a ledger's file belongs to.

    None when it does not say so: there is no file, or it is damaged, or no ledger. Opening it tells which.
    """
    try:
        # Not `connect(path)`, which would make an empty file where there is none.
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as db:
            found = db.execute("SELECT pipeline FROM meta").fetchone()
    except sqlite3.Error:
        return None
    return found[0] if found is not None and isinstance(found[0], str) else None
