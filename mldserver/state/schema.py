"""The ledger's file format: one SQLite database for one pipeline, format 5.

The database is in WAL mode and carries ``APPLICATION_ID`` in its header. All times are milliseconds since the Unix
epoch (UTC). Sequence numbers have 21 to 60 digits, more than an INTEGER holds: they are TEXT in decimal digits and
are compared as integers by the program, never by SQL. Lists are JSON arrays of strings. A file without tables is a
ledger that was never created: creation is one transaction. Formats 1 to 4 were never released.

``meta``, exactly one row (id 1)
    ``format``, ``pipeline``: readable in every format to come, so that an older program can say what it found.
    ``created_ms``. ``clock``: next free value of the merge clock; never falls. ``cut_below_ms``: the latest end of
    all pruned windows, which lies in the past; never falls; an event-time window that ends at or before it and has no row was cut.
    ``batch_number``, ``batch_rows``, ``batch_opened_ms``: where the open ``batches`` window stands; the number
    never falls, and lies behind that of every one that was cut. ``dead_letters``: how many there are. ``lives``: how often a server has registered.
    ``version``: raised by each transaction that writes. ``pruned_version``: the latest ``changed`` of all pruned
    windows: who has read less must read everything. ``retained_bytes``: of all segments of published windows that
    are retained; kept by triggers. ``ledger_id``: random, in the names of its files; a restored ledger has another.
    ``folder``: the id of the output folder that claimed it (``owner.json`` there); NULL before.
    ``claims``: how often a server has claimed it for that folder. ``shape``: the fingerprint of the one that was
    declared last. ``draining``: servers are to drain, or have.
``servers``, one row for each server that lives, or is not buried yet
    ``life``: which registration it is; a server that finds another, or no row, was buried. ``beat_ms``,
    ``watermark_ms``, ``idle``, ``held_by``, ``reason``: as it last told. ``shape``: what it declared; empty before.
``shards``, one row for each shard that is known and not pruned
    ``epoch``: times it was opened (and reset); 0 when it is only known from a list; never falls. ``sequence``,
    ``sub_sequence``: its position, both or neither; never falls but by a reset. ``effective_ms``, ``event_ms``:
    likewise. ``ended_ms``: when it ended; once set it stays as it is. ``parents``: a list, empty when unknown.
    ``owner``: the server that opened it last, while it holds it. ``gap_accepted``: until the next opening.
``windows``, one row for each window that has segments, or had them and is not pruned
    ``state``: open, cut, committed, published or set_aside. ``start_ms``, ``end_ms``: both or (``batches``) neither.
    ``revision``: the one that is computed, or was last. ``attempt``: attempts begun, over all revisions.
    ``owner``: who computes it, while cut or committed. ``rows_in``: rows in all segments of its revision.
    ``files``, ``rows_out``: output of the attempt committed last. ``staging``: set while committed, and only then.
    ``published_ms``: when its latest visible revision became visible. ``error``: why it was set aside, is halted
    while cut or committed, or was skipped when it is published.
    ``retained``: whether it keeps its segments when published, and takes late rows. ``changed``: the ``version``
    that wrote it last.
``segments``, the files that windows are computed from, in order of registration
    ``kind``: window or recompute. ``revision``: the revision that took it in; 0 while its window is open, or while
    it waits for the next one. They go when their window is not retained any more.
``late_segments``, files of the late dataset that may not be visible yet
    Their windows need no row.
``shapes``, one row for each that was ever declared (``coordinator/core/shape.py``)
    ``text``: what rows were like, and how they were cut. They stay: people change them, so that there are few.
``dead_letters``, in order of storage
    ``data`` is the record's payload as it came. ``parked_behind``: ``number/sub`` of the letter that it waits behind.
    ``wanted``: it is to be redriven. Ids are never given again, so that nobody takes one letter for another.
"""

from __future__ import annotations

import uuid
from typing import Final

__all__ = ["APPLICATION_ID", "DDL", "FORMAT", "new_ledger_id"]

FORMAT: Final = 5

APPLICATION_ID: Final = int.from_bytes(b"MLDS", "big")
"""Stands in the database's header: what tells a ledger from any other SQLite file."""

DDL: Final = (
    """
    CREATE TABLE meta (
        id              INTEGER PRIMARY KEY CHECK (id = 1),
        format          INTEGER NOT NULL,
        pipeline        TEXT NOT NULL,
        created_ms      INTEGER NOT NULL,
        clock           INTEGER NOT NULL DEFAULT 0,
        cut_below_ms    INTEGER,
        batch_number    INTEGER NOT NULL DEFAULT 0,
        batch_rows      INTEGER NOT NULL DEFAULT 0,
        batch_opened_ms INTEGER,
        dead_letters    INTEGER NOT NULL DEFAULT 0,
        lives           INTEGER NOT NULL DEFAULT 0,
        version         INTEGER NOT NULL DEFAULT 0,
        pruned_version  INTEGER NOT NULL DEFAULT 0,
        retained_bytes  INTEGER NOT NULL DEFAULT 0,
        ledger_id       TEXT NOT NULL,
        folder          TEXT,
        claims          INTEGER NOT NULL DEFAULT 0,
        shape           TEXT NOT NULL DEFAULT '',
        draining        INTEGER NOT NULL DEFAULT 0
    )
    """,
    """
    CREATE TABLE servers (
        server_id    TEXT PRIMARY KEY NOT NULL,
        life         INTEGER NOT NULL,
        beat_ms      INTEGER NOT NULL,
        watermark_ms INTEGER,
        idle         INTEGER NOT NULL DEFAULT 0,
        held_by      TEXT,
        reason       TEXT NOT NULL DEFAULT '',
        shape        TEXT NOT NULL DEFAULT ''
    )
    """,
    """
    CREATE TABLE shapes (
        fingerprint TEXT PRIMARY KEY NOT NULL,
        text        TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE shards (
        shard_id     TEXT PRIMARY KEY NOT NULL,
        epoch        INTEGER NOT NULL DEFAULT 0,
        sequence     TEXT CHECK (sequence NOT GLOB '*[^0-9]*' AND sequence <> ''),
        sub_sequence INTEGER CHECK ((sub_sequence IS NULL) = (sequence IS NULL)),
        effective_ms INTEGER,
        event_ms     INTEGER,
        ended_ms     INTEGER,
        parents      TEXT NOT NULL DEFAULT '[]',
        owner        TEXT,
        gap_accepted INTEGER NOT NULL DEFAULT 0
    )
    """,
    """
    CREATE TABLE windows (
        window_id    TEXT PRIMARY KEY NOT NULL,
        state        TEXT NOT NULL CHECK (state IN ('open', 'cut', 'committed', 'published', 'set_aside')),
        start_ms     INTEGER,
        end_ms       INTEGER CHECK ((end_ms IS NULL) = (start_ms IS NULL)),
        revision     INTEGER NOT NULL DEFAULT 1,
        attempt      INTEGER NOT NULL DEFAULT 0,
        owner        TEXT CHECK (owner IS NULL OR state IN ('cut', 'committed')),
        staging      TEXT CHECK ((staging IS NOT NULL) = (state = 'committed')),
        files        TEXT NOT NULL DEFAULT '[]',
        rows_in      INTEGER NOT NULL DEFAULT 0,
        rows_out     INTEGER NOT NULL DEFAULT 0,
        error        TEXT CHECK (
            error IS NOT NULL AND state <> 'open' OR error IS NULL AND state <> 'set_aside'
        ),
        published_ms INTEGER CHECK (published_ms IS NOT NULL OR state <> 'published'),
        retained     INTEGER NOT NULL DEFAULT 1,
        changed      INTEGER NOT NULL
    )
    """,
    "CREATE INDEX windows_by_change ON windows (changed)",
    "CREATE INDEX windows_to_finish ON windows (owner) WHERE state IN ('cut', 'committed')",
    "CREATE INDEX windows_by_age ON windows (retained, published_ms, window_id) WHERE state = 'published'",
    """
    CREATE TABLE segments (
        id        INTEGER PRIMARY KEY,
        path      TEXT NOT NULL UNIQUE,
        window_id TEXT NOT NULL REFERENCES windows (window_id),
        kind      TEXT NOT NULL CHECK (kind IN ('window', 'recompute')),
        revision  INTEGER NOT NULL DEFAULT 0,
        rows      INTEGER NOT NULL,
        bytes     INTEGER NOT NULL
    )
    """,
    "CREATE INDEX segments_by_window ON segments (window_id, revision)",
    """
    CREATE TRIGGER window_retained_bytes AFTER UPDATE OF state, retained ON windows
    WHEN (OLD.state = 'published' AND OLD.retained) <> (NEW.state = 'published' AND NEW.retained)
    BEGIN
        UPDATE meta SET retained_bytes = retained_bytes
            + CASE WHEN NEW.state = 'published' AND NEW.retained THEN 1 ELSE -1 END
            * (SELECT COALESCE(sum(bytes), 0) FROM segments WHERE window_id = NEW.window_id);
    END
    """,
    """
    CREATE TRIGGER segment_retained_bytes AFTER INSERT ON segments
    WHEN EXISTS (
        SELECT 1 FROM windows WHERE window_id = NEW.window_id AND state = 'published' AND retained
    )
    BEGIN
        UPDATE meta SET retained_bytes = retained_bytes + NEW.bytes;
    END
    """,
    """
    CREATE TABLE late_segments (
        id        INTEGER PRIMARY KEY,
        path      TEXT NOT NULL UNIQUE,
        window_id TEXT NOT NULL,
        start_ms  INTEGER,
        end_ms    INTEGER,
        rows      INTEGER NOT NULL,
        bytes     INTEGER NOT NULL
    )
    """,
    """
    CREATE TABLE dead_letters (
        id            INTEGER PRIMARY KEY AUTOINCREMENT,
        shard_id      TEXT NOT NULL,
        sequence      TEXT NOT NULL CHECK (sequence NOT GLOB '*[^0-9]*' AND sequence <> ''),
        sub_sequence  INTEGER NOT NULL,
        partition_key TEXT,
        data          BLOB NOT NULL,
        arrival_ms    INTEGER,
        attempts      INTEGER NOT NULL,
        error         TEXT NOT NULL,
        traceback     TEXT NOT NULL,
        handler       TEXT NOT NULL,
        at_ms         INTEGER NOT NULL,
        parked_behind TEXT,
        handler_version TEXT NOT NULL DEFAULT '',
        wanted        INTEGER NOT NULL DEFAULT 0
    )
    """,
    "CREATE INDEX dead_letters_by_key ON dead_letters (shard_id, partition_key)",
    "CREATE INDEX dead_letters_wanted ON dead_letters (id) WHERE wanted",
)
"""The statements that create a ledger, run in one transaction."""


def new_ledger_id() -> str:
    """Return eight hexadecimal digits that no other ledger has: they stand in the names of the files that it registers."""
    return uuid.uuid4().hex[:8]
