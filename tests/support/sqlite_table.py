"""Reads the table that ``LocalEngine`` publishes into."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_table"]


def read_table(table: Path) -> dict[str, tuple[int, list[pa.Table]]]:
    """Return the revision, and the rows file by file, of each window in the table; no window without a table."""
    if not table.exists():
        return {}
    with closing(sqlite3.connect(table)) as database:
        found: dict[str, tuple[int, list[pa.Table]]] = {
            window_id: (revision, [])
            for window_id, revision in database.execute("SELECT window_id, revision FROM windows")
        }
        for window_id, data in database.execute("SELECT window_id, data FROM files"):
            found[window_id][1].append(pq.ParquetFile(pa.BufferReader(data)).read())
    return found
