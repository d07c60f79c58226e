"""The ledger's file: one SQLite database for one pipeline, format 6.

The database is in WAL mode and carries ``APPLICATION_ID`` in its header. All times are milliseconds since the Unix
epoch (UTC). Each row is one of a ledger's book (``book.py``), as ``format.py`` makes plain values of it: lists, and positions
(``["number", sub]``: they have 21 to 60 digits), are JSON. The rules are the program's alone, so that the file has no
constraints but its keys. A file without tables is a ledger that was never created: creation is one transaction. Formats
1 to 5 were never released.

``meta``, exactly one row (id 1)
    ``format``, ``pipeline``: readable in every format to come, so that an older program can say what it found.
    ``created_ms``.
``log``, one row for each of the latest transactions that changed anything
    ``version``: its number. ``changes``: what it wrote, as JSON: from these other servers learn what they do not know
    yet. Who is further behind reads the tables, which hold all of it.
``totals``, at most one row (id 1): what there is once in a ledger
    ``clock``: next free value of the merge clock. ``dead_letters``: how many there are. ``lives``: how often a server has
    registered. ``cut_below_ms``: the latest end of all pruned windows; an event-time window that ends at or before it
    and has no row was cut. ``batch_progress``: where the open ``batches`` window stands (number, rows, opened at).
    ``ledger_id``: random, in the names of its files; a restored ledger has another. ``folder``: the id of the output
    folder that claimed it (``owner.json`` there). ``claims``: how often a server has claimed it for that folder.
    ``shape``: the fingerprint of the one that was declared last. ``draining``: servers are to drain, or have.
``servers``, one row for each server that lives, or is not buried yet
    ``life``: which registration it is; a server that finds another, or no row, was buried. ``beat_ms``,
    ``watermark_ms``, ``idle``, ``held_by``, ``reason``: as it last told. ``shape``: what it declared; empty before.
``shards``, one row for each shard that is known and not pruned
    ``epoch``: times it was opened (and reset); 0 when all that is known of it is its end. ``position``, ``effective_ms``,
    ``event_ms``: those of its last durable record. ``ended_ms``: when it ended. ``parents``: a list, empty when unknown.
    ``owner``: the server that opened it last, while it holds it. ``gap_accepted``: until the next opening.
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
    ``count``: how many there were. ``wanted``, ``gone``: which are to be redriven, and which went: a hexadecimal number
    with a bit for each ``place``.
``dead_letters``, one row for each that is there
    ``version``, ``place``: its id. ``data`` is the record's payload as it came. ``parked_behind``: ``number/sub`` of the
    letter that it waits behind.
"""

from __future__ import annotations

from typing import Final

__all__ = ["APPLICATION_ID", "DDL", "JSON_COLUMNS", "TABLES"]

APPLICATION_ID: Final = int.from_bytes(b"MLDS", "big")
"""Stands in the database's header: what tells a ledger from any other SQLite file."""

TABLES: Final = {
    "totals": ("totals", "id"),
    "servers": ("servers", "server_id"),
    "shards": ("shards", "shard_id"),
    "windows": ("windows", "window_id"),
    "late": ("late_segments", "path"),
    "shapes": ("shapes", "fingerprint"),
    "letters": ("letter_items", "version"),
}
"""Where the rows of each kind of changes are: the table, and its first column, the key. Their values follow in order."""

JSON_COLUMNS: Final = {"totals": (4,), "shards": (1, 5), "windows": (9,)}
"""Which of the values are lists."""

DDL: Final = """
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
"""The statements that create a ledger, run in one transaction."""
