from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from mldserver.errors import LedgerError, LedgerVersionError
from mldserver.ledger.format import FORMAT
from mldserver.ledger.sqlite_file import _is_new, connect

pytestmark = pytest.mark.quick


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
            connect(self._path, pipeline="p", created_ms=0).close()
        return Row(found)

    def close(self) -> None:
        self._db.close()


def test_a_ledger_that_another_server_creates_between_two_looks_is_no_foreign_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    looking: Any = Interrupted(path)
    assert not _is_new(looking, path)
    looking.close()


def opened(path: Path) -> sqlite3.Connection:
    return connect(path, pipeline="p", created_ms=0)


def test_a_ledger_with_one_damaged_page_is_told_in_a_sentence_of_ours_and_left_as_it_is(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.sqlite"
    opened(path).close()
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[16:18], "big")
    data[2 * size : 3 * size] = b"\xa5" * size
    path.write_bytes(data)
    with pytest.raises(LedgerError) as caught:
        opened(path)
    error = caught.value
    assert error.what == "The ledger is damaged: SQLite's check of the file found a fault."
    assert "btree" in error.where["sqlite"].lower()
    assert "\n" not in str(error)
    assert path.read_bytes() == data


def test_a_ledger_of_a_newer_format_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    db = opened(path)
    db.execute("UPDATE meta SET format = format + 1")
    db.close()
    data = path.read_bytes()
    with pytest.raises(LedgerVersionError, match=f"has format {FORMAT + 1}"):
        opened(path)
    assert path.read_bytes() == data
