"""Between rows of the ledger's tables and the values of its interface. No SQL but plain reads."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import orjson

from mldserver.records import DeadLetter, Sequence
from mldserver.state import sqlite_batches
from mldserver.state.ledger import (
    LedgerState,
    Segment,
    SegmentKind,
    ServerState,
    ShardState,
    WindowEntry,
    WindowState,
)

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

__all__ = [
    "dead_letter",
    "dead_letter_row",
    "names_text",
    "read_changed",
    "read_current",
    "read_sequence",
    "read_state",
    "read_window",
    "segment",
    "shard",
    "storable",
]


def names_text(names: Iterable[str]) -> str:
    """Return names as a JSON array."""
    return orjson.dumps(list(names)).decode()


def _names(text: str) -> tuple[str, ...]:
    names = orjson.loads(text)
    if not isinstance(names, list):
        raise ValueError(f"{text!r} is no list")  # noqa: TRY004  # a damaged file, like text that is no JSON
    return tuple(names)


def storable(text: str) -> str:
    r"""Return text that UTF-8 can hold: lone surrogates, which user code can make, become ``\udc80``."""
    return text.encode("utf-8", "backslashreplace").decode()


def read_sequence(row: sqlite3.Row) -> Sequence | None:
    """Return the position of a shard's row."""
    return None if row["sequence"] is None else Sequence(int(row["sequence"]), row["sub_sequence"])


def shard(row: sqlite3.Row) -> ShardState:
    """Return a row of ``shards``."""
    return ShardState(
        shard_id=row["shard_id"],
        epoch=row["epoch"],
        position=read_sequence(row),
        effective_ms=row["effective_ms"],
        event_ms=row["event_ms"],
        ended=row["ended_ms"] is not None,
        parents=_names(row["parents"]),
        owner=row["owner"],
        gap_accepted=bool(row["gap_accepted"]),
    )


def _server(row: sqlite3.Row) -> ServerState:
    return ServerState(
        server_id=row["server_id"],
        beat_ms=row["beat_ms"],
        watermark_ms=row["watermark_ms"],
        idle=bool(row["idle"]),
        held_by=row["held_by"],
        reason=row["reason"],
        shape=row["shape"],
    )


def segment(row: sqlite3.Row) -> Segment:
    """Return a row of ``segments`` joined with the bounds of its window."""
    return Segment(
        path=row["path"],
        window_id=row["window_id"],
        rows=row["rows"],
        bytes=row["bytes"],
        start_ms=row["start_ms"],
        end_ms=row["end_ms"],
        kind=SegmentKind(row["kind"]),
        revision=row["revision"],
    )


def _late_segment(row: sqlite3.Row) -> Segment:
    return Segment(
        path=row["path"],
        window_id=row["window_id"],
        rows=row["rows"],
        bytes=row["bytes"],
        start_ms=row["start_ms"],
        end_ms=row["end_ms"],
        kind=SegmentKind.LATE,
    )


def _waits(each: Segment) -> bool:
    """Whether a segment waits for the next revision."""
    return each.kind is SegmentKind.RECOMPUTE and each.revision == 0


def _window(row: sqlite3.Row, segments: list[Segment]) -> WindowEntry:
    return WindowEntry(
        window_id=row["window_id"],
        state=WindowState(row["state"]),
        start_ms=row["start_ms"],
        end_ms=row["end_ms"],
        revision=row["revision"],
        attempt=row["attempt"],
        owner=row["owner"],
        segments=tuple(each for each in segments if not _waits(each)),
        pending=tuple(each for each in segments if _waits(each)),
        retained=bool(row["retained"]),
        published_ms=row["published_ms"],
        staging=row["staging"],
        files=_names(row["files"]),
        rows_in=row["rows_in"],
        rows_out=row["rows_out"],
        error=row["error"],
    )


_WINDOWS = "SELECT * FROM windows"
# CROSS JOIN: windows first, by their index. Else SQLite reads every segment, to have them in order of their ids.
_SEGMENTS = "SELECT segments.*, start_ms, end_ms FROM windows CROSS JOIN segments USING (window_id)"


def read_window(db: sqlite3.Connection, window_id: str) -> WindowEntry | None:
    """Return a window with its segments in order of registration; None when there is no such row."""
    row = db.execute(f"{_WINDOWS} WHERE window_id = ?", (window_id,)).fetchone()
    if row is None:
        return None
    found = db.execute(f"{_SEGMENTS} WHERE window_id = ? ORDER BY id", (window_id,))
    return _window(row, [segment(each) for each in found])


def read_changed(db: sqlite3.Connection, version: int) -> dict[str, WindowEntry]:
    """Return the windows that changed after a version of the ledger, oldest window first."""
    return _read_windows(db, "changed > ?", version)


def read_current(db: sqlite3.Connection) -> dict[str, WindowEntry]:
    """Return all windows but those to which nothing can happen any more, oldest window first."""
    return _read_windows(db, "state <> 'published' OR retained = 1")


def _read_windows(db: sqlite3.Connection, which: str, *values: int) -> dict[str, WindowEntry]:
    segments: defaultdict[str, list[Segment]] = defaultdict(list)
    for row in db.execute(f"{_SEGMENTS} WHERE {which} ORDER BY id", values):
        segments[row["window_id"]].append(segment(row))
    found = db.execute(f"{_WINDOWS} WHERE {which} ORDER BY start_ms, window_id", values)
    return {row["window_id"]: _window(row, segments[row["window_id"]]) for row in found}


def read_state(db: sqlite3.Connection, since: int) -> LedgerState:
    """Return what the ledger holds, of windows the news since a version (or all, when these would not be all news).

    Raises ValueError for content that cannot be.
    """
    meta = db.execute("SELECT * FROM meta").fetchone()
    # Else windows may be gone whose last change was never read; or the ledger is another one than that time.
    if not meta["pruned_version"] <= since <= meta["version"]:
        since = 0
    return LedgerState(
        shards={row["shard_id"]: shard(row) for row in db.execute("SELECT * FROM shards ORDER BY shard_id")},
        windows=read_changed(db, since) if since else read_current(db),
        late_segments=tuple(
            _late_segment(row) for row in db.execute("SELECT * FROM late_segments ORDER BY id")
        ),
        clock=meta["clock"],
        batch_progress=sqlite_batches.read(db),
        dead_letters=meta["dead_letters"],
        redrives=db.execute("SELECT count(*) FROM dead_letters WHERE wanted").fetchone()[0],
        servers={
            row["server_id"]: _server(row) for row in db.execute("SELECT * FROM servers ORDER BY server_id")
        },
        cut_below_ms=meta["cut_below_ms"],
        ledger_id=meta["ledger_id"],
        folder=meta["folder"],
        claims=meta["claims"],
        shape=meta["shape"],
        shapes={row["fingerprint"]: row["text"] for row in db.execute("SELECT * FROM shapes")},
        draining=bool(meta["draining"]),
        version=meta["version"],
        since=since,
    )


def dead_letter(row: sqlite3.Row) -> DeadLetter:
    """Return a row of ``dead_letters``."""
    return DeadLetter(
        shard_id=row["shard_id"],
        sequence=Sequence(int(row["sequence"]), row["sub_sequence"]),
        partition_key=row["partition_key"],
        data=row["data"],
        arrival_ms=row["arrival_ms"],
        attempts=row["attempts"],
        error=row["error"],
        traceback=row["traceback"],
        handler=row["handler"],
        at_ms=row["at_ms"],
        parked_behind=_position(row["parked_behind"]),
        handler_version=row["handler_version"],
    )


def dead_letter_row(letter: DeadLetter) -> tuple[object, ...]:
    """Return a dead letter in the order of its table's columns, without the id and the mark."""
    key = letter.partition_key
    return (
        letter.shard_id,
        str(letter.sequence.number),
        letter.sequence.sub,
        None if key is None else storable(key),
        letter.data,
        letter.arrival_ms,
        letter.attempts,
        storable(letter.error),
        storable(letter.traceback),
        storable(letter.handler),
        letter.at_ms,
        None if letter.parked_behind is None else str(letter.parked_behind),
        storable(letter.handler_version),
    )


def _position(text: str | None) -> Sequence | None:
    if text is None:
        return None
    number, _, sub = text.partition("/")
    return Sequence(int(number), int(sub or 0))
