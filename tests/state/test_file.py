from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

from mldserver.state.file import _is_new, create_or_open

if TYPE_CHECKING:
    from pathlib import Path


class Row:
    def __init__(self, row: Any) -> None:
        self._row = row

    def fetchone(self) -> Any:
        return self._row


class Interrupted:
    """A connection that another server overtakes after its first look: it creates the ledger meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = sqlite3.connect(path, isolation_level=None)
        self._looks = 0

    def execute(self, statement: str) -> Row:
        found = self._db.execute(statement).fetchone()
        self._looks += 1
        if self._looks == 1:
            create_or_open(self._path, pipeline="p", busy_timeout_ms=1000, now_ms=0).close()
        return Row(found)

    def close(self) -> None:
        self._db.close()


def test_a_ledger_that_another_server_creates_between_two_looks_is_no_foreign_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    looking: Any = Interrupted(path)
    assert not _is_new(looking, path)
    looking.close()
