"""Flushes in the ledger's file: weighed as a whole, then written as a whole, inside a caller's transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldserver.errors import InternalError
from mldserver.state import members, rows, sqlite_batches, sqlite_letters
from mldserver.state.ledger import FlushResult, SegmentKind, WindowState

if TYPE_CHECKING:
    import sqlite3

    from mldserver.state.ledger import Flush, PositionUpdate, Segment

__all__ = ["weigh", "write"]


def weigh(db: sqlite3.Connection, flush: Flush) -> FlushResult:
    """Return every reason to refuse a flush; none: it may be written."""
    return FlushResult(
        lost_shards=frozenset(update.shard_id for update in flush.positions if not _goes_on(db, update)),
        cut_windows=frozenset(
            each.window_id for each in flush.segments if each.kind is SegmentKind.WINDOW and _closed(db, each)
        ),
        expired_windows=frozenset(
            each.window_id
            for each in flush.segments
            if each.kind is SegmentKind.RECOMPUTE and not _retained(db, each)
        ),
        gone_letters=sqlite_letters.missing(db, flush.redriven),
        batch_progress=sqlite_batches.no_room(db, flush.batches),
    )


def write(db: sqlite3.Connection, flush: Flush, now_ms: int) -> None:
    """Write a flush that nothing speaks against. Raises InternalError for what the contract forbids."""
    for update in flush.positions:
        _move(db, update)
        if update.ended:
            members.end_shard(db, update.shard_id, now_ms)
    for segment in flush.segments:
        _ADD[segment.kind](db, segment)
    sqlite_letters.remove(db, flush.redriven)
    sqlite_letters.store(db, flush.dead_letters)
    db.execute("UPDATE meta SET clock = max(clock, ?)", (flush.clock,))
    if flush.batches is not None:
        sqlite_batches.move_on(db, flush.batches)


def _goes_on(db: sqlite3.Connection, update: PositionUpdate) -> bool:
    """Whether an update comes from the shard's latest epoch and goes on from where the shard stands.

    Nobody moves a shard that was pruned.
    """
    row = db.execute(
        "SELECT epoch, sequence, sub_sequence FROM shards WHERE shard_id = ?", (update.shard_id,)
    ).fetchone()
    return (
        row is not None and bool(row["epoch"] == update.epoch) and rows.read_sequence(row) == update.previous
    )


def _closed(db: sqlite3.Connection, segment: Segment) -> bool:
    """Whether a window takes no more rows. Its own row says so; without one, what was pruned does."""
    row = db.execute("SELECT state FROM windows WHERE window_id = ?", (segment.window_id,)).fetchone()
    if row is not None:
        return bool(row["state"] != WindowState.OPEN)
    if segment.end_ms is None:
        return False
    cut_below = db.execute("SELECT cut_below_ms FROM meta").fetchone()[0]
    return cut_below is not None and segment.end_ms <= cut_below


def _retained(db: sqlite3.Connection, segment: Segment) -> bool:
    """Whether a window takes late rows for a next revision: one that was skipped does not."""
    row = db.execute(
        "SELECT retained AND (state <> 'published' OR error IS NULL) FROM windows WHERE window_id = ?",
        (segment.window_id,),
    ).fetchone()
    return row is not None and bool(row[0])


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
        "INSERT OR IGNORE INTO windows (window_id, state, start_ms, end_ms, changed)"
        " VALUES (?, 'open', ?, ?, (SELECT version FROM meta))",
        (segment.window_id, segment.start_ms, segment.end_ms),
    )
    _insert(db, segment, adds=segment.rows)


def _add_pending(db: sqlite3.Connection, segment: Segment) -> None:
    """Add a segment to what waits for the next revision of a window that was cut."""
    row = db.execute("SELECT state FROM windows WHERE window_id = ?", (segment.window_id,)).fetchone()
    if row["state"] == WindowState.OPEN:
        raise InternalError(
            f"Window {segment.window_id} is open: {segment.path} is no segment for a later revision.",
            did="The flush was rolled back.",
            advice="Report this with the log: it is a bug.",
            window=segment.window_id,
        )
    _insert(db, segment, adds=0)


def _insert(db: sqlite3.Connection, segment: Segment, *, adds: int) -> None:
    db.execute(
        "INSERT INTO segments (path, window_id, kind, rows, bytes) VALUES (?, ?, ?, ?, ?)",
        (segment.path, segment.window_id, segment.kind, segment.rows, segment.bytes),
    )
    # IS, not =, compares the bounds of ``batches``, which are NULL.
    matching = db.execute(
        "UPDATE windows SET rows_in = rows_in + ?, changed = (SELECT version FROM meta)"
        " WHERE window_id = ? AND start_ms IS ? AND end_ms IS ?",
        (adds, segment.window_id, segment.start_ms, segment.end_ms),
    ).rowcount
    if not matching:
        raise InternalError(
            f"Window {segment.window_id} has other bounds than those of {segment.path}.",
            did="The flush was rolled back.",
            advice="A changed window size needs an output folder of its own.",
            window=segment.window_id,
        )


def _add_late(db: sqlite3.Connection, segment: Segment) -> None:
    db.execute(
        "INSERT INTO late_segments (path, window_id, start_ms, end_ms, rows, bytes) VALUES (?, ?, ?, ?, ?, ?)",
        (segment.path, segment.window_id, segment.start_ms, segment.end_ms, segment.rows, segment.bytes),
    )


_ADD = {SegmentKind.WINDOW: _add, SegmentKind.RECOMPUTE: _add_pending, SegmentKind.LATE: _add_late}
