"""Servers and shards in the ledger's file: who lives, who holds what. Statements inside a caller's transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldserver.errors import InternalError, ServerBuried
from mldserver.state import rows, windows
from mldserver.state.schema import new_ledger_id

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Mapping

    from mldserver.state.ledger import ServerState, ShardState
    from mldserver.state.shapes import ShapeChange

__all__ = [
    "accept_gap",
    "beat",
    "bury",
    "claim",
    "declare",
    "end_shard",
    "enter",
    "know_shard",
    "leave",
    "open_shard",
    "prune",
    "release_shard",
    "require",
    "reset",
]


def enter(db: sqlite3.Connection, server_id: str, now_ms: int) -> int:
    """Register a server, burying who had its id before, and return the life that it begins."""
    _release(db, server_id)
    life: int = db.execute("UPDATE meta SET lives = lives + 1 RETURNING lives").fetchone()[0]
    db.execute(
        "INSERT OR REPLACE INTO servers (server_id, life, beat_ms) VALUES (?, ?, ?)",
        (server_id, life, now_ms),
    )
    return life


def require(db: sqlite3.Connection, server_id: str, life: int) -> None:
    """Raise ServerBuried unless the server still lives this life."""
    if not _lives(db, server_id, life):
        raise ServerBuried(
            f"Server {server_id} is not registered any more: another took it for dead, has its id,"
            " or has claimed the ledger anew (--new-ledger).",
            did="Nothing was written.",
            advice="It must start afresh; if it hung for long, look at the machine, or raise the time-out.",
            server=server_id,
        )


def _lives(db: sqlite3.Connection, server_id: str, life: int) -> bool:
    found = db.execute("SELECT 1 FROM servers WHERE server_id = ? AND life = ?", (server_id, life))
    return found.fetchone() is not None


def beat(db: sqlite3.Connection, server_id: str, told: ServerState) -> None:
    """Keep what a server tells of itself. Raises InternalError when it tells of another."""
    if told.server_id != server_id:
        raise InternalError(f"Server {server_id} told of {told.server_id}.", server=server_id)
    db.execute(
        "UPDATE servers SET beat_ms = ?, watermark_ms = ?, idle = ?, held_by = ?, reason = ? WHERE server_id = ?",
        (told.beat_ms, told.watermark_ms, told.idle, told.held_by, told.reason, told.server_id),
    )


def declare(db: sqlite3.Connection, server_id: str, change: ShapeChange, version: int, now_ms: int) -> bool:
    """Note a server's shape. One that is not the pipeline's takes its place, if nobody wrote since ``version``."""
    present, written = db.execute("SELECT shape, version FROM meta").fetchone()
    # The transaction has a version of its own already.
    if change.fingerprint != present and written != version + 1:
        return False
    db.execute("UPDATE servers SET shape = ? WHERE server_id = ?", (change.fingerprint, server_id))
    db.execute("INSERT OR IGNORE INTO shapes VALUES (?, ?)", (change.fingerprint, change.text))
    db.execute(
        # A drain is over once nobody is left who ran before: others that are just starting, too, have declared nothing.
        "UPDATE meta SET shape = ?, draining = draining AND EXISTS"
        " (SELECT 1 FROM servers WHERE server_id <> ? AND shape <> '')",
        (change.fingerprint, server_id),
    )
    if change.fingerprint == present:
        return True  # another server that starts has done the rest
    windows.let_go(db, change.over)
    if change.window_ms is not None:
        windows.begin_anew(db, change.window_ms, now_ms)
    if change.forget_event_times:
        db.execute("UPDATE shards SET event_ms = NULL")
    return True


def bury(db: sqlite3.Connection, seen: Mapping[str, int]) -> frozenset[str]:
    """Remove servers that have not beaten since they were seen; return those that are gone, whoever removed them."""
    gone = set()
    for server_id, beat_ms in sorted(seen.items()):
        buried = db.execute(
            "DELETE FROM servers WHERE server_id = ? AND beat_ms = ?", (server_id, beat_ms)
        ).rowcount
        if buried:
            _release(db, server_id)
        found = db.execute("SELECT 1 FROM servers WHERE server_id = ?", (server_id,)).fetchone()
        if found is None:
            gone.add(server_id)
    return frozenset(gone)


def claim(db: sqlite3.Connection, folder: str, instead_of: str | None, claimant: str = "") -> None:
    """Note whose ledger it is, unless that is known; in place of one that is given up, anew, with no other server."""
    db.execute("UPDATE meta SET claims = claims + 1, folder = COALESCE(folder, ?)", (folder,))
    anew = db.execute(
        "UPDATE meta SET ledger_id = ?, folder = ? WHERE ledger_id = ?", (new_ledger_id(), folder, instead_of)
    ).rowcount
    if anew:
        for row in db.execute("SELECT server_id FROM servers WHERE server_id <> ?", (claimant,)).fetchall():
            _remove(db, row[0])


def leave(db: sqlite3.Connection, server_id: str, life: int) -> None:
    """Take the server's row out, unless it is out already, or another has its id."""
    if _lives(db, server_id, life):
        _remove(db, server_id)


def _remove(db: sqlite3.Connection, server_id: str) -> None:
    db.execute("DELETE FROM servers WHERE server_id = ?", (server_id,))
    _release(db, server_id)


def _release(db: sqlite3.Connection, server_id: str) -> None:
    """Let go what a server holds."""
    db.execute("UPDATE shards SET owner = NULL WHERE owner = ?", (server_id,))
    db.execute(
        "UPDATE windows SET owner = NULL, changed = (SELECT version FROM meta)"
        " WHERE state IN ('cut', 'committed') AND owner = ?",
        (server_id,),
    )


def know_shard(db: sqlite3.Connection, shard_id: str, parents: tuple[str, ...]) -> None:
    """Note a shard. Parents that are not given stay as they were, and so does everything else."""
    text = rows.names_text(parents)
    db.execute("INSERT OR IGNORE INTO shards (shard_id, parents) VALUES (?, ?)", (shard_id, text))
    if parents:
        db.execute("UPDATE shards SET parents = ? WHERE shard_id = ?", (text, shard_id))


def open_shard(db: sqlite3.Connection, shard_id: str, parents: tuple[str, ...], server_id: str) -> ShardState:
    """Raise the shard's epoch and own it; return its state with the gap that was accepted until now."""
    know_shard(db, shard_id, parents)
    db.execute("UPDATE shards SET epoch = epoch + 1, owner = ? WHERE shard_id = ?", (server_id, shard_id))
    opened = rows.shard(db.execute("SELECT * FROM shards WHERE shard_id = ?", (shard_id,)).fetchone())
    db.execute("UPDATE shards SET gap_accepted = 0 WHERE shard_id = ?", (shard_id,))
    return opened


def release_shard(db: sqlite3.Connection, shard_id: str, epoch: int) -> None:
    """Give a shard up, unless it was opened again since."""
    db.execute("UPDATE shards SET owner = NULL WHERE shard_id = ? AND epoch = ?", (shard_id, epoch))


def end_shard(db: sqlite3.Connection, shard_id: str, now_ms: int) -> None:
    """Mark a known shard as ended; when it ended first stays."""
    db.execute("UPDATE shards SET ended_ms = COALESCE(ended_ms, ?) WHERE shard_id = ?", (now_ms, shard_id))


def prune(db: sqlite3.Connection, *, before_ms: int, keep: frozenset[str]) -> int:
    """Forget shards that ended before a time, but for those to keep; return how many."""
    ended = db.execute("SELECT shard_id FROM shards WHERE ended_ms < ?", (before_ms,)).fetchall()
    gone = [(row["shard_id"],) for row in ended if row["shard_id"] not in keep]
    db.executemany("DELETE FROM shards WHERE shard_id = ?", gone)
    return len(gone)


def accept_gap(db: sqlite3.Connection, shard_id: str) -> bool:
    """Let the next opening start beyond the position; False when there is no such shard."""
    return bool(db.execute("UPDATE shards SET gap_accepted = 1 WHERE shard_id = ?", (shard_id,)).rowcount)


def reset(db: sqlite3.Connection, shard_ids: Iterable[str]) -> frozenset[str]:
    """Forget where shards without an owner stand; the epoch is raised against what is still under way."""
    return frozenset(
        shard_id
        for shard_id in shard_ids
        if db.execute(
            "UPDATE shards SET epoch = epoch + 1, sequence = NULL, sub_sequence = NULL, effective_ms = NULL,"
            " event_ms = NULL, ended_ms = NULL WHERE shard_id = ? AND owner IS NULL",
            (shard_id,),
        ).rowcount
    )
