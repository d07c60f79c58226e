"""The file: what it holds as documented, and what a failing disk leaves behind."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from mldserver.errors import InternalError, LedgerError
from mldserver.state import schema
from mldserver.state.ledger import BatchProgress, Commit, Flush, LedgerState, ServerState
from mldserver.state.store import SqliteStore
from tests.state.samples import BATCH, HUGE, W1, letter, move, seg

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    """An open store that holds one shard and one open window."""
    store = SqliteStore(path, pipeline="p", server_id="one", busy_timeout_ms=0)
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
    store.register(Flush((), dead_letters=(letter(1),)), now_ms=7)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA application_id").fetchone() == (schema.APPLICATION_ID,)
        known = (schema.FORMAT, "p", 5, 0, None, 0, 0, None, *(1, 1, 4, 0, 0))
        first, *meta = db.execute("SELECT * FROM meta").fetchone()
        assert (first, tuple(meta[: len(known)])) == (1, known)
        assert db.execute(
            "SELECT sequence, typeof(sequence), typeof(sub_sequence) FROM shards"
        ).fetchone() == (
            str(10**55 + 7),
            "text",
            "integer",
        )
        assert db.execute("SELECT typeof(data), typeof(sequence) FROM dead_letters").fetchone() == (
            "blob",
            "text",
        )
        documented = {
            line.split()[0].strip("`,") for line in (schema.__doc__ or "").splitlines() if line[:2] == "``"
        }
        assert {
            name
            for (name,) in db.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            )
        } == documented


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
    store.register(Flush((move(previous=HUGE),)), now_ms=7)
    assert (statements[0], statements[-1]) == ("BEGIN IMMEDIATE", "COMMIT")
    statements.clear()
    store.peek()
    assert (statements[0], statements[-1]) == ("BEGIN", "COMMIT")


def test_a_store_is_opened_once_and_used_while_it_is_open(store: SqliteStore) -> None:
    with pytest.raises(InternalError, match="open already"):
        store.open(now_ms=0)
    assert store.open_shard("a").epoch == 2
    store.close()
    store.close()
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
    big = Flush((move(ended=True, previous=HUGE),), (seg("s2"),), (letter(1, data=bytes(100_000)),), clock=9)
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(LedgerError, match=r"The disk that holds the ledger is full.*rolled back.*Make room"):
        store.register(big, now_ms=8)
    assert store.open_shard("a").epoch == 2
    db.execute("PRAGMA max_page_count = 1000000")
    assert store.register(
        Flush((move(epoch=2, previous=HUGE),), big.segments, big.dead_letters), now_ms=8
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
    with pytest.raises(InternalError) as caught:
        store.register(Flush((), (seg("s1"),)), now_ms=8)
    assert caught.value.where == {"path": str(path), "sqlite": "SQLITE_CONSTRAINT_UNIQUE"}


def test_a_shared_file_that_is_changed_by_hand_is_found_at_the_next_beat(
    store: SqliteStore, path: Path
) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE shards SET parents = '[1'")
    with pytest.raises(LedgerError, match="damaged: its content cannot be read"):
        store.sync(ServerState("one", 9))


def test_a_batch_that_an_older_program_cut_without_raising_the_number_raises_it_when_it_is_pruned(
    store: SqliteStore, path: Path
) -> None:
    store.register(Flush((), (seg("s2", BATCH),)), now_ms=7)
    store.cut((BATCH,))
    attempt = store.begin_attempts((BATCH,))[BATCH]
    store.commit((Commit(BATCH, attempt, "stage", (), 0),))
    store.published({BATCH: attempt}, retain=False, now_ms=8)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE meta SET batch_number = 0")
    assert store.prune(windows_before_ms=9, shards_before_ms=0) == 1
    assert state_of(path).batch_progress == BatchProgress(2)
