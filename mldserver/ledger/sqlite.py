"""The ledger on SQLite, for servers of one host: ``Ledger`` over a file in the output folder.

``SqliteStore`` is synchronous and knows no event loop. At the beginning of each transaction it applies what other
servers wrote since to its book; a transaction that writes takes SQLite's write lock first, which excludes other
writers. ``SqliteLedger`` runs it on one thread that belongs to the ledger: it takes calls in the order in which they
were made, so that one transaction never overlaps another and the loop never waits for the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import orjson

from mldserver.base.clock import Clock
from mldserver.base.kill_points import kill_point
from mldserver.errors import InternalError
from mldserver.ledger import row_rules, rules, sqlite_file
from mldserver.ledger.book import Book, Changes, Draft, segments_of
from mldserver.ledger.contract import StoredLetter, with_ancestors
from mldserver.ledger.format import changes_of, letter_of, letter_row, rows_of
from mldserver.ledger.operations import Ledger, Transaction
from mldserver.ledger.sqlite_file import JSON_COLUMNS, TABLES
from mldserver.records import Sequence

_P = ParamSpec("_P")
_T = TypeVar("_T")
_S = TypeVar("_S")

_KEPT: Final = 1000
"""Versions that the log goes back, at least: a server that has heard of none of them reads everything again."""

_SHORTENED: Final = 100
"""After so many versions the log is shortened."""

_AT_ONCE: Final = 100
"""Rows of one statement. With a statement for each, the ledger's thread would let go of the interpreter, and wait for
its turn again, as often as there are rows."""

_COLUMNS: Final = {"totals": 11, "shards": 9, "stores": 5}
"""Of tables, without their keys. The rows of shards without a store have one value less, and those of stores without timers."""

_LOADED: Final = 1000
"""Windows read at a time: the raw rows take as much memory as the decoded windows."""


class SqliteStore:
    """One pipeline's file, and its book. One thread at a time may use it. LedgerError leaves the file as it was."""

    def __init__(self, path: Path, *, pipeline: str, rename_from: str | None = None) -> None:
        """Name the file and the pipeline, which may have the name ``rename_from`` still; ``open`` touches them."""
        self._path = path
        self._pipeline = pipeline
        self._former = rename_from
        self._db: sqlite3.Connection | None = None
        self.book = Book()
        self._upgraded = False
        """Whether the file is known to be of the present format."""

    def open(self, created_ms: int | None = None) -> None:
        """Open the file, unless it is open; ``created_ms``: the time at which it may be created.

        Raises OperatorError when its folder cannot be written, LedgerVersionError for a newer or foreign file,
        LedgerError for a damaged one, or where there is none. The file is then as it was.
        """
        if self._db is not None:
            return
        self._upgraded = False
        self._db = sqlite_file.connect(
            self._path, pipeline=self._pipeline, former=self._former, created_ms=created_ms
        )

    def close(self) -> None:
        """Close the file; without effect when it is closed."""
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def read(self, read: Callable[[Book], _T]) -> _T:
        """Return what ``read`` finds in the latest book."""
        with self._transaction("BEGIN"):
            return read(self.book)

    def transact(self, transaction: Transaction[_T], read: Callable[[Book], _S]) -> tuple[_T, _S]:
        """Run a transaction; return its result, and what ``read`` returns of the book after it."""
        with self._transaction("BEGIN IMMEDIATE") as db:
            draft = Draft(self.book)
            result = transaction.run(draft)
            if changes := draft.changes():
                self._write(db, draft, changes)
                kill_point("ledger.written")
                db.execute("COMMIT")
                self._upgraded = True
                kill_point("ledger.committed")
                self.book.apply(changes)
            return result, read(self.book)

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        """Begin with the latest book. What the body does not commit is rolled back."""
        db = self._db
        if db is None:
            raise InternalError("The ledger is not open.", path=str(self._path))
        try:
            db.execute(begin)
            try:
                self._refresh(db)
                yield db
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise sqlite_file.translate(error, self._path) from error

    def _refresh(self, db: sqlite3.Connection) -> None:
        """Bring the book up to date. Raises LedgerError for content that cannot be."""
        book = self.book
        try:
            if book.version:
                query = "SELECT version, changes FROM log WHERE version > ? ORDER BY version"
                news = db.execute(query, (book.version,)).fetchall()
                if not news or news[0][0] == book.version + 1:
                    for _, changes in news:
                        book.apply(changes_of(orjson.loads(changes), book.windows))
                    return
            (version,) = db.execute("SELECT coalesce(max(version), 0) FROM log").fetchone()
            self.book = Book()
            for rows in _read(db):
                self.book.apply(changes_of(rows, {}))
            self.book.restored(version)
        except ValueError as error:
            raise sqlite_file.damaged(f"its content cannot be read ({error})", self._path) from error

    def _write(self, db: sqlite3.Connection, draft: Draft, changes: Changes) -> None:
        """Write down what a draft changes."""
        if not self._upgraded:
            sqlite_file.upgrade(db)
        version, rows = self.book.version + 1, rows_of(changes, self.book.windows)
        db.execute("INSERT INTO log VALUES (?, ?)", (version, orjson.dumps(rows)))
        if version % _SHORTENED == 0:
            db.execute("DELETE FROM log WHERE version <= ?", (version - _KEPT,))
        if draft.declares:
            db.execute("UPDATE meta SET pipeline = ?", (self._pipeline,))
        self._write_segments(db, rows["windows"])
        if "totals" in rows:
            rows["totals"] = {1: rows["totals"]}
        for kind, news in rows.items():
            table, key_column = TABLES[kind]
            _as_columns(kind, filter(None, news.values()))
            _put(db, table, [(key, *row) for key, row in news.items() if row is not None])
            _drop(db, f"{table} WHERE {key_column}", [key for key, row in news.items() if row is None])
        for key, item in changes.letters.items():
            before = self.book.letters.get(key)
            gone = (item.gone if item else -1) & before.there if before else 0
            _drop(db, "dead_letters WHERE version = ? AND place", list(row_rules.places(gone)), int(key))
        fresh = enumerate(draft.dead_letters)
        _put(db, "dead_letters", [(version, place, *letter_row(letter)) for place, letter in fresh])

    def _write_segments(self, db: sqlite3.Connection, windows: dict[str, list[Any] | None]) -> None:
        """Take the segments out of the windows' rows, and write them down."""
        segments: list[tuple[Any, ...]] = []
        for window_id, row in windows.items():
            kept, added = row.pop() if row is not None else (0, ())
            if kept + len(added) < len(segments_of(self.book.windows.get(window_id))):
                past = (window_id, kept + len(added))
                db.execute("DELETE FROM segments WHERE window_id = ? AND place >= ?", past)
            segments += [(window_id, kept + place, *segment) for place, segment in enumerate(added)]
        _put(db, "segments", segments)

    def letters(self, after: str | None, limit: int, *, wanted: bool) -> tuple[StoredLetter, ...]:
        """Return a page of letters in order of storage."""
        letters: list[StoredLetter] = []
        with self._transaction("BEGIN") as db:
            for version, places in row_rules.page(self.book, after, limit, wanted=wanted):
                for first in range(0, len(places), _AT_ONCE):
                    some = places[first : first + _AT_ONCE]
                    rows = db.execute(
                        f"SELECT * FROM dead_letters WHERE version = ? AND place IN ({', '.join('?' * len(some))})"  # noqa: S608  # only question marks
                        " ORDER BY place",
                        (version, *some),
                    )
                    letters += [
                        row_rules.stored(self.book, version, place, letter_of(row)) for _, place, *row in rows
                    ]
        return tuple(letters)

    def parked_keys(self, shard_id: str) -> dict[str, Sequence]:
        """Return the keys of the letters of a shard and its ancestors, each with the sequence of the first."""
        with self._transaction("BEGIN") as db:
            line = with_ancestors(self.book.shards, shard_id)
            rows = db.execute(
                # SQLite takes the other columns from the row that has the minimum: of texts that sort as the numbers do.
                "SELECT partition_key, sequence, sub_sequence,"
                " min(printf('%03d%s%020d', length(sequence), sequence, sub_sequence)) FROM dead_letters"
                " WHERE shard_id IN (SELECT value FROM json_each(?)) AND partition_key IS NOT NULL"
                " GROUP BY partition_key",
                (orjson.dumps(list(line)).decode(),),
            ).fetchall()
        return {key: Sequence(int(number), sub) for key, number, sub, _ in rows}


def _read(db: sqlite3.Connection) -> Iterator[dict[str, Any]]:
    """Yield all that a ledger holds, as rows, some windows at a time. Raises ValueError for content that cannot be."""
    rows: dict[str, Any] = {kind: {} for kind in TABLES}
    there = {name for (name,) in db.execute("SELECT name FROM sqlite_schema")}
    for kind, (table, _) in TABLES.items():
        if kind != "windows" and table in there:
            rows[kind] = _rows(kind, db.execute(f"SELECT * FROM {table}"))  # noqa: S608  # our own name
    totals = rows.pop("totals")
    yield rows | {"totals": totals[1]} if totals else rows
    windows = db.execute("SELECT * FROM windows ORDER BY window_id")
    while some := windows.fetchmany(_LOADED):
        segments: defaultdict[str, list[Any]] = defaultdict(list)
        query = "SELECT * FROM segments WHERE window_id BETWEEN ? AND ? ORDER BY window_id, place"
        for window_id, _, *segment in db.execute(query, (some[0][0], some[-1][0])):
            segments[window_id].append(segment)
        read = {key: [*row, (0, segments.get(key, ()))] for key, row in _rows("windows", some).items()}
        yield {kind: {} for kind in rows} | {"windows": read}


def _as_columns(kind: str, rows: Iterable[list[Any]]) -> None:
    """Make of each row, in place, what its table holds."""
    for row in rows:
        row.extend([None] * (_COLUMNS.get(kind, 0) - len(row)))
        for column in JSON_COLUMNS.get(kind, ()):
            if row[column] is not None:
                row[column] = orjson.dumps(row[column]).decode()


def _rows(kind: str, records: Iterable[tuple[Any, ...]]) -> dict[Any, list[Any]]:
    """Return what a table holds by its keys."""
    rows = {key: row for key, *row in records}
    for row in rows.values():
        for column in JSON_COLUMNS.get(kind, ()):
            # The tables of older formats have fewer columns.
            if column < len(row) and row[column] is not None:
                row[column] = orjson.loads(row[column])
    return rows


def _put(db: sqlite3.Connection, table: str, rows: list[tuple[Any, ...]]) -> None:
    """Write whole rows, in place of those that have the same keys."""
    for first in range(0, len(rows), _AT_ONCE):
        some = rows[first : first + _AT_ONCE]
        marks = ", ".join([f"({', '.join('?' * len(some[0]))})"] * len(some))
        values = [value for row in some for value in row]
        db.execute(f"INSERT OR REPLACE INTO {table} VALUES {marks}", values)  # noqa: S608  # our own name


def _drop(db: sqlite3.Connection, column: str, values: list[Any], *before: Any) -> None:
    """Delete rows by the values of a column; ``before``: values of the marks that come first."""
    for first in range(0, len(values), _AT_ONCE):
        some = values[first : first + _AT_ONCE]
        db.execute(f"DELETE FROM {column} IN ({', '.join('?' * len(some))})", (*before, *some))  # noqa: S608  # our own name


def go_on_from(path: Path, pipeline: str, folder: str) -> None:
    """Turn a copy of a ledger into a usable one: give it a new id and a folder, and remove its servers.

    Raises LedgerError when it is damaged, of another format or pipeline, or cannot be written.
    """
    with contextlib.closing(SqliteStore(path, pipeline=pipeline)) as store:
        store.open()
        given_up = store.read(lambda book: book.totals.ledger_id)
        store.transact(Transaction(rules.claim, (folder, given_up, None)), Book.state)


class SqliteLedger(Ledger):
    """The ``Ledger`` of one server, in a file that other servers of the same host may share.

    A cancelled call is withdrawn when its turn has not come; otherwise the cancellation waits for its transaction
    (milliseconds, at most the busy time-out), so that when a call ends, nothing of it is still going on.
    """

    def __init__(
        self, path: Path, *, pipeline: str, server_id: str, clock: Clock, rename_from: str | None = None
    ) -> None:
        """Name the file, the pipeline and this server; ``open`` touches them.

        ``rename_from``: the name that the pipeline may have still.
        """
        super().__init__(server_id, clock)
        self._store = SqliteStore(path, pipeline=pipeline, rename_from=rename_from)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mldserver-ledger")
        self._closed = False

    async def _connect(self, *, create: bool) -> None:
        await self._call(self._store.open, self._clock.now_ms() if create else None)

    async def _read_book(self, read: Callable[[Book], _T]) -> _T:
        return await self._call(self._store.read, read)

    async def _transact(self, transaction: Transaction[_T], read: Callable[[Book], _S]) -> tuple[_T, _S]:
        return await self._call(self._store.transact, transaction, read)

    async def letters(
        self, *, after: str | None = None, limit: int = 100, wanted: bool = False
    ) -> tuple[StoredLetter, ...]:
        """Return a page of letters in order of storage."""
        return await self._call(self._store.letters, after, limit, wanted=wanted)

    async def parked_keys(self, shard_id: str) -> dict[str, Sequence]:
        """Return the keys of a shard's dead letters, each with the sequence of the first."""
        return await self._call(self._store.parked_keys, shard_id)

    async def close(self) -> None:
        """Run what was asked for, close the file, end the thread. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._outcome(self._thread.submit(self._store.close), withdraw=False)
        finally:
            # Idle by now: the close was the last call.
            self._thread.shutdown()

    async def _call(self, method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if self._closed:
            raise InternalError("The ledger is closed.")
        return await self._outcome(self._thread.submit(method, *args, **kwargs), withdraw=True)

    @staticmethod
    async def _outcome(job: Future[_T], *, withdraw: bool) -> _T:
        waiter = asyncio.wrap_future(job)
        try:
            await asyncio.wait([waiter])
        except asyncio.CancelledError:
            if withdraw:
                job.cancel()
            while not waiter.done():
                with contextlib.suppress(asyncio.CancelledError):  # this one is raised in the end
                    await asyncio.wait([waiter])
            if not waiter.cancelled():
                waiter.exception()  # no caller is left to raise it to
            raise
        return waiter.result()
