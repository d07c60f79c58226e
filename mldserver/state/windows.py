"""Windows in the ledger's file: their life after the rows, step by step. Statements inside a caller's transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldserver.state import rows, sqlite_batches

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Mapping

    from mldserver.state.ledger import Commit, Decision, Segment, WindowEntry

__all__ = [
    "adopt",
    "begin_anew",
    "begin_attempts",
    "commit",
    "cut",
    "decide",
    "expire",
    "halt",
    "let_go",
    "prune",
    "published",
    "set_aside",
]

_LAST_MS = 2**63 - 1

_DECIDED: dict[Decision, str] = {
    "retry": "state = iif(state = 'set_aside', 'cut', state), error = NULL WHERE state <> 'published'",
    "set_aside": "state = 'set_aside', owner = NULL WHERE state = 'cut'",
    "skip": "state = 'published', owner = NULL, published_ms = :now_ms WHERE state IN ('cut', 'set_aside')",
}
"""What becomes of a window that has an error."""


def cut(db: sqlite3.Connection, window_ids: Iterable[str], server_id: str) -> tuple[WindowEntry, ...]:
    """Fix the segments of windows that are open, or published with more waiting; return those, in order."""
    entries = tuple(_cut_entry(db, each) for each in window_ids if _cut(db, each, server_id))
    sqlite_batches.go_behind(db, (entry.window_id for entry in entries if entry.end_ms is None))
    return entries


def _cut(db: sqlite3.Connection, window_id: str, server_id: str) -> bool:
    return bool(
        db.execute(
            "UPDATE windows SET state = 'cut', owner = ?, revision = revision + (state <> 'open'),"
            " changed = (SELECT version FROM meta) WHERE window_id = ? AND (state = 'open' OR state = 'published'"
            " AND EXISTS (SELECT 1 FROM segments AS s WHERE s.window_id = windows.window_id AND s.revision = 0))",
            (server_id, window_id),
        ).rowcount
    )


def _cut_entry(db: sqlite3.Connection, window_id: str) -> WindowEntry:
    _take_in(db, window_id)
    return _entry(db, window_id)


def _take_in(db: sqlite3.Connection, window_id: str) -> None:
    """Make what waits part of the window's revision."""
    db.execute(
        "UPDATE segments SET revision = (SELECT revision FROM windows WHERE windows.window_id = ?1)"
        " WHERE window_id = ?1 AND revision = 0",
        (window_id,),
    )
    db.execute(
        "UPDATE windows SET rows_in = (SELECT sum(rows) FROM segments WHERE segments.window_id = ?1)"
        " WHERE window_id = ?1",
        (window_id,),
    )


def _entry(db: sqlite3.Connection, window_id: str) -> WindowEntry:
    entry = rows.read_window(db, window_id)
    assert entry is not None, "the caller's transaction has just written it"
    return entry


def adopt(db: sqlite3.Connection, server_id: str) -> tuple[WindowEntry, ...]:
    """Own every window that is cut or committed and has no owner, oldest first."""
    found = db.execute(
        "SELECT window_id FROM windows WHERE state IN ('cut', 'committed') AND owner IS NULL"
        " ORDER BY start_ms, window_id"
    )
    orphans = [row["window_id"] for row in found]
    db.executemany(
        "UPDATE windows SET owner = ?, changed = (SELECT version FROM meta) WHERE window_id = ?",
        [(server_id, each) for each in orphans],
    )
    return tuple(_entry(db, each) for each in orphans)


def begin_attempts(db: sqlite3.Connection, window_ids: Iterable[str], server_id: str) -> dict[str, int]:
    """Count an attempt at each window that is cut and this server's; return their numbers."""
    begun: dict[str, int] = {}
    for window_id in window_ids:
        row = db.execute(
            "UPDATE windows SET attempt = attempt + 1, changed = (SELECT version FROM meta)"
            " WHERE window_id = ? AND state = 'cut' AND owner = ? RETURNING attempt",
            (window_id, server_id),
        ).fetchone()
        if row is not None:
            begun[window_id] = row["attempt"]
    return begun


def commit(db: sqlite3.Connection, commits: Iterable[Commit], server_id: str) -> frozenset[str]:
    """Make latest attempts at this server's cut windows count; return the windows."""
    return frozenset(
        each.window_id
        for each in commits
        if db.execute(
            "UPDATE windows SET state = 'committed', staging = ?, files = ?, rows_out = ?, error = NULL,"
            " changed = (SELECT version FROM meta)"
            " WHERE window_id = ? AND state = 'cut' AND owner = ? AND attempt = ?",
            (
                each.staging,
                rows.names_text(each.files),
                each.rows_out,
                each.window_id,
                server_id,
                each.attempt,
            ),
        ).rowcount
    )


def published(
    db: sqlite3.Connection, attempts: Mapping[str, int], server_id: str, *, retain: bool, now_ms: int
) -> tuple[Segment, ...]:
    """Note that outputs of this server's attempts are visible; return the segments of windows not retained."""
    shown = [
        window_id
        for window_id, attempt in attempts.items()
        if db.execute(
            "UPDATE windows SET state = 'published', owner = NULL, staging = NULL, error = NULL, published_ms = ?,"
            " changed = (SELECT version FROM meta)"
            " WHERE window_id = ? AND state = 'committed' AND owner = ? AND attempt = ?",
            (now_ms, window_id, server_id, attempt),
        ).rowcount
    ]
    if retain:
        return ()
    return tuple(free for window_id in shown for free in _let_go(db, window_id))


def _let_go(db: sqlite3.Connection, window_id: str) -> tuple[Segment, ...]:
    """Stop retaining a published window; return its segments. One with segments that wait (revision 0) stays."""
    done = db.execute(
        "UPDATE windows SET retained = 0, changed = (SELECT version FROM meta) WHERE window_id = ?"
        " AND NOT EXISTS (SELECT 1 FROM segments AS s WHERE s.window_id = windows.window_id AND s.revision = 0)",
        (window_id,),
    ).rowcount
    if not done:
        return ()
    free = _entry(db, window_id).segments
    db.execute("DELETE FROM segments WHERE window_id = ?", (window_id,))
    return free


def let_go(db: sqlite3.Connection, window_ids: Iterable[str]) -> None:
    """Stop retaining those of these windows that are published."""
    for window_id in window_ids:
        row = db.execute("SELECT state FROM windows WHERE window_id = ?", (window_id,)).fetchone()
        if row is not None and row["state"] == "published":
            _let_go(db, window_id)


def begin_anew(db: sqlite3.Connection, size_ms: int, now_ms: int) -> None:
    """Let windows of this size begin at or after the end of every one that has begun."""
    ends = db.execute(
        "SELECT max(end_ms) FROM (SELECT end_ms FROM windows WHERE start_ms <= ?"
        " UNION ALL SELECT cut_below_ms FROM meta)",
        (now_ms,),
    ).fetchone()
    if ends[0] is not None:
        db.execute("UPDATE meta SET cut_below_ms = ?", (-(-ends[0] // size_ms) * size_ms,))


def expire(
    db: sqlite3.Connection, *, published_before_ms: int, keep_bytes: int, limit: int
) -> tuple[Segment, ...]:
    """Stop retaining windows by age, then by size; return the segments to delete."""
    kept: int = db.execute("SELECT retained_bytes FROM meta").fetchone()[0]
    # A bound in the index, not a condition on each row: most windows are neither old nor in the way.
    before_ms = published_before_ms if kept <= keep_bytes else _LAST_MS
    found = db.execute(
        "SELECT window_id, published_ms FROM windows WHERE state = 'published' AND retained = 1 AND published_ms < ?"
        " AND NOT EXISTS (SELECT 1 FROM segments AS s WHERE s.window_id = windows.window_id AND s.revision = 0)"
        " ORDER BY published_ms, window_id LIMIT ?",
        (before_ms, limit),
    ).fetchall()
    gone: list[Segment] = []
    for row in found:
        if row["published_ms"] >= published_before_ms and kept <= keep_bytes:
            break
        free = _let_go(db, row["window_id"])
        kept -= sum(each.bytes for each in free)
        gone.extend(free)
    return tuple(gone)


def set_aside(db: sqlite3.Connection, window_id: str, error: str, server_id: str) -> None:
    """Put a cut window of this server aside."""
    db.execute(
        "UPDATE windows SET state = 'set_aside', owner = NULL, error = ?, changed = (SELECT version FROM meta)"
        " WHERE window_id = ? AND state = 'cut' AND owner = ?",
        (rows.storable(error), window_id, server_id),
    )


def halt(db: sqlite3.Connection, window_id: str, error: str, server_id: str, *, first: bool) -> bool:
    """Keep why a window of this server is halted; if not for the first time, only where there is an error still."""
    return bool(
        db.execute(
            "UPDATE windows SET error = ?, changed = (SELECT version FROM meta)"
            " WHERE window_id = ? AND state IN ('cut', 'committed') AND owner = ? AND (? OR error IS NOT NULL)",
            (rows.storable(error), window_id, server_id, first),
        ).rowcount
    )


def decide(db: sqlite3.Connection, window_id: str, decision: Decision, now_ms: int) -> bool:
    """Do what an operator decides about a window that is halted or set aside."""
    done = db.execute(
        f"UPDATE windows SET changed = (SELECT version FROM meta), {_DECIDED[decision]}"  # noqa: S608  # our own text
        " AND window_id = :window_id AND error IS NOT NULL",
        {"window_id": window_id, "now_ms": now_ms},
    ).rowcount
    if done and decision == "skip":
        _take_in(db, window_id)
    return bool(done)


def prune(db: sqlite3.Connection, *, before_ms: int, limit: int) -> int:
    """Forget windows that were published and are not retained; return how many."""
    over = db.execute(
        "SELECT window_id, end_ms, changed FROM windows WHERE state = 'published' AND retained = 0"
        " AND published_ms < ?1 AND (end_ms IS NULL OR end_ms <= ?1) ORDER BY published_ms, window_id LIMIT ?2",
        (before_ms, limit),
    ).fetchall()
    db.executemany("DELETE FROM windows WHERE window_id = ?", [(row["window_id"],) for row in over])
    sqlite_batches.go_behind(db, (row["window_id"] for row in over if row["end_ms"] is None))
    if over:
        changed = max(row["changed"] for row in over)
        db.execute("UPDATE meta SET pruned_version = max(pruned_version, ?)", (changed,))
    end_ms = max((row["end_ms"] for row in over if row["end_ms"] is not None), default=None)
    if end_ms is not None:
        db.execute("UPDATE meta SET cut_below_ms = max(COALESCE(cut_below_ms, ?1), ?1)", (end_ms,))
    return len(over)
