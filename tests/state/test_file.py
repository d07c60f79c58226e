"""The file's opening: what is created, what is accepted, and what is refused and left as it was."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from mldserver.errors import LedgerError, LedgerVersionError, OperatorError
from mldserver.state.file import create_or_open, open_existing
from mldserver.state.ledger import Flush
from mldserver.state.store import SqliteStore
from tests.state.samples import move, seg

if TYPE_CHECKING:
    from pathlib import Path

OURS: dict[str, Any] = {"pipeline": "p", "busy_timeout_ms": 0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Path:
    """A closed ledger that holds one shard and one open window."""
    store = SqliteStore(path, pipeline="p", server_id="one")
    store.open(now_ms=5)
    store.open_shard("a")
    store.register(Flush((move(),), (seg("s1"),)), now_ms=6)
    store.close()
    return path


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


def created_ms(path: Path, *, now_ms: int = 7) -> int:
    with closing(create_or_open(path, **OURS, now_ms=now_ms)) as db:
        found: int = db.execute("SELECT created_ms FROM meta").fetchone()[0]
    return found


def test_a_ledger_is_created_once_with_the_folders_on_the_way(tmp_path: Path) -> None:
    path = tmp_path / "out" / "_mldserver" / "ledger.sqlite"
    assert [created_ms(path, now_ms=1), created_ms(path, now_ms=2)] == [1, 1]


@pytest.mark.parametrize("statements", [(), ("PRAGMA journal_mode = WAL",)])
def test_a_creation_that_was_interrupted_starts_again(path: Path, statements: tuple[str, ...]) -> None:
    path.touch()
    change(path, *statements)
    with pytest.raises(LedgerError, match="There is no ledger"):
        open_existing(path, **OURS)
    assert created_ms(path) == 7


def test_who_comes_second_at_the_creation_takes_what_is_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    class Slow(sqlite3.Connection):
        def execute(self, statement: str, *args: Any) -> sqlite3.Cursor:
            if statement == "BEGIN IMMEDIATE":
                monkeypatch.undo()
                assert created_ms(path, now_ms=1) == 1
            return super().execute(statement, *args)

    monkeypatch.setattr(sqlite3, "connect", lambda path, **more: connect(path, factory=Slow, **more))
    assert created_ms(path, now_ms=2) == 1


def test_a_creation_that_fails_leaves_nothing_half_done(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mldserver.state.schema.DDL", ("CREATE TABLE meta (id)", "CREATE TABLE meta (id)"))
    with pytest.raises(LedgerError, match="table meta already exists"):
        created_ms(path)
    monkeypatch.undo()
    assert created_ms(path) == 7


def refused(path: Path, error: type[Exception], match: str) -> None:
    """The file is refused to servers and to tools, and is as it was."""
    before = path.read_bytes()
    for call in (lambda: create_or_open(path, **OURS, now_ms=0), lambda: open_existing(path, **OURS)):
        with pytest.raises(error, match=match) as caught:
            call()
        assert caught.type is error
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_damaged(path: Path) -> None:
    path.write_text("precious notes\n" * 100)
    refused(path, LedgerError, "The ledger is damaged: file is not a database")


def test_a_database_of_something_else_is_left_alone(path: Path) -> None:
    change(path, "CREATE TABLE songs (title)")
    refused(path, LedgerVersionError, "is an SQLite database, but no ledger")


def test_a_newer_format_is_refused(ledger: Path) -> None:
    change(ledger, "UPDATE meta SET format = 3", "DROP TABLE dead_letters")
    refused(ledger, LedgerVersionError, r"has format 3; this program knows format 2\. Run the version")


def test_a_format_that_was_never_released_is_refused(ledger: Path) -> None:
    change(ledger, "UPDATE meta SET format = 1", "DROP TABLE servers")
    refused(ledger, LedgerVersionError, r"has format 1; this program knows format 2\. .* never released")


def test_the_ledger_of_another_pipeline_is_refused(ledger: Path) -> None:
    change(ledger, "UPDATE meta SET pipeline = 'q'")
    refused(ledger, LedgerVersionError, "belongs to the pipeline 'q', not to 'p'")


def test_a_damaged_page_is_found_at_the_start(ledger: Path) -> None:
    content = bytearray(ledger.read_bytes())
    content[8192 + 1 : 8192 + 200] = b"\xa5" * 199
    ledger.write_bytes(content)
    refused(ledger, LedgerError, "The ledger is damaged")


def unreadable(path: Path, match: str) -> None:
    """The file is refused by what examines it or by what reads it, to servers and to tools, and is as it was."""
    before = path.read_bytes()
    for call in (lambda store: store.open(now_ms=0), lambda store: store.peek()):
        store = SqliteStore(path, pipeline="p", server_id="two")
        with pytest.raises(LedgerError, match=match):
            call(store)
        store.close()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("statement", "match"),
    [
        ("UPDATE windows SET state = 'ajar'", "The ledger is damaged"),
        ("UPDATE shards SET sequence = '12x'", "The ledger is damaged"),
        ("UPDATE segments SET kind = 'odd'", "The ledger is damaged"),
        ("UPDATE shards SET parents = '[1'", "damaged: its content cannot be read"),
        ("UPDATE windows SET files = '{}'", r"damaged: its content cannot be read \('{}' is no list\)"),
        ("DELETE FROM meta", "damaged: it does not say whose it is"),
        ("DROP TABLE segments", "SQLite refused: no such table: segments"),
    ],
)
def test_content_that_cannot_be_is_found_at_the_start(ledger: Path, statement: str, match: str) -> None:
    change(ledger, "PRAGMA ignore_check_constraints = ON", "PRAGMA foreign_keys = OFF", statement)
    unreadable(ledger, match)


def test_a_folder_in_the_place_of_the_file_is_told(path: Path) -> None:
    path.mkdir()
    with pytest.raises(LedgerError, match="cannot be opened for writing"):
        created_ms(path)


def test_a_file_in_the_place_of_the_folder_is_told(path: Path) -> None:
    path.touch()
    with pytest.raises(OperatorError, match=r"The folder .* cannot be made: (File exists|Not a directory)"):
        created_ms(path / "ledger.sqlite")


def test_a_file_system_without_shared_memory_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect
    # Locks by files: what SQLite does on file systems that have no better ones, and there it has no WAL.
    monkeypatch.setattr(
        sqlite3, "connect", lambda path, **more: connect(f"file:{path}?vfs=unix-dotfile", uri=True, **more)
    )
    with pytest.raises(LedgerError, match="cannot hold the ledger"):
        created_ms(path)
