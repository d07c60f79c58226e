"""The file: what it holds as documented, and what a failing disk leaves behind."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mldserver.effects import Effects
from mldserver.errors import InternalError, LedgerError
from mldserver.ledger import sqlite_file
from mldserver.ledger.contract import Flush, LedgerState, ServerState
from mldserver.ledger.format import FORMAT
from mldserver.records import DeadLetter
from tests.ledger.samples import HUGE, W1, letter, move, seg
from tests.support.store import SqliteStore

pytestmark = pytest.mark.quick


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def store(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteStore]:
    """An open store that holds one shard and one open window."""
    monkeypatch.setattr("mldserver.ledger.sqlite_file.BUSY_TIMEOUT_MS", 0)
    store = SqliteStore(path, pipeline="p", server_id="one")
    store.open(now_ms=5)
    store.open_shard("a")
    store.register(Flush((move(),), (seg("s1"),)), now_ms=6)
    yield store
    store.close()


def state_of(path: Path) -> LedgerState:
    store = SqliteStore(path, pipeline="p", server_id="tool")
    try:
        return store.peek()
    finally:
        store.close()


def test_the_file_is_what_its_documentation_says(store: SqliteStore, path: Path) -> None:
    store.register(Flush((), effects=Effects(dead_letters=(letter(1),))), now_ms=7)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA application_id").fetchone() == (sqlite_file._APPLICATION_ID,)
        assert db.execute("SELECT * FROM meta").fetchall() == [(1, FORMAT, "p", 5)]
        assert db.execute("SELECT position FROM shards").fetchone() == (f'["{10**55 + 7}",3]',)
        assert db.execute("SELECT typeof(data), typeof(sequence) FROM dead_letters").fetchone() == (
            "blob",
            "text",
        )
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        described = (sqlite_file.__doc__ or "").replace("``", " ").split()
        columns = {each[1] for name in tables for each in db.execute(f"PRAGMA table_info({name})")}
        # What a column of this name is, another table says, or the classes of the book.
        told_elsewhere = {
            "id",
            "server_id",
            "shard_id",
            "store_id",
            "window_id",
            "fingerprint",
            "rows",
            "bytes",
            "path",
        }
    documented = {
        line.split()[0].strip("`,") for line in (sqlite_file.__doc__ or "").splitlines() if line[:2] == "``"
    }
    assert tables == documented
    assert {each.strip(",.:") for each in described} >= columns - told_elsewhere - set(
        DeadLetter.__slots__
    ) - {"sub_sequence"}


def test_commits_reach_the_disk_before_they_return(store: SqliteStore) -> None:
    db = store._db
    assert db is not None
    pragmas = {name: db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")}
    assert pragmas == {"journal_mode": "wal", "synchronous": 2}
    assert db.execute("PRAGMA foreign_keys").fetchone()[0] == 1


def test_a_transaction_that_writes_takes_the_write_lock_before_it_reads(store: SqliteStore) -> None:
    db = store._db
    assert db is not None
    statements: list[str] = []
    db.set_trace_callback(statements.append)
    store.register(Flush((), (seg("s2"),)), now_ms=7)
    assert (statements[0], statements[-1]) == ("BEGIN IMMEDIATE", "COMMIT")
    statements.clear()
    store.peek()
    assert [each.split()[0] for each in statements] == ["BEGIN", "SELECT", "ROLLBACK"]


def test_a_store_is_opened_once_and_used_while_it_is_open(store: SqliteStore) -> None:
    assert store.open_shard("a").epoch == 2
    with pytest.raises(InternalError, match="open already"):
        store.open(now_ms=0)
    with pytest.raises(InternalError, match="not open"):
        store.dead_letters()
    with pytest.raises(InternalError, match="not open"):
        store.open_shard("a")


def test_a_closed_store_opens_again(store: SqliteStore) -> None:
    store.close()
    assert store.open(now_ms=9).windows[W1].segments == (seg("s1"),)


def test_a_full_disk_rolls_back_and_the_next_call_works_when_there_is_room(
    store: SqliteStore, path: Path
) -> None:
    db = store._db
    assert db is not None
    big = Flush(
        (move(ended=True, previous=HUGE),),
        (seg("s2"),),
        Effects(dead_letters=(letter(1, data=bytes(100_000)),)),
        clock=9,
    )
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(LedgerError, match=r"The disk that holds the ledger is full.*rolled back.*Make room"):
        store.register(big, now_ms=8)
    assert store.open_shard("a").epoch == 2
    db.execute("PRAGMA max_page_count = 1000000")
    assert store.register(
        Flush((move(epoch=2, previous=HUGE),), big.segments, big.effects), now_ms=8
    ).registered
    store.close()
    state = state_of(path)
    assert (state.clock, state.shards["a"].ended, state.dead_letters) == (0, False, 1)
    assert state.windows[W1].segments == (seg("s1"), seg("s2"))


def test_a_commit_that_fails_is_rolled_back(store: SqliteStore, path: Path) -> None:
    db = store._db
    assert db is not None
    db.set_authorizer(
        lambda action, what, *_: (
            sqlite3.SQLITE_DENY
            if (action, what) == (sqlite3.SQLITE_TRANSACTION, "COMMIT")
            else sqlite3.SQLITE_OK
        )
    )
    with pytest.raises(LedgerError, match="SQLite refused: not authorized"):
        store.register(Flush((), (seg("s2"),)), now_ms=8)
    assert not db.in_transaction
    db.set_authorizer(None)
    assert store.cut((W1,))[0].segments == (seg("s1", revision=1),)


def test_a_ledger_that_cannot_be_written_is_told(store: SqliteStore) -> None:
    db = store._db
    assert db is not None
    db.execute("PRAGMA query_only = ON")
    with pytest.raises(LedgerError, match="cannot be opened for writing"):
        store.open_shard("a")


def test_a_tool_that_keeps_the_file_locked_fails_the_call_not_the_ledger(
    store: SqliteStore, path: Path
) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as tool:
        tool.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="Another program holds the ledger's write lock"):
            store.open_shard("a")
    assert store.open_shard("a").epoch == 2


def test_an_error_names_the_file_and_the_code(store: SqliteStore, path: Path) -> None:
    assert store._db is not None
    store._db.execute("DROP TABLE shards")
    with pytest.raises(LedgerError) as caught:
        store.open_shard("a")
    assert caught.value.where == {"path": str(path), "sqlite": "SQLITE_ERROR"}


def test_a_file_whose_content_cannot_be_is_told(store: SqliteStore, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE shards SET parents = '[1'")
        db.execute("INSERT INTO log VALUES (99, '{}')")
    for _ in range(2):
        with pytest.raises(LedgerError, match="damaged: its content cannot be read"):
            store.sync(ServerState("one", 9))


@pytest.mark.parametrize("versions", [1, 999, 1101])
def test_a_server_learns_what_another_wrote_also_when_the_log_does_not_go_back_so_far(
    store: SqliteStore, path: Path, versions: int
) -> None:
    other = SqliteStore(path, pipeline="p", server_id="two")
    other.open(now_ms=0)
    assert other._db is not None
    other._db.execute("PRAGMA synchronous = OFF")
    for number in range(versions - 1):
        other.end_shards(frozenset({f"old-{number}"}), now_ms=1)
    told = other.sync(ServerState("two", 9))
    other.close()
    assert store.peek() == told == state_of(path)
    assert store.ledger._store.book.news_from == (told.version if versions > 999 else 0)
