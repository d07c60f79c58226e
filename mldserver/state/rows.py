"""Between rows of the ledger's tables and the values of its interface. No SQL but plain reads."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import orjson

from mldserver.records import Sequence
from mldserver.runtime.base import DeadLetter
from mldserver.state.ledger import BatchProgress, LedgerState, Segment, ShardState, WindowEntry, WindowState

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

__all__ = [
    "dead_letter",
    "dead_letter_row",
    "names_text",
    "read_sequence",
    "read_state",
    "read_window",
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
    )


def _segment(row: sqlite3.Row, *, late: bool) -> Segment:
    return Segment(
        path=row["path"],
        window_id=row["window_id"],
        rows=row["rows"],
        bytes=row["bytes"],
        start_ms=row["start_ms"],
        end_ms=row["end_ms"],
        late=late,
    )


def _window(row: sqlite3.Row, segments: Iterable[Segment]) -> WindowEntry:
    return WindowEntry(
        window_id=row["window_id"],
        state=WindowState(row["state"]),
        start_ms=row["start_ms"],
        end_ms=row["end_ms"],
        revision=row["revision"],
        attempt=row["attempt"],
        segments=tuple(segments),
        staging=row["staging"],
        files=_names(row["files"]),
        rows_in=row["rows_in"],
        rows_out=row["rows_out"],
        error=row["error"],
    )


_SEGMENTS = "SELECT segments.*, start_ms, end_ms FROM segments JOIN windows USING (window_id)"


def read_window(db: sqlite3.Connection, window_id: str) -> WindowEntry | None:
    """Return a window with its segments in order of registration; None when there is no such row."""
    row = db.execute("SELECT * FROM windows WHERE window_id = ?", (window_id,)).fetchone()
    if row is None:
        return None
    segments = db.execute(f"{_SEGMENTS} WHERE window_id = ? ORDER BY id", (window_id,))
    return _window(row, (_segment(each, late=False) for each in segments))


def read_state(db: sqlite3.Connection) -> LedgerState:
    """Return everything that a start needs. Raises ValueError for content that cannot be."""
    meta = db.execute("SELECT * FROM meta").fetchone()
    segments: defaultdict[str, list[Segment]] = defaultdict(list)
    for row in db.execute(f"{_SEGMENTS} ORDER BY id"):
        segments[row["window_id"]].append(_segment(row, late=False))
    return LedgerState(
        shards={row["shard_id"]: shard(row) for row in db.execute("SELECT * FROM shards ORDER BY shard_id")},
        windows={
            row["window_id"]: _window(row, segments[row["window_id"]])
            for row in db.execute("SELECT * FROM windows ORDER BY start_ms, window_id")
        },
        late_segments=tuple(
            _segment(row, late=True) for row in db.execute("SELECT * FROM late_segments ORDER BY id")
        ),
        clock=meta["clock"],
        batch_progress=BatchProgress(meta["batch_number"], meta["batch_rows"], meta["batch_opened_ms"]),
        dead_letters=db.execute("SELECT count(*) FROM dead_letters").fetchone()[0],
        cut_below_ms=meta["cut_below_ms"],
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
    )


def dead_letter_row(letter: DeadLetter) -> tuple[object, ...]:
    """Return a dead letter in the order of its table's columns, without the id."""
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
    )
