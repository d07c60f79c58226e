"""A table in the place of Delta, Iceberg or a database, in one SQLite file: windows are replaced in one transaction."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from mldserver.base.kill_points import kill_point
from mldserver.base.uris import reach

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from mldserver.jobs.engine import PublishJob

__all__ = ["publish_into", "read_table"]


def publish_into(table: Path, job: PublishJob) -> None:
    """Replace a window's rows by its revision's; a table that has it, or a later one, stays as it is. Raises OSError."""
    data = [_read(f"{job.staging}/{file}", job.out) for file in job.files]
    with closing(sqlite3.connect(table, timeout=60)) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS windows (window_id TEXT PRIMARY KEY, revision INTEGER)")
        database.execute("CREATE TABLE IF NOT EXISTS files (window_id TEXT, data BLOB)")
        changed = database.execute(
            "INSERT INTO windows VALUES (?, ?) ON CONFLICT (window_id) DO UPDATE"
            " SET revision = excluded.revision WHERE excluded.revision > revision",
            (job.window.id, job.window.revision),
        ).rowcount
        if changed:
            database.execute("DELETE FROM files WHERE window_id = ?", (job.window.id,))
            database.executemany("INSERT INTO files VALUES (?, ?)", [(job.window.id, each) for each in data])
        kill_point("sink.writing")
    kill_point("sink.written")


def _read(path: str, out: str) -> bytes:
    filesystem, file = reach(path, out)
    with filesystem.open_input_stream(file) as stream:
        return bytes(stream.read())


def read_table(table: Path) -> dict[str, tuple[int, list[pa.Table]]]:
    """Return the revision, and the rows file by file, of each window in the table; no window without a table."""
    import pyarrow as pa  # noqa: PLC0415  # the plugin's users may never read one
    import pyarrow.parquet as pq  # noqa: PLC0415  # see above

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
