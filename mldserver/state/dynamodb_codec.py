"""Between a DynamoDB ledger's changes and bytes: JSON arrays, compressed with zlib. Pure.

Format 5 (the number that every kind of ledger shares, ``schema.py``). Changes are an object of ``totals`` (an array,
absent when unchanged) and ``shards``, ``windows``, ``servers``, ``late``, ``letters``, ``shapes`` (objects: the row by its
key; null: it went).
Sequence numbers are decimal text. A window's two lists of segments are each ``[n, [segment …]]``: the first n of the
list that the version before held, then these, so that a flush into a window of a thousand segments writes one.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final, TypeVar

import orjson

from mldserver.records import DeadLetter, Sequence
from mldserver.state.dynamodb_book import Changes, LetterItem, ServerRow, ShardRow, Totals
from mldserver.state.ledger import (
    BatchProgress,
    Segment,
    SegmentKind,
    ServerState,
    ShardState,
    WindowEntry,
    WindowState,
)
from mldserver.state.rows import storable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "LetterKeys",
    "keys_of",
    "pack_changes",
    "pack_keys",
    "pack_letters",
    "unpack_changes",
    "unpack_keys",
    "unpack_letters",
]

LetterKeys = tuple[tuple[str, str, Sequence] | None, ...]
"""Shard, key and sequence of each of an item's letters; None for one without a key."""

_T = TypeVar("_T")
_LENGTH: Final = 4
"""Bytes of the length before the letters' JSON."""


def pack_changes(changes: Changes, windows: Mapping[str, WindowEntry]) -> bytes:
    """Return changes as bytes; ``windows`` are those of the version before."""
    told: dict[str, Any] = {
        "shards": _pack(changes.shards, _shard_row),
        "windows": {
            key: None if entry is None else _window_row(entry, windows.get(key))
            for key, entry in changes.windows.items()
        },
        "servers": _pack(changes.servers, _server_row),
        "late": _pack(changes.late, _late_row),
        "letters": _pack(changes.letters, _letters_row),
        "shapes": changes.shapes,
    }
    if changes.totals is not None:
        told["totals"] = _totals_row(changes.totals)
    return zlib.compress(orjson.dumps(told))


def unpack_changes(data: bytes, windows: Mapping[str, WindowEntry]) -> Changes:
    """Return the changes that ``pack_changes`` made bytes of. Raises ValueError for bytes that are none."""
    try:
        told = orjson.loads(zlib.decompress(data))
        return Changes(
            totals=_totals(told["totals"]) if "totals" in told else None,
            shards=_unpack(told["shards"], _shard),
            windows={
                key: None if row is None else _window(key, row, windows.get(key))
                for key, row in told["windows"].items()
            },
            servers=_unpack(told["servers"], _server),
            late=_unpack(told["late"], _late),
            letters=_unpack(told["letters"], _letters),
            shapes=told["shapes"],
        )
    except (zlib.error, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _pack(rows: Mapping[str, _T | None], pack: Callable[[_T], list[Any]]) -> dict[str, list[Any] | None]:
    return {key: None if row is None else pack(row) for key, row in rows.items()}


def _unpack(rows: dict[str, Any], unpack: Callable[[str, list[Any]], _T]) -> dict[str, _T | None]:
    return {key: None if row is None else unpack(key, row) for key, row in rows.items()}


def _totals_row(totals: Totals) -> list[Any]:
    progress = totals.batch_progress
    return [
        totals.clock,
        totals.dead_letters,
        totals.lives,
        totals.cut_below_ms,
        [progress.number, progress.rows, progress.opened_ms],
        totals.ledger_id,
        totals.folder,
        totals.claims,
        totals.shape,
        totals.draining,
    ]


def _totals(row: list[Any]) -> Totals:
    clock, dead_letters, lives, cut_below_ms, progress, *others = row
    return Totals(clock, BatchProgress(*progress), dead_letters, lives, cut_below_ms, *others)


def _sequence_row(sequence: Sequence | None) -> list[Any] | None:
    return None if sequence is None else [str(sequence.number), sequence.sub]


def _sequence(row: list[Any]) -> Sequence:
    return Sequence(int(row[0]), row[1])


def _shard_row(row: ShardRow) -> list[Any]:
    state = row.state
    return [
        state.epoch,
        _sequence_row(state.position),
        state.effective_ms,
        state.event_ms,
        row.ended_ms,
        state.parents,
        state.owner,
        state.gap_accepted,
    ]


def _shard(shard_id: str, row: list[Any]) -> ShardRow:
    epoch, position, effective_ms, event_ms, ended_ms, parents, owner, gap_accepted = row
    state = ShardState(
        shard_id,
        epoch,
        None if position is None else _sequence(position),
        effective_ms,
        event_ms,
        ended=ended_ms is not None,
        parents=tuple(parents),
        owner=owner,
        gap_accepted=gap_accepted,
    )
    return ShardRow(state, ended_ms)


def _server_row(row: ServerRow) -> list[Any]:
    state = row.state
    beat = [state.beat_ms, state.watermark_ms, state.idle, state.held_by, state.reason, state.shape]
    return [row.life, *beat]


def _server(server_id: str, row: list[Any]) -> ServerRow:
    life, *told = row
    return ServerRow(ServerState(server_id, *told), life)


def _letters_row(item: LetterItem) -> list[Any]:
    return [item.count, sorted(item.wanted), sorted(item.gone)]


def _letters(_version: str, row: list[Any]) -> LetterItem:
    count, wanted, gone = row
    return LetterItem(count, frozenset(wanted), frozenset(gone))


def _segment_row(segment: Segment) -> list[Any]:
    return [segment.path, segment.rows, segment.bytes, segment.kind, segment.revision]


def _late_row(segment: Segment) -> list[Any]:
    return [segment.window_id, segment.rows, segment.bytes, segment.start_ms, segment.end_ms]


def _late(path: str, row: list[Any]) -> Segment:
    window_id, rows, size, start_ms, end_ms = row
    return Segment(path, window_id, rows, size, start_ms, end_ms, SegmentKind.LATE)


def _segments_row(now: tuple[Segment, ...], before: tuple[Segment, ...]) -> list[Any]:
    kept = 0
    while kept < min(len(now), len(before)) and now[kept] == before[kept]:
        kept += 1
    return [kept, [_segment_row(each) for each in now[kept:]]]


def _segments(
    row: list[Any], before: tuple[Segment, ...], window_id: str, bounds: tuple[int | None, int | None]
) -> tuple[Segment, ...]:
    kept, added = row
    if kept > len(before):
        raise ValueError(f"{window_id} goes on from {kept} segments, and had {len(before)}")
    news = (
        Segment(path, window_id, rows, size, *bounds, SegmentKind(kind), revision)
        for path, rows, size, kind, revision in added
    )
    return (*before[:kept], *news)


def _window_row(entry: WindowEntry, before: WindowEntry | None) -> list[Any]:
    return [
        entry.state,
        entry.start_ms,
        entry.end_ms,
        entry.revision,
        entry.attempt,
        entry.owner,
        _segments_row(entry.segments, before.segments if before else ()),
        _segments_row(entry.pending, before.pending if before else ()),
        entry.retained,
        entry.published_ms,
        entry.staging,
        entry.files,
        entry.rows_in,
        entry.rows_out,
        entry.error,
    ]


def _window(window_id: str, row: list[Any], before: WindowEntry | None) -> WindowEntry:
    state, start_ms, end_ms, revision, attempt, owner, segments, pending, *rest = row
    retained, published_ms, staging, files, rows_in, rows_out, error = rest
    bounds = (start_ms, end_ms)
    return WindowEntry(
        window_id,
        WindowState(state),
        start_ms,
        end_ms,
        revision,
        attempt,
        owner,
        _segments(segments, before.segments if before else (), window_id, bounds),
        _segments(pending, before.pending if before else (), window_id, bounds),
        retained,
        published_ms,
        staging,
        tuple(files),
        rows_in,
        rows_out,
        error,
    )


def pack_letters(letters: tuple[DeadLetter, ...]) -> bytes:
    """Return dead letters as bytes: the length of a JSON array, the array, then all payloads one after another."""
    head = orjson.dumps([_letter_row(letter) for letter in letters])
    return zlib.compress(
        b"".join((len(head).to_bytes(_LENGTH, "big"), head, *(letter.data for letter in letters)))
    )


def _letter_row(letter: DeadLetter) -> list[Any]:
    key = letter.partition_key
    return [
        letter.shard_id,
        _sequence_row(letter.sequence),
        None if key is None else storable(key),
        len(letter.data),
        letter.arrival_ms,
        letter.attempts,
        storable(letter.error),
        storable(letter.traceback),
        storable(letter.handler),
        letter.at_ms,
        _sequence_row(letter.parked_behind),
        storable(letter.handler_version),
    ]


def unpack_letters(packed: bytes) -> tuple[DeadLetter, ...]:
    """Return the letters that ``pack_letters`` made bytes of. Raises ValueError for bytes that are none."""
    try:
        data = memoryview(zlib.decompress(packed))
        at = _LENGTH + int.from_bytes(data[:_LENGTH], "big")
        letters = []
        for row in orjson.loads(data[_LENGTH:at]):
            shard_id, sequence, key, size, *rest, behind, version = row
            payload = bytes(data[at : at + size])
            at += size
            parked = None if behind is None else _sequence(behind)
            told = {"parked_behind": parked, "handler_version": version}
            letters.append(DeadLetter(shard_id, _sequence(sequence), key, payload, *rest, **told))
    except (zlib.error, TypeError, IndexError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return tuple(letters)


def keys_of(letters: tuple[DeadLetter, ...]) -> LetterKeys:
    """Return what parks records behind these letters."""
    return tuple(
        None if each.partition_key is None else (each.shard_id, each.partition_key, each.sequence)
        for each in letters
    )


def pack_keys(letters: tuple[DeadLetter, ...]) -> bytes:
    """Return the keys of letters as bytes: an array of [shard, key, sequence], null for a letter without a key."""
    rows = [
        None if each is None else [each[0], storable(each[1]), _sequence_row(each[2])]
        for each in keys_of(letters)
    ]
    return zlib.compress(orjson.dumps(rows))


def unpack_keys(packed: bytes) -> LetterKeys:
    """Return the keys that ``pack_keys`` made bytes of. Raises ValueError for bytes that are none."""
    try:
        rows = orjson.loads(zlib.decompress(packed))
        return tuple(None if row is None else (row[0], row[1], _sequence(row[2])) for row in rows)
    except (zlib.error, TypeError, IndexError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
