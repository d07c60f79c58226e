"""The ledger on SQLite, synchronous: every public method is one ``BEGIN IMMEDIATE`` transaction.

It knows no event loop and no clock: the time is passed in. One thread at a time may use it, the one that opened it.
``sqlite.py`` puts it on a thread of its own; ``schema.py`` documents the file.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

from mldserver.errors import InternalError, LedgerError, LedgerVersionError, OperatorError
from mldserver.state import rows, schema
from mldserver.state.faults import damaged, translate
from mldserver.state.ledger import FlushResult, WindowState
from mldserver.state.lock import ProcessLock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mldserver.runtime.base import DeadLetter
    from mldserver.state.ledger import Flush, LedgerState, PositionUpdate, Segment, ShardState, WindowEntry

__all__ = ["SqliteStore"]


class SqliteStore:
    """One pipeline's ledger file. Methods mean what ``Ledger`` says; LedgerError leaves the ledger as it was."""

    def __init__(self, path: Path, *, pipeline: str, busy_timeout_ms: int = 5000) -> None:
        """Name the file; nothing is touched before ``open``."""
        self._path = path
        self._pipeline = pipeline
        self._busy_timeout_ms = busy_timeout_ms
        self._lock = ProcessLock(path.with_suffix(".lock"))
        self._db: sqlite3.Connection | None = None

    def open(self, *, now_ms: int) -> LedgerState:
        """Take the lock, open or create the file, and return what it holds.

        Raises OperatorError when another server holds the ledger or its folder cannot be written,
        LedgerVersionError for a newer or foreign file, LedgerError for a damaged one. The file is then as it was.
        """
        if self._db is not None:
            raise InternalError("The ledger is open already.", path=str(self._path))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OperatorError(
                f"The folder {self._path.parent} cannot be made: {error.strerror}.", path=str(self._path)
            ) from error
        self._lock.acquire()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            try:
                self._db = sqlite3.connect(self._path, isolation_level=None)
                self._db.row_factory = sqlite3.Row
                self._db.execute(f"PRAGMA busy_timeout = {self._busy_timeout_ms}")
                if self._is_new(self._db):
                    self._create(self._db, now_ms)
                else:
                    self._examine(self._db)
                self._configure(self._db)
            except sqlite3.Error as error:
                raise translate(error, self._path, did="It was left as it is.") from error
            with self._transaction() as db:
                try:
                    state = rows.read_state(db)
                except ValueError as error:
                    raise damaged(f"its content cannot be read ({error})", self._path) from error
            undo.pop_all()
        return state

    def close(self) -> None:
        """Close the file and let the lock go; without effect when it is closed."""
        db, self._db = self._db, None
        try:
            if db is not None:
                db.close()
        finally:
            self._lock.release()

    def _is_new(self, db: sqlite3.Connection) -> bool:
        """Whether there is nothing yet: no file, or one whose creation did not get to its only transaction."""
        if db.execute("PRAGMA application_id").fetchone()[0] == schema.APPLICATION_ID:
            return False
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise LedgerVersionError(
                f"{self._path} is an SQLite database, but no ledger.",
                advice="Give this server an output folder of its own.",
                path=str(self._path),
            )
        return True

    def _create(self, db: sqlite3.Connection, now_ms: int) -> None:
        with self._transaction():
            db.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
            for statement in schema.DDL:
                db.execute(statement)
            db.execute(
                "INSERT INTO meta (id, format, pipeline, created_ms) VALUES (1, ?, ?, ?)",
                (schema.FORMAT, self._pipeline, now_ms),
            )

    def _examine(self, db: sqlite3.Connection) -> None:
        meta = db.execute("SELECT format, pipeline FROM meta").fetchone()
        if meta is None:
            raise damaged("it does not say whose it is", self._path)
        if meta["format"] != schema.FORMAT:
            raise LedgerVersionError(
                f"The ledger has format {meta['format']}; this program knows format {schema.FORMAT}.",
                advice="Run the version of mldserver that wrote it, or a later one.",
                path=str(self._path),
            )
        if meta["pipeline"] != self._pipeline:
            raise LedgerVersionError(
                f"The ledger belongs to the pipeline {meta['pipeline']!r}, not to {self._pipeline!r}.",
                advice="Give each pipeline an output folder of its own, or the name that it had.",
                path=str(self._path),
            )
        found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise damaged(found, self._path)

    def _configure(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA foreign_keys = ON")
        # A commit returns when its log is on the disk itself: a checkpoint at the daemon depends on it.
        db.execute("PRAGMA synchronous = FULL")
        mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise LedgerError(
                f"The file system under {self._path} cannot hold the ledger: no shared memory for SQLite's WAL.",
                advice="Put the output folder on a local disk.",
                path=str(self._path),
            )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit what the body does, or roll all of it back when anything fails, the commit included."""
        db = self._db
        if db is None:
            raise InternalError("The ledger is not open.", path=str(self._path))
        try:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise translate(error, self._path) from error

    def open_shard(self, shard_id: str, parents: tuple[str, ...] = ()) -> ShardState:
        """Raise the shard's epoch and return its state with it. Parents that are not given stay as they were."""
        with self._transaction() as db:
            _know(db, shard_id, parents)
            db.execute("UPDATE shards SET epoch = epoch + 1 WHERE shard_id = ?", (shard_id,))
            return rows.shard(db.execute("SELECT * FROM shards WHERE shard_id = ?", (shard_id,)).fetchone())

    def know_shards(self, parents_by_shard: dict[str, tuple[str, ...]]) -> None:
        """Note shards and their parents; epochs, positions and ends stay."""
        with self._transaction() as db:
            for shard_id, parents in parents_by_shard.items():
                _know(db, shard_id, parents)

    def end_shards(self, shard_ids: frozenset[str], *, now_ms: int) -> None:
        """Mark shards as ended; those that are not known yet are noted as ended."""
        with self._transaction() as db:
            for shard_id in sorted(shard_ids):
                _know(db, shard_id, ())
                _end(db, shard_id, now_ms)

    def register(self, flush: Flush, *, now_ms: int) -> FlushResult:
        """Register a flush, or refuse it as a whole, with every reason, before anything is written.

        Raises InternalError when a position would go down, a path is registered twice, or a segment's bounds are
        not those of its open window.
        """
        with self._transaction() as db:
            result = FlushResult(
                lost_shards=frozenset(
                    update.shard_id for update in flush.positions if not _owned(db, update)
                ),
                cut_windows=frozenset(
                    segment.window_id
                    for segment in flush.segments
                    if not segment.late and _closed(db, segment)
                ),
            )
            if result.registered:
                self._write(db, flush, now_ms)
            return result

    def _write(self, db: sqlite3.Connection, flush: Flush, now_ms: int) -> None:
        for update in flush.positions:
            _move(db, update)
            if update.ended:
                _end(db, update.shard_id, now_ms)
        for segment in flush.segments:
            (_add_late if segment.late else _add)(db, segment)
        db.executemany(
            "INSERT INTO dead_letters (shard_id, sequence, sub_sequence, partition_key, data, arrival_ms, attempts,"
            " error, traceback, handler, at_ms) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [rows.dead_letter_row(letter) for letter in flush.dead_letters],
        )
        db.execute("UPDATE meta SET clock = max(clock, ?)", (flush.clock,))
        if (progress := flush.batch_progress) is not None:
            db.execute(
                "UPDATE meta SET batch_number = ?, batch_rows = ?, batch_opened_ms = ?",
                (progress.number, progress.rows, progress.opened_ms),
            )

    def dead_letters(self, limit: int = 100) -> tuple[DeadLetter, ...]:
        """Return at most ``limit`` dead letters, oldest first."""
        with self._transaction() as db:
            found = db.execute("SELECT * FROM dead_letters ORDER BY id LIMIT ?", (limit,))
            return tuple(rows.dead_letter(row) for row in found)

    def late_published(self, paths: tuple[str, ...]) -> None:
        """Forget late files that are visible; those that are not listed (any more) do not matter."""
        with self._transaction() as db:
            db.executemany("DELETE FROM late_segments WHERE path = ?", [(path,) for path in paths])

    def cut(self, window_ids: tuple[str, ...]) -> tuple[WindowEntry, ...]:
        """Fix the segments of those windows that are open, and return them in the order asked for."""
        with self._transaction() as db:
            return tuple(
                _expect(db, window_id, WindowState.CUT)
                for window_id in window_ids
                if db.execute(
                    "UPDATE windows SET state = 'cut' WHERE window_id = ? AND state = 'open'", (window_id,)
                ).rowcount
            )

    def begin_attempt(self, window_id: str) -> int:
        """Count an attempt and return its number. Raises InternalError unless the window is cut or set aside."""
        with self._transaction() as db:
            entry = _expect(db, window_id, WindowState.CUT, WindowState.SET_ASIDE)
            db.execute(
                "UPDATE windows SET state = 'cut', attempt = attempt + 1, error = NULL WHERE window_id = ?",
                (window_id,),
            )
            return entry.attempt + 1

    def commit(
        self, window_id: str, *, attempt: int, staging: str, files: tuple[str, ...], rows_out: int
    ) -> bool:
        """Make an attempt's output count; False when the window is not cut or the attempt is not its latest."""
        with self._transaction() as db:
            return bool(
                db.execute(
                    "UPDATE windows SET state = 'committed', staging = ?, files = ?, rows_out = ?"
                    " WHERE window_id = ? AND state = 'cut' AND attempt = ?",
                    (staging, rows.names_text(files), rows_out, window_id, attempt),
                ).rowcount
            )

    def published(self, window_id: str, *, now_ms: int) -> tuple[Segment, ...]:
        """Note that the output is visible and return the segments that are now free to delete.

        A second call returns none. Raises InternalError unless the window is committed or published.
        """
        with self._transaction() as db:
            entry = _expect(db, window_id, WindowState.COMMITTED, WindowState.PUBLISHED)
            if entry.state is WindowState.COMMITTED:
                db.execute(
                    "UPDATE windows SET state = 'published', staging = NULL, published_ms = ? WHERE window_id = ?",
                    (now_ms, window_id),
                )
                db.execute("DELETE FROM segments WHERE window_id = ?", (window_id,))
            return entry.segments

    def set_aside(self, window_id: str, error: str) -> None:
        """Put a cut window aside with its segments. Raises InternalError unless it is cut."""
        with self._transaction() as db:
            _expect(db, window_id, WindowState.CUT)
            db.execute(
                "UPDATE windows SET state = 'set_aside', error = ? WHERE window_id = ?",
                (rows.storable(error), window_id),
            )

    def prune(self, *, windows_before_ms: int, shards_before_ms: int) -> int:
        """Forget windows published, and shards ended, before those times; return how many rows went.

        ``shards_before_ms`` must lie further back than the stream keeps records: a shard that comes back after it
        was pruned is a new one.
        """
        with self._transaction() as db:
            stored = db.execute("SELECT cut_below_ms FROM meta").fetchone()[0]
            pruned = db.execute(
                "SELECT max(end_ms) FROM windows WHERE published_ms < ?", (windows_before_ms,)
            ).fetchone()[0]
            db.execute("UPDATE meta SET cut_below_ms = ?", (_latest(stored, pruned),))
            gone = db.execute("DELETE FROM windows WHERE published_ms < ?", (windows_before_ms,)).rowcount
            return gone + db.execute("DELETE FROM shards WHERE ended_ms < ?", (shards_before_ms,)).rowcount


def _know(db: sqlite3.Connection, shard_id: str, parents: tuple[str, ...]) -> None:
    text = rows.names_text(parents)
    db.execute("INSERT OR IGNORE INTO shards (shard_id, parents) VALUES (?, ?)", (shard_id, text))
    if parents:
        db.execute("UPDATE shards SET parents = ? WHERE shard_id = ?", (text, shard_id))


def _end(db: sqlite3.Connection, shard_id: str, now_ms: int) -> None:
    db.execute("UPDATE shards SET ended_ms = COALESCE(ended_ms, ?) WHERE shard_id = ?", (now_ms, shard_id))


def _owned(db: sqlite3.Connection, update: PositionUpdate) -> bool:
    """Whether the update comes from the shard's latest epoch. Nobody owns a shard that was pruned."""
    row = db.execute("SELECT epoch FROM shards WHERE shard_id = ?", (update.shard_id,)).fetchone()
    return row is not None and bool(row["epoch"] == update.epoch)


def _closed(db: sqlite3.Connection, segment: Segment) -> bool:
    """Whether a window takes no more rows. Its own row says so; without one, what was pruned does."""
    row = db.execute("SELECT state FROM windows WHERE window_id = ?", (segment.window_id,)).fetchone()
    if row is not None:
        return bool(row["state"] != WindowState.OPEN)
    if segment.end_ms is None:
        return False
    cut_below = db.execute("SELECT cut_below_ms FROM meta").fetchone()[0]
    return cut_below is not None and segment.end_ms <= cut_below


def _move(db: sqlite3.Connection, update: PositionUpdate) -> None:
    row = db.execute("SELECT * FROM shards WHERE shard_id = ?", (update.shard_id,)).fetchone()
    stored, position = rows.read_sequence(row), update.position
    if stored is not None and (position is None or position < stored):
        raise InternalError(
            f"The position of shard {update.shard_id} would go back from {stored} to {position}.",
            did="The flush was rolled back.",
            advice="Report this with the log: it is a bug.",
            shard=update.shard_id,
        )
    db.execute(
        "UPDATE shards SET sequence = ?, sub_sequence = ?, effective_ms = ?, event_ms = ? WHERE shard_id = ?",
        (
            None if position is None else str(position.number),
            None if position is None else position.sub,
            _latest(row["effective_ms"], update.effective_ms),
            _latest(row["event_ms"], update.event_ms),
            update.shard_id,
        ),
    )


def _latest(stored: int | None, given: int | None) -> int | None:
    return max((ms for ms in (stored, given) if ms is not None), default=None)


def _add(db: sqlite3.Connection, segment: Segment) -> None:
    """Add a segment to its open window, which comes into being with its first one."""
    db.execute(
        "INSERT OR IGNORE INTO windows (window_id, state, start_ms, end_ms) VALUES (?, 'open', ?, ?)",
        (segment.window_id, segment.start_ms, segment.end_ms),
    )
    db.execute(
        "INSERT INTO segments (path, window_id, rows, bytes) VALUES (?, ?, ?, ?)",
        (segment.path, segment.window_id, segment.rows, segment.bytes),
    )
    # IS, not =, compares the bounds of ``batches``, which are NULL.
    matching = db.execute(
        "UPDATE windows SET rows_in = rows_in + ? WHERE window_id = ? AND start_ms IS ? AND end_ms IS ?",
        (segment.rows, segment.window_id, segment.start_ms, segment.end_ms),
    ).rowcount
    if not matching:
        raise InternalError(
            f"Window {segment.window_id} is open with other bounds than those of {segment.path}.",
            did="The flush was rolled back.",
            advice="A changed window size needs an output folder of its own.",
            window=segment.window_id,
        )


def _add_late(db: sqlite3.Connection, segment: Segment) -> None:
    db.execute(
        "INSERT INTO late_segments (path, window_id, start_ms, end_ms, rows, bytes) VALUES (?, ?, ?, ?, ?, ?)",
        (segment.path, segment.window_id, segment.start_ms, segment.end_ms, segment.rows, segment.bytes),
    )


def _expect(db: sqlite3.Connection, window_id: str, *states: WindowState) -> WindowEntry:
    """Return a window that is in one of these states. Raises InternalError when it is not."""
    entry = rows.read_window(db, window_id)
    if entry is None or entry.state not in states:
        raise InternalError(
            f"Window {window_id} is {entry.state if entry else 'unknown'}, not {' or '.join(states)}.",
            did="The ledger stays as it was.",
            advice="Report this with the log: it is a bug.",
            window=window_id,
        )
    return entry
