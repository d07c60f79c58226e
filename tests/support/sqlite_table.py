"""An engine that publishes windows into a SQLite file, where the setting ``sink`` names a table; and what it holds."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mldserver.base.kill_points import kill_point
from mldserver.base.uris import reach
from mldserver.engine_jobs import PublishJob
from mldserver.errors import WindowFailed
from mldserver.testing import LocalEngine

__all__ = ["FailingTable", "TableEngine", "publish_into", "read_table"]


class TableEngine(LocalEngine):
    """Computes in this process, and publishes into a SQLite file."""

    def __init__(self, table: Path) -> None:
        super().__init__()
        self.table = table

    async def publish(self, job: PublishJob) -> None:
        await self.ready()
        try:
            await asyncio.to_thread(publish_into, self.table, job)
        except (OSError, sqlite3.Error) as error:
            raise WindowFailed(f"Window {job.window.id} could not be published: {error}") from error


class FailingTable(TableEngine):
    """Its table fails as often as there are errors left."""

    def __init__(self, table: Path, errors: list[Exception]) -> None:
        super().__init__(table)
        self.errors = errors
        self.asked: list[str] = []

    async def publish(self, job: PublishJob) -> None:
        self.asked.append(job.window.id)
        if self.errors:
            raise self.errors.pop()
        await super().publish(job)


def publish_into(table: Path, job: PublishJob) -> None:
    """Replace a window's rows by its revision's; a table that has it, or a later one, stays as it is. Raises OSError."""
    data = []
    for name in job.files:
        filesystem, file = reach(f"{job.staging}/{name}", job.out)
        with filesystem.open_input_stream(file) as stream:
            data.append(bytes(stream.read()))
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
            database.executemany(
                "INSERT INTO files VALUES (?, ?)", [(job.window.id, content) for content in data]
            )
        kill_point("sink.writing")


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
