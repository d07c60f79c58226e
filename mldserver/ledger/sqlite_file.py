"""The ledger's file, one SQLite database for one pipeline: its tables (format 8), how it is found or created, its errors.

Several processes may create one file at the same time: what decides is asked again inside the transaction that does.

The database is in WAL mode and carries ``_APPLICATION_ID`` in its header. All times are milliseconds since the Unix
epoch (UTC). Each row is one of a ledger's book (``book.py``), as ``format.py`` makes plain values of it: lists, and positions
(``["number", sub]``: they have 21 to 60 digits), are JSON. The rules are the program's alone, so that the file has no
constraints but its keys. A file without tables is a ledger that was never created: creation is one transaction. Formats
1 to 5 were never released. A ledger of format 6 has no keyed state; the first transaction that writes into it adds what is missing, also
to one of format 7, which has no life of a function.

``meta``, exactly one row (id 1)
    ``format``, ``pipeline``: readable in every format to come, so that an older program can say what it found.
    ``created_ms``.
``log``, one row for each of the latest transactions that changed anything
    ``version``: its number. ``changes``: what it wrote, as JSON: other servers read from these what they do not know
    yet. A server that is further behind reads the tables, which hold everything.
``totals``, at most one row (id 1): what there is once in a ledger
    ``clock``: next free value of the merge clock. ``dead_letters``: how many there are. ``lives``: how often a server has
    registered. ``cut_below_ms``: the latest end of all pruned windows; an event-time window that ends at or before it
    and has no row was cut. ``batch_progress``: where the open ``batches`` window stands (number, rows, opened at).
    ``ledger_id``: random, in the names of its files; a restored ledger has another. ``folder``: the id of the output
    folder that claimed it (``owner.json`` there). ``claims``: how often a server has claimed it for that folder.
    ``shape``: the fingerprint of the one that was declared last. ``draining``: servers must drain, or have drained.
    ``life``: what is wanted of the function, and the versions of its code; null: it is deployed, from the Python path.
``servers``, one row for each server that has not left or expired
    ``life``: the number of its registration; a server that finds another number, or no row, has expired. ``beat_ms``,
    ``watermark_ms``, ``idle``, ``held_by``, ``reason``: as last reported. ``shape``: what it declared; empty before.
``shards``, one row for each shard that is known and not pruned
    ``epoch``: times it was opened (and reset); 0 when all that is known of it is its end. ``position``, ``effective_ms``,
    ``event_ms``: those of its last durable record. ``ended_ms``: when it ended. ``parents``: a list, empty when unknown.
    ``owner``: the server that opened it last, while it holds it. ``gap_accepted``: until the next opening. ``store``: which
    has the state of its keys; empty or null without keyed state.
``windows``, one row for each window that has segments, or had them and is not pruned
    ``state``: open, cut, committed, published or set_aside. ``start_ms``, ``end_ms``: both or (``batches``) neither.
    ``revision``: the one that is computed, or was last. ``attempt``: attempts begun, over all revisions.
    ``owner``: who computes it, while cut or committed. ``retained``: whether it keeps its segments when published, and
    takes late rows. ``published_ms``: when its latest visible revision became visible. ``staging``: set while committed.
    ``files``, ``rows_out``: output of the attempt committed last. ``rows_in``: rows in all segments of its revision.
    ``error``: why it was set aside, is halted while cut or committed, or was skipped when it is published.
``segments``, the files that windows are computed from; ``place``: in order of registration
    ``kind``: window or recompute. ``revision``: the revision that took it in; 0 while its window is open, or while
    it waits for the next one. They go when their window is not retained any more.
``late_segments``, files of the late dataset that may not be visible yet, in order of registration
    Their windows need no row.
``shapes``, one row for each that was ever declared (``coordinator/core/shape.py``)
    ``text``: what rows were like, and how they were cut. They stay: people change them, so that there are few.
``letter_items``, one row for each transaction (``version``) of whose dead letters some are there
    ``count``: how many there were. ``wanted``, ``gone``: which are marked for a redrive, and which are deleted: a
    hexadecimal number with a bit for each ``place``.
``stores``, one row for each store of keyed state that is needed, or whose shards are known
    ``serial``: of the last flush that changed it. ``first``, ``last``: its range of hashes, hexadecimal. ``closed``: its state
    belongs to the stores of children. ``next_due_ms``: when its first timer is due; null without timers.
``state_files``, one row for each file with changes of keyed state that is not deleted
    ``gone_ms``: when the last store stopped needing it. ``needed``: by store, the ranges of hashes (``[first, last]``,
    hexadecimal) for which the store needs it; null: the store's whole range.
``dead_letters``, one row for each that is there
    ``version``, ``place``: its id. ``data`` is the record's payload as it came. ``parked_behind``: ``number/sub`` of the
    letter that it waits behind. ``timer``, ``due_ms``: the timer whose callback failed; empty or null for records.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path
from typing import Final

from mldserver.base.disk import make_folder, make_private_file
from mldserver.errors import (
    InternalError,
    LedgerError,
    LedgerMissing,
    LedgerUnusable,
    LedgerVersionError,
    MldserverError,
    folder_error,
)
from mldserver.ledger.format import FORMAT, OLDEST_FORMAT

BUSY_TIMEOUT_MS: Final = 5000
"""How long a call waits for another server's transaction."""

_APPLICATION_ID: Final = int.from_bytes(b"MLDS", "big")
"""In the database's header: distinguishes a ledger from any other SQLite file."""

TABLES: Final = {
    "totals": ("totals", "id"),
    "servers": ("servers", "server_id"),
    "shards": ("shards", "shard_id"),
    "windows": ("windows", "window_id"),
    "late": ("late_segments", "path"),
    "shapes": ("shapes", "fingerprint"),
    "letters": ("letter_items", "version"),
    "stores": ("stores", "store_id"),
    "state_files": ("state_files", "path"),
}
"""Where the rows of each kind of changes are: the table, and its first column, the key. Their values follow in order."""

JSON_COLUMNS: Final = {"totals": (4, 10), "shards": (1, 5), "windows": (9,), "state_files": (3,)}
"""Which of the values are lists."""

_DDL: Final = """
CREATE TABLE meta (id INTEGER PRIMARY KEY, format INTEGER, pipeline TEXT, created_ms INTEGER);
CREATE TABLE log (version INTEGER PRIMARY KEY, changes BLOB);
CREATE TABLE totals (
    id INTEGER PRIMARY KEY, clock INTEGER, dead_letters INTEGER, lives INTEGER, cut_below_ms INTEGER,
    batch_progress TEXT, ledger_id TEXT, folder TEXT, claims INTEGER, shape TEXT, draining INTEGER
);
CREATE TABLE servers (
    server_id TEXT PRIMARY KEY, life INTEGER, beat_ms INTEGER, watermark_ms INTEGER, idle INTEGER, held_by TEXT,
    reason TEXT, shape TEXT
) WITHOUT ROWID;
CREATE TABLE shards (
    shard_id TEXT PRIMARY KEY, epoch INTEGER, position TEXT, effective_ms INTEGER, event_ms INTEGER,
    ended_ms INTEGER, parents TEXT, owner TEXT, gap_accepted INTEGER
) WITHOUT ROWID;
CREATE TABLE windows (
    window_id TEXT PRIMARY KEY, state TEXT, start_ms INTEGER, end_ms INTEGER, revision INTEGER, attempt INTEGER,
    owner TEXT, retained INTEGER, published_ms INTEGER, staging TEXT, files TEXT, rows_in INTEGER,
    rows_out INTEGER, error TEXT
) WITHOUT ROWID;
CREATE TABLE segments (
    window_id TEXT, place INTEGER, path TEXT, kind TEXT, revision INTEGER, rows INTEGER, bytes INTEGER,
    PRIMARY KEY (window_id, place)
) WITHOUT ROWID;
CREATE TABLE late_segments (
    path TEXT PRIMARY KEY, window_id TEXT, rows INTEGER, bytes INTEGER, start_ms INTEGER, end_ms INTEGER
);
CREATE TABLE shapes (fingerprint TEXT PRIMARY KEY, text TEXT) WITHOUT ROWID;
CREATE TABLE letter_items (version TEXT PRIMARY KEY, count INTEGER, wanted TEXT, gone TEXT) WITHOUT ROWID;
CREATE TABLE dead_letters (
    version INTEGER, place INTEGER, shard_id TEXT, sequence TEXT, sub_sequence INTEGER, partition_key TEXT,
    data BLOB, arrival_ms INTEGER, attempts INTEGER, error TEXT, traceback TEXT, handler TEXT, at_ms INTEGER,
    parked_behind TEXT, handler_version TEXT,
    PRIMARY KEY (version, place)
);
CREATE INDEX dead_letters_by_key ON dead_letters (shard_id, partition_key)
"""
"""The statements that create a ledger of format 6."""

_SINCE_6: Final = """
ALTER TABLE shards ADD COLUMN store TEXT;
CREATE TABLE stores (store_id TEXT PRIMARY KEY, serial INTEGER, first TEXT, last TEXT, closed INTEGER) WITHOUT ROWID;
CREATE TABLE state_files (path TEXT PRIMARY KEY, rows INTEGER, bytes INTEGER, gone_ms INTEGER, needed TEXT)
"""
"""The statements that make it one of format 7. Run in one transaction with the first, or with the first one that writes."""

_TIMERS: Final = """
ALTER TABLE stores ADD COLUMN next_due_ms INTEGER;
ALTER TABLE dead_letters ADD COLUMN timer TEXT;
ALTER TABLE dead_letters ADD COLUMN due_ms INTEGER
"""
"""The statements that give it timers: the first ledgers of format 7 had none."""

_LIFE: Final = "ALTER TABLE totals ADD COLUMN life TEXT"
"""The statement that makes it one of format 8."""

_WAL_TRIES = 100
_WAL_PAUSE_SECONDS = 0.02

_NOT_RESTORED: Final = "Nothing was restored."
_ROLLED_BACK: Final = "The transaction was rolled back."
_DAMAGED: Final = (
    "The ledger is damaged",
    "It is never repaired silently: bring back a backup with `mldserver ledger restore`.",
)
_UNWRITABLE: Final = (
    "The ledger cannot be opened for writing",
    "Check the file, its folder and their permissions.",
)
_FAULTS: Final[dict[int, tuple[str, str]]] = {
    sqlite3.SQLITE_FULL: (
        "The disk that holds the ledger is full",
        "Make room: the next transaction succeeds as soon as there is some.",
    ),
    sqlite3.SQLITE_IOERR: (
        "The disk that holds the ledger failed",
        "Look at the disk and at the system's log.",
    ),
    sqlite3.SQLITE_BUSY: (
        "Another program holds the ledger's write lock",
        "Close tools that have the ledger's file open for writing.",
    ),
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_READONLY: _UNWRITABLE,
    sqlite3.SQLITE_CANTOPEN: _UNWRITABLE,
    sqlite3.SQLITE_PERM: _UNWRITABLE,
}
"""By primary result code: what happened, and what to do about it."""


def connect(
    path: Path, *, pipeline: str, created_ms: int | None, former: str | None = None
) -> sqlite3.Connection:
    """Return a connection to the pipeline's ledger.

    ``created_ms``: the time at which it may be created, None when it must be there. ``former``: the name that it may have
    still; then it must be there too. Raises OperatorError when its folder cannot be made, LedgerVersionError for a newer,
    older or foreign file, LedgerError for a damaged one, or where there is none. The file is then as it was.
    """
    if created_ms is not None:
        try:
            make_folder(path.parent)
        except OSError as error:
            what = f"The folder {path.parent} cannot be made: {error.strerror}."
            raise folder_error(error)(what, path=str(path)) from error
        if former is None:
            # SQLite gives its additional files the same mode. After a failure here SQLite raises below.
            with contextlib.suppress(OSError):
                make_private_file(path)
    if (created_ms is None or former is not None) and not path.exists():
        raise _missing(path)
    with contextlib.ExitStack() as undo:
        try:
            db = sqlite3.connect(path, isolation_level=None)
            undo.callback(db.close)
            db.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
            if _is_new(db, path):
                if created_ms is None or former is not None:
                    raise _missing(path)
                _configure(db, path)
                _create(db, path, pipeline, created_ms)
            _examine(db, path, (pipeline, former or pipeline))
            _configure(db, path)
        except sqlite3.Error as error:
            raise translate(error, path, did="It was left as it is.") from error
        undo.pop_all()
    return db


def copy_whole(path: Path, target: Path) -> None:
    """Copy a ledger, even while its servers run, into one self-contained file.

    Raises LedgerError when the ledger does not exist, or cannot be read or written.
    """
    if not path.exists():
        raise _missing(path)
    target.unlink(missing_ok=True)
    make_private_file(target)
    try:
        with (
            contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source,
            contextlib.closing(sqlite3.connect(target)) as copy,
        ):
            source.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as error:
        raise translate(error, path, did="It was left as it is.") from error


def check_tables(path: Path) -> None:
    """Raise LedgerError unless a copy has the tables of a ledger of a known format, and nothing else.

    A trigger would run with the next change.
    """
    found = "SELECT type, name, sql FROM sqlite_schema ORDER BY type, name"

    def tables(db: sqlite3.Connection) -> list[tuple[str, str, str]]:
        return [(kind, name, " ".join((sql or "").split())) for kind, name, sql in db.execute(found)]

    with contextlib.closing(sqlite3.connect(":memory:")) as made:
        wanted = []
        for statements in (_DDL, _SINCE_6, _TIMERS, _LIFE):
            _run(made, statements)
            wanted.append(tables(made))
    try:
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA trusted_schema = OFF")
            there = tables(db)
    except sqlite3.Error as error:
        raise translate(error, path, did=_NOT_RESTORED) from error
    if not there:
        raise _missing(path)
    if there not in wanted:
        raise LedgerVersionError(
            f"The file has other tables, triggers or views than a ledger of format {FORMAT}.",
            did=_NOT_RESTORED,
            advice="Restore a ledger of another format with the version of mldserver that wrote it. Otherwise the file was "
            "changed: do not use it.",
        )


def pipeline_of(path: Path) -> str | None:
    """Return the name of the pipeline that a ledger's file belongs to.

    None when the file is missing, is damaged or is another kind of file; opening it raises the reason.
    """
    try:
        # Not `connect(path)`, which would make an empty file where there is none.
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as db:
            row = db.execute("SELECT pipeline FROM meta").fetchone()
    except sqlite3.Error:
        return None
    return row[0] if row is not None and isinstance(row[0], str) else None


def _missing(path: Path) -> LedgerMissing:
    return LedgerMissing(
        f"There is no ledger at {path}.",
        advice="Name the output folder of a pipeline that ran.",
        path=str(path),
    )


def _is_new(db: sqlite3.Connection, path: Path) -> bool:
    """Whether there is nothing yet: no file, or one whose creation did not get to its only transaction."""
    # Tables before the mark: who sees another server's tables in between also sees its mark, never the tables alone.
    tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if db.execute("PRAGMA application_id").fetchone()[0] == _APPLICATION_ID:
        return False
    if tables:
        raise LedgerVersionError(
            f"{path} is an SQLite database, but no ledger.",
            advice="Give this server another output folder.",
            path=str(path),
        )
    return True


def _create(db: sqlite3.Connection, path: Path, pipeline: str, now_ms: int) -> None:
    db.execute("BEGIN IMMEDIATE")
    try:
        # Another server may have been here first, between the look and the lock.
        if _is_new(db, path):
            db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            for statements in (_DDL, _SINCE_6, _TIMERS, _LIFE):
                _run(db, statements)
            db.execute("INSERT INTO meta VALUES (1, ?, ?, ?)", (FORMAT, pipeline, now_ms))
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def _run(db: sqlite3.Connection, statements: str) -> None:
    for statement in statements.split(";"):
        db.execute(statement)


def upgrade(db: sqlite3.Connection) -> None:
    """Make an older ledger one of the present format, in the transaction that is open; others stay as they are."""
    (form,) = db.execute("SELECT format FROM meta").fetchone()
    if form == OLDEST_FORMAT:
        _run(db, _SINCE_6)
    if form != FORMAT:
        _run(db, _LIFE)
        db.execute("UPDATE meta SET format = ?", (FORMAT,))
    if not db.execute("SELECT 1 FROM pragma_table_info('stores') WHERE name = 'next_due_ms'").fetchone():
        _run(db, _TIMERS)


def _examine(db: sqlite3.Connection, path: Path, names: tuple[str, ...]) -> None:
    meta = db.execute("SELECT format, pipeline FROM meta").fetchone()
    if meta is None:
        raise damaged("it does not say whose it is", path)
    form, pipeline = meta
    if not OLDEST_FORMAT <= form <= FORMAT:
        raise LedgerVersionError(
            f"The ledger has format {form}; this program knows format {FORMAT}.",
            advice="That format was never released: give this server another output folder."
            if form < FORMAT
            else "Run the version of mldserver that wrote it, or a later one.",
            path=str(path),
        )
    if pipeline not in names:
        raise LedgerVersionError(
            f"The ledger belongs to the pipeline {pipeline!r}, not to {names[0]!r}.",
            advice="Give each pipeline a separate output folder, or the name that it had; a drained one is renamed with"
            " --rename-from (`mldserver help operations`).",
            path=str(path),
        )
    fault = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if fault != "ok":
        # Lines for those who know the file format: no sentence.
        raise damaged("SQLite's check of the file found a fault", path, sqlite=fault)


def _configure(db: sqlite3.Connection, path: Path) -> None:
    db.execute("PRAGMA foreign_keys = ON")
    # A commit returns when its log is on the disk itself: a checkpoint at the daemon depends on it.
    db.execute("PRAGMA synchronous = FULL")
    for left in reversed(range(_WAL_TRIES)):
        try:
            mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            break
        except sqlite3.OperationalError as error:
            # SQLite's busy time-out does not cover the switch: another server makes the same file.
            if not left or error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            time.sleep(_WAL_PAUSE_SECONDS)
    if mode != "wal":
        raise LedgerUnusable(
            f"The file system under {path} cannot hold the ledger: no shared memory for SQLite's WAL.",
            advice="Put the output folder on a local disk.",
            path=str(path),
        )


def translate(error: sqlite3.Error, path: Path, *, did: str = _ROLLED_BACK) -> MldserverError:
    """Return the ledger's own error for one of SQLite's: LedgerError, or InternalError for a broken constraint."""
    # Errors that Python's sqlite3 module raises by itself carry no code.
    code: int | None = getattr(error, "sqlite_errorcode", None)
    where = {"path": str(path), "sqlite": getattr(error, "sqlite_errorname", None)}
    if isinstance(error, sqlite3.IntegrityError):
        return InternalError(
            f"The ledger's rules were broken: {error}.",
            did=did,
            advice="Report this with the log: it is a bug.",
            **where,
        )
    what, advice = _FAULTS.get(code & 0xFF if code is not None else -1, ("SQLite refused", ""))
    kind = LedgerUnusable if (what, advice) == _DAMAGED else LedgerError
    return kind(f"{what}: {error}.", did=did, advice=advice, **where)


def damaged(fault: str, path: Path, *, sqlite: str | None = None) -> LedgerError:
    """Return the error for a ledger whose content cannot be: ``fault`` says why, ``sqlite`` in SQLite's words."""
    what, advice = _DAMAGED
    return LedgerUnusable(f"{what}: {fault}.", advice=advice, path=str(path), sqlite=sqlite)
