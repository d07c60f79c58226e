"""The ledger on SQLite, synchronous: every public method is one transaction, ``BEGIN IMMEDIATE`` where it writes.

It knows no event loop and no clock: the time is passed in. One thread at a time may use it, the one that opened it.
Servers of one host may share the file: SQLite's write lock orders their transactions. ``sqlite.py`` puts it on a
thread of its own; ``schema.py`` documents the file.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

from mldserver.base.kill_points import kill_point
from mldserver.errors import InternalError
from mldserver.state import file, flushes, members, rows, sqlite_letters, windows
from mldserver.state.faults import damaged, translate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from mldserver.records import DeadLetter, Sequence
    from mldserver.state.ledger import (
        Commit,
        Decision,
        Flush,
        FlushResult,
        LedgerState,
        Segment,
        ServerState,
        ShardState,
        WindowEntry,
    )
    from mldserver.state.letters import StoredLetter
    from mldserver.state.shapes import ShapeChange

__all__ = ["SqliteStore"]


class SqliteStore:
    """One pipeline's ledger file. Methods mean what ``Ledger`` says; LedgerError leaves the ledger as it was."""

    def __init__(
        self,
        path: Path,
        *,
        pipeline: str,
        server_id: str,
        rename_from: str | None = None,
        busy_timeout_ms: int = 5000,
    ) -> None:
        """Name the file, the pipeline and this server; nothing is touched before ``open`` or ``peek``.

        ``rename_from``: the name that the pipeline may have still; it gets the other when a shape is declared.
        """
        self._path = path
        self._pipeline = pipeline
        self._former = rename_from
        self.server_id = server_id
        self._busy_timeout_ms = busy_timeout_ms
        self._db: sqlite3.Connection | None = None
        self._life: int | None = None

    def open(self, *, now_ms: int) -> LedgerState:
        """Open or create the file, register the server, and return what the ledger holds.

        Raises OperatorError when its folder cannot be written, LedgerVersionError for a newer or foreign file,
        LedgerError for a damaged one. The file is then as it was.
        """
        if self._db is not None:
            raise InternalError("The ledger is open already.", path=str(self._path))
        self._db = file.create_or_open(
            self._path,
            pipeline=self._pipeline,
            busy_timeout_ms=self._busy_timeout_ms,
            now_ms=now_ms,
            former=self._former,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            with self._writing() as db:
                life = members.enter(db, self.server_id, now_ms)
                state = self._state(db)
            undo.pop_all()
        self._life = life
        return state

    def peek(self) -> LedgerState:
        """Return what the ledger holds without registering. Raises LedgerError when there is none."""
        if self._db is None:
            self._db = file.open_existing(
                self._path,
                pipeline=self._pipeline,
                busy_timeout_ms=self._busy_timeout_ms,
                former=self._former,
            )
        with self._transaction("BEGIN") as db:
            return self._state(db)

    def close(self) -> None:
        """Close the file; without effect when it is closed."""
        db, self._db, self._life = self._db, None, None
        if db is not None:
            db.close()

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        """Commit what the body does, or roll all of it back when anything fails, the commit included."""
        db = self._db
        if db is None:
            raise InternalError("The ledger is not open.", path=str(self._path))
        try:
            db.execute(begin)
            try:
                yield db
                kill_point("ledger.written")
                db.execute("COMMIT")
                kill_point("ledger.committed")
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise translate(error, self._path) from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Write under a version of the ledger of its own."""
        with self._transaction("BEGIN IMMEDIATE") as db:
            db.execute("UPDATE meta SET version = version + 1")
            yield db

    @contextlib.contextmanager
    def _serving(self) -> Iterator[sqlite3.Connection]:
        """Write as the server that this store registered. Raises ServerBuried when it was buried."""
        with self._writing() as db:
            members.require(db, self.server_id, self._registered())
            yield db

    def _registered(self) -> int:
        if self._life is None:
            raise InternalError(
                "The ledger was opened for looking: no server is registered.", path=str(self._path)
            )
        return self._life

    def _state(self, db: sqlite3.Connection, since: int = 0) -> LedgerState:
        """Read what the ledger holds. Raises LedgerError for content that cannot be."""
        with self._sound():
            return rows.read_state(db, since)

    @contextlib.contextmanager
    def _sound(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise damaged(f"its content cannot be read ({error})", self._path) from error

    def sync(self, told: ServerState, since: int = 0) -> LedgerState:
        """Beat, and return what the ledger holds now, of windows the news since a version."""
        with self._serving() as db:
            members.beat(db, self.server_id, told)
            return self._state(db, since)

    def find(self, window_ids: tuple[str, ...]) -> tuple[WindowEntry, ...]:
        """Return windows as they are; unknown ones are left out."""
        with self._transaction("BEGIN") as db, self._sound():
            found = [rows.read_window(db, each) for each in window_ids]
        return tuple(entry for entry in found if entry is not None)

    def bury(self, seen: Mapping[str, int]) -> frozenset[str]:
        """Remove servers whose beat is still the one that was seen; return those that are gone."""
        with self._serving() as db:
            others = {each: beat_ms for each, beat_ms in seen.items() if each != self.server_id}
            return members.bury(db, others)

    def claim(self, folder: str, *, instead_of: str | None = None) -> LedgerState:
        """Be the ledger of an output folder, unless it is another's; return what it holds then."""
        with self._serving() as db:
            members.claim(db, folder, instead_of, self.server_id)
            return self._state(db)

    def leave(self) -> None:
        """Take this server out, unless it is out already."""
        with self._writing() as db:
            members.leave(db, self.server_id, self._registered())

    def declare(self, change: ShapeChange, *, version: int, now_ms: int) -> bool:
        """Note this server's shape, unless it is another than the pipeline's and somebody wrote since a version."""
        with self._serving() as db:
            declared = members.declare(db, self.server_id, change, version, now_ms)
            if declared:
                db.execute("UPDATE meta SET pipeline = ?", (self._pipeline,))
            return declared

    def drain(self) -> None:
        """Ask all servers to drain."""
        with self._writing() as db:
            db.execute("UPDATE meta SET draining = 1")

    def open_shard(self, shard_id: str, parents: tuple[str, ...] = ()) -> ShardState:
        """Raise the shard's epoch, own it, and return its state. Parents that are not given stay as they were."""
        with self._serving() as db:
            return members.open_shard(db, shard_id, parents, self.server_id)

    def release_shard(self, shard_id: str, epoch: int) -> None:
        """Give up a shard that was not opened again since."""
        with self._serving() as db:
            members.release_shard(db, shard_id, epoch)

    def know_shards(self, parents_by_shard: dict[str, tuple[str, ...]]) -> None:
        """Note shards and their parents; epochs, positions and ends stay."""
        with self._serving() as db:
            for shard_id, parents in parents_by_shard.items():
                members.know_shard(db, shard_id, parents)

    def end_shards(self, shard_ids: frozenset[str], *, now_ms: int) -> None:
        """Mark shards as ended; those that are not known yet are noted as ended."""
        with self._writing() as db:
            for shard_id in sorted(shard_ids):
                members.know_shard(db, shard_id, ())
                members.end_shard(db, shard_id, now_ms)

    def register(self, flush: Flush, *, now_ms: int) -> FlushResult:
        """Register a flush, or refuse it as a whole, with every reason, before anything is written."""
        with self._serving() as db:
            result = flushes.weigh(db, flush)
            if result.registered:
                flushes.write(db, flush, now_ms)
            return result

    def late_published(self, paths: tuple[str, ...]) -> None:
        """Forget late files that are visible; those that are not listed (any more) do not matter."""
        with self._serving() as db:
            db.executemany("DELETE FROM late_segments WHERE path = ?", [(path,) for path in paths])

    def cut(self, window_ids: tuple[str, ...]) -> tuple[WindowEntry, ...]:
        """Fix the segments of those windows that can be cut, and return them in the order asked for."""
        with self._serving() as db:
            return windows.cut(db, window_ids, self.server_id)

    def adopt(self) -> tuple[WindowEntry, ...]:
        """Own every cut or committed window without an owner."""
        with self._serving() as db:
            return windows.adopt(db, self.server_id)

    def begin_attempts(self, window_ids: tuple[str, ...]) -> dict[str, int]:
        """Count an attempt at each window that is cut and ours; return their numbers."""
        with self._serving() as db:
            return windows.begin_attempts(db, window_ids, self.server_id)

    def commit(self, commits: tuple[Commit, ...]) -> frozenset[str]:
        """Make attempts' outputs count; return the windows for which it happened."""
        with self._serving() as db:
            return windows.commit(db, commits, self.server_id)

    def published(
        self, attempts: Mapping[str, int], *, retain: bool = True, now_ms: int
    ) -> tuple[Segment, ...]:
        """Note that outputs are visible and return the segments that are now free to delete."""
        with self._serving() as db:
            return windows.published(db, attempts, self.server_id, retain=retain, now_ms=now_ms)

    def expire(self, *, published_before_ms: int, keep_bytes: int, limit: int = 1000) -> tuple[Segment, ...]:
        """Stop retaining windows by age, then by size; return the segments to delete."""
        with self._serving() as db:
            return windows.expire(
                db, published_before_ms=published_before_ms, keep_bytes=keep_bytes, limit=limit
            )

    def set_aside(self, window_id: str, error: str) -> None:
        """Put a cut window of this server aside with its segments."""
        with self._serving() as db:
            windows.set_aside(db, window_id, error, self.server_id)

    def halt(self, window_id: str, error: str, *, first: bool) -> bool:
        """Keep why a window of this server is halted."""
        with self._serving() as db:
            return windows.halt(db, window_id, error, self.server_id, first=first)

    def decide(self, window_id: str, decision: Decision, *, now_ms: int) -> bool:
        """Do what an operator decides about a window that is halted or set aside."""
        with self._writing() as db:
            return windows.decide(db, window_id, decision, now_ms)

    def accept_gap(self, shard_id: str) -> bool:
        """Let the next opening of a shard start beyond its position."""
        with self._writing() as db:
            return members.accept_gap(db, shard_id)

    def reset(self, shard_ids: frozenset[str]) -> frozenset[str]:
        """Forget where shards without an owner stand; return those."""
        with self._writing() as db:
            return members.reset(db, shard_ids)

    def prune(
        self,
        *,
        windows_before_ms: int,
        shards_before_ms: int,
        keep_shards: frozenset[str] = frozenset(),
        limit: int = 10_000,
    ) -> int:
        """Forget windows over and not retained, and shards ended, before those times; return how many."""
        with self._serving() as db:
            over = windows.prune(db, before_ms=windows_before_ms, limit=limit)
            return over + members.prune(db, before_ms=shards_before_ms, keep=keep_shards)

    def dead_letters(self, limit: int = 100) -> tuple[DeadLetter, ...]:
        """Return at most ``limit`` dead letters, oldest first."""
        with self._transaction("BEGIN") as db:
            found = db.execute("SELECT * FROM dead_letters ORDER BY id LIMIT ?", (limit,))
            return tuple(rows.dead_letter(row) for row in found)

    def letters(
        self, *, after: str | None = None, limit: int = 100, wanted: bool = False
    ) -> tuple[StoredLetter, ...]:
        """Return a page of letters in order of storage."""
        with self._transaction("BEGIN") as db:
            return sqlite_letters.page(db, after, limit, wanted=wanted)

    def parked_keys(self, shard_id: str) -> dict[str, Sequence]:
        """Return the keys of a shard's dead letters, each with the sequence of the first."""
        with self._transaction("BEGIN") as db:
            return sqlite_letters.parked_keys(db, shard_id)

    def redrive(self, ids: tuple[str, ...], *, wanted: bool = True) -> frozenset[str]:
        """Mark letters to be redriven, or not; return those that are there."""
        with self._writing() as db:
            return sqlite_letters.mark(db, ids, wanted=wanted)

    def purge(self, ids: tuple[str, ...]) -> frozenset[str]:
        """Delete letters; return those that were there."""
        with self._writing() as db:
            return sqlite_letters.remove(db, ids)

    def add_letters(self, letters: tuple[DeadLetter, ...], *, wanted: bool = False) -> None:
        """Store letters that come from elsewhere."""
        with self._writing() as db:
            sqlite_letters.store(db, letters, wanted=wanted)
