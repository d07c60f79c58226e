"""The ledger's file format: one SQLite database for one pipeline, format 1.

The database is in WAL mode and carries ``APPLICATION_ID`` in its header. All times are milliseconds since the Unix
epoch (UTC). Sequence numbers have 21 to 60 digits, more than an INTEGER holds: they are TEXT in decimal digits and
are compared as integers by the program, never by SQL. Lists are JSON arrays of strings. A file without tables is a
ledger that was never created: creation is one transaction.

``meta``, exactly one row (id 1)
    ``format``, ``pipeline``: readable in every format to come, so that an older program can say what it found.
    ``created_ms``. ``clock``: next free value of the merge clock; never falls. ``cut_below_ms``: the latest end of
    all pruned windows; never falls; an event-time window that ends at or before it and has no row was cut.
    ``batch_number``, ``batch_rows``, ``batch_opened_ms``: where the open ``batches`` window stands.
``shards``, one row for each shard that is known and not pruned
    ``epoch``: times it was opened; 0 when it is only known from a list; never falls. ``sequence``,
    ``sub_sequence``: its position, both or neither; never falls. ``effective_ms``, ``event_ms``: never fall.
    ``ended_ms``: when it ended; once set it stays as it is. ``parents``: a list, empty when unknown.
``windows``, one row for each window that has segments, or had them and is not pruned
    ``state``: open, cut, committed, published or set_aside. ``start_ms``, ``end_ms``: both or (``batches``) neither.
    ``attempt``: attempts begun. ``rows_in``: rows in all its segments. ``files``, ``rows_out``: output of the
    committed attempt. ``staging``: set while committed, and only then. ``published_ms``: set when published, and
    only then. ``error``: why it was set aside.
``segments``, the files that windows are computed from, in order of registration
    Rows are added while their window is open, and go when it is published.
``late_segments``, files of the late dataset that may not be visible yet
    Their windows need no row.
``dead_letters``, in order of storage
    ``data`` is the record's payload as it came.
"""

from __future__ import annotations

from typing import Final

__all__ = ["APPLICATION_ID", "DDL", "FORMAT"]

FORMAT: Final = 1

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
        batch_opened_ms INTEGER
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
        parents      TEXT NOT NULL DEFAULT '[]'
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
        staging      TEXT CHECK ((staging IS NOT NULL) = (state = 'committed')),
        files        TEXT NOT NULL DEFAULT '[]',
        rows_in      INTEGER NOT NULL DEFAULT 0,
        rows_out     INTEGER NOT NULL DEFAULT 0,
        error        TEXT,
        published_ms INTEGER CHECK ((published_ms IS NOT NULL) = (state = 'published'))
    )
    """,
    """
    CREATE TABLE segments (
        id        INTEGER PRIMARY KEY,
        path      TEXT NOT NULL UNIQUE,
        window_id TEXT NOT NULL REFERENCES windows (window_id),
        rows      INTEGER NOT NULL,
        bytes     INTEGER NOT NULL
    )
    """,
    "CREATE INDEX segments_by_window ON segments (window_id)",
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
        id            INTEGER PRIMARY KEY,
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
        at_ms         INTEGER NOT NULL
    )
    """,
)
"""The statements that create a ledger, run in one transaction."""
