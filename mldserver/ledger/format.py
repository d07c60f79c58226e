"""Between a ledger's changes and what stores keep of them: rows of plain values, and bytes. Pure.

Format 8, which every kind of ledger shares, and which is that of the segments that it names too: who changes what is in
one raises it, and keeps what the version before has left (``tests/formats``). Changes are an object of ``totals`` (absent when unchanged) and ``shards``,
``windows``, ``servers``, ``late``, ``letters``, ``shapes``, ``stores``, ``state_files``: each row, a list of values, by its key; null: it went.
Sequence numbers are decimal text. The last value of a window are its segments, ``[n, [segment …]]``: the first n that the
version before held, then these, so that a flush into a window of a thousand segments writes one.

Format 6 had no keyed state. Format 7 reads it: a shard's row ends with its store if it has one, and ``stores`` and
``state_files`` are absent where nothing in them changes, so that a pipeline without keyed state writes what format 6 wrote.
A store's row ends with the due time of its first timer if it has timers, and a letter's row with the timer and its due time.
Format 7 had no life of a function. Format 8 reads it: the row of the totals ends with the life if that is not the default one.
Bounds of ranges have up to 128 bits and are hexadecimal text. Of a file that a store needs for its whole range, where the same
changes have the store's row, the ranges are null: that is each store of a flush.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final, TypeVar

import orjson

from mldserver.ledger.book import Changes, LedgerTotals, LetterItem, segments_of
from mldserver.ledger.contract import (
    BatchProgress,
    CodeVersion,
    FunctionLife,
    Segment,
    SegmentKind,
    ServerState,
    ShardState,
    StateFile,
    StoreState,
    Wanted,
    WindowEntry,
    WindowState,
    storable,
)
from mldserver.records import DeadLetter, Sequence
from mldserver.stores import KeyRange

FORMAT: Final = 8
OLDEST_FORMAT: Final = 6
"""The oldest format that this program reads. The first transaction that it writes makes the ledger one of ``FORMAT``."""

Rows = dict[str, Any]
"""Changes as rows of plain values."""

_T = TypeVar("_T")
_STATES: Final = {state.value: state for state in WindowState}
_KINDS: Final = {kind.value: kind for kind in SegmentKind}
_LENGTH: Final = 4
"""Bytes of the length before the letters' JSON."""
_DATA: Final = 4
"""Where the payload is in a letter's row."""

_TOTALS: Final = attrgetter("clock", "dead_letters", "lives", "cut_below_ms")
_PROGRESS: Final = attrgetter("number", "rows", "opened_ms")
_PIPELINE: Final = attrgetter("ledger_id", "folder", "claims", "shape", "draining")
_TOTALS_COLUMNS: Final = 11
"""With the life."""
_SHARD: Final = attrgetter("effective_ms", "event_ms", "ended_ms", "parents", "owner", "gap_accepted")
_SERVER: Final = attrgetter("life", "beat_ms", "watermark_ms", "idle", "held_by", "reason", "shape")
_LATE: Final = attrgetter("window_id", "rows", "bytes", "start_ms", "end_ms")
_WINDOW: Final = attrgetter(
    *("state", "start_ms", "end_ms", "revision", "attempt", "owner", "retained", "published_ms"),
    *("staging", "files", "rows_in", "rows_out", "error"),
)
_SEGMENT: Final = attrgetter("path", "kind", "revision", "rows", "bytes")


def rows_of(changes: Changes, windows: Mapping[str, WindowEntry]) -> Rows:
    """Return changes as rows; ``windows`` are those of the version before."""
    of_windows: dict[str, list[Any] | None] = dict.fromkeys(changes.windows)
    for key, entry in changes.windows.items():
        if entry is None:
            continue
        now, known = segments_of(entry), segments_of(windows.get(key))
        kept = len(known)
        if now[:kept] != known:
            pairs = enumerate(zip(now, known, strict=False))
            kept = next((number for number, (new, old) in pairs if new != old), min(len(now), len(known)))
        of_windows[key] = [*_WINDOW(entry), [kept, [_SEGMENT(segment) for segment in now[kept:]]]]
    rows: Rows = {
        "shards": _pack(
            changes.shards,
            lambda shard: [
                shard.epoch,
                shard.position and [str(shard.position.number), shard.position.sub],
                *_SHARD(shard),
                *filter(None, (shard.store,)),
            ],
        ),
        "windows": of_windows,
        "servers": _pack(changes.servers, lambda server: [*_SERVER(server)]),
        "late": _pack(changes.late, lambda segment: [*_LATE(segment)]),
        "letters": _pack(changes.letters, lambda item: [item.count, f"{item.wanted:x}", f"{item.gone:x}"]),
        "shapes": _pack(changes.shapes, lambda text: [text]),
    }
    if changes.stores:
        rows["stores"] = _pack(changes.stores, _store_row)
    if changes.state_files:
        whole = _whole_ranges(changes.stores)
        rows["state_files"] = _pack(changes.state_files, lambda file: _state_file_row(file, whole))
    if (totals := changes.totals) is not None:
        rows["totals"] = [*_TOTALS(totals), [*_PROGRESS(totals.batch_progress)], *_PIPELINE(totals)]
        if totals.life != FunctionLife():
            rows["totals"].append(_life_row(totals.life))
    return rows


def changes_of(rows: Rows, windows: Mapping[str, WindowEntry]) -> Changes:
    """Return the changes that ``rows_of`` made rows of. Raises ValueError for rows that are none."""
    totals = None
    try:
        if "totals" in rows:
            *counts, progress, ledger_id, folder, claims, shape, draining, life = _with_life(rows["totals"])
            counts += [
                BatchProgress(*progress),
                ledger_id,
                folder,
                claims,
                shape,
                bool(draining),
                _life(life),
            ]
            totals = LedgerTotals(*counts)
        stores = _unpack(rows.get("stores", {}), _store)
        whole = _whole_ranges(stores)
        return Changes(
            totals=totals,
            shards=_unpack(rows["shards"], _shard),
            windows={
                key: None if row is None else _window(key, row, windows.get(key))
                for key, row in rows["windows"].items()
            },
            servers=_unpack(rows["servers"], _server),
            late=_unpack(rows["late"], _late),
            letters=_unpack(
                rows["letters"], lambda _, row: LetterItem(row[0], int(row[1], 16), int(row[2], 16))
            ),
            shapes=_unpack(rows["shapes"], lambda _, row: str(row[0])),
            stores=stores,
            state_files=_unpack(rows.get("state_files", {}), lambda path, row: _state_file(path, row, whole)),
        )
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def pack_changes(changes: Changes, windows: Mapping[str, WindowEntry]) -> bytes:
    """Return changes as compressed bytes; ``windows`` are those of the version before."""
    return zlib.compress(orjson.dumps(rows_of(changes, windows)))


def unpack_changes(data: bytes, windows: Mapping[str, WindowEntry]) -> Changes:
    """Return the changes that ``pack_changes`` made bytes of. Raises ValueError for bytes that are none."""
    try:
        return changes_of(orjson.loads(zlib.decompress(data)), windows)
    except zlib.error as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _pack(rows: Mapping[str, _T | None], pack: Callable[[_T], list[Any]]) -> dict[str, list[Any] | None]:
    return {key: None if row is None else pack(row) for key, row in rows.items()}


def _unpack(rows: dict[str, Any], unpack: Callable[[str, list[Any]], _T]) -> dict[str, _T | None]:
    return {key: None if row is None else unpack(key, row) for key, row in rows.items()}


def _with_life(row: list[Any]) -> list[Any]:
    """Return the row of the totals with a life, which may be None."""
    return row if len(row) == _TOTALS_COLUMNS else [*row, None]


def _life_row(life: FunctionLife) -> list[Any]:
    deployed, other = (
        None if each is None else [each.id, each.path, each.staged_ms] for each in (life.deployed, life.other)
    )
    return [life.wanted, deployed, other, life.other_is_previous, life.keep]


def _life(row: list[Any] | None) -> FunctionLife:
    if row is None:
        return FunctionLife()
    wanted, deployed, other, is_previous, keep = row
    second = None if other is None else CodeVersion(*other)
    return FunctionLife(Wanted(wanted), CodeVersion(*deployed), second, bool(is_previous), bool(keep))


def _shard(shard_id: str, row: list[Any]) -> ShardState:
    epoch, position, effective_ms, event_ms, ended_ms, parents, owner, gap_accepted, *store = row
    stands = None if position is None else Sequence(int(position[0]), position[1])
    known = (stands, effective_ms, event_ms, ended_ms)
    held = (tuple(parents), owner, bool(gap_accepted))
    return ShardState(shard_id, epoch, *known, *held, *filter(None, store))


def _server(server_id: str, row: list[Any]) -> ServerState:
    life, beat_ms, watermark_ms, idle, held_by, reason, shape = row
    return ServerState(server_id, beat_ms, watermark_ms, bool(idle), held_by, reason, shape, life)


def _late(path: str, row: list[Any]) -> Segment:
    window_id, rows, size, start_ms, end_ms = row
    return Segment(path, window_id, rows, size, start_ms, end_ms, SegmentKind.LATE)


def _store_row(store: StoreState) -> list[Any]:
    row = [store.serial, f"{store.first:x}", f"{store.last:x}", store.closed]
    return row if store.next_due_ms is None else [*row, store.next_due_ms]


def _store(store_id: str, row: list[Any]) -> StoreState:
    serial, first, last, closed, *next_due_ms = row
    return StoreState(store_id, int(serial), int(first, 16), int(last, 16), bool(closed), *next_due_ms)


def _state_file_row(file: StateFile, whole: Mapping[str, tuple[KeyRange, ...]]) -> list[Any]:
    needed = {
        key: None if whole.get(key) == ranges else [[f"{first:x}", f"{last:x}"] for first, last in ranges]
        for key, ranges in file.needed.items()
    }
    return [file.rows, file.bytes, file.gone_ms, needed]


def _state_file(path: str, row: list[Any], whole: Mapping[str, tuple[KeyRange, ...]]) -> StateFile:
    rows, size, gone_ms, needed = row
    ranges = {
        key: whole[key]
        if bounds is None
        else tuple(KeyRange(int(first, 16), int(last, 16)) for first, last in bounds)
        for key, bounds in needed.items()
    }
    return StateFile(path, ranges, rows, size, gone_ms)


def _whole_ranges(stores: Mapping[str, StoreState | None]) -> dict[str, tuple[KeyRange, ...]]:
    return {key: (store.key_range,) for key, store in stores.items() if store is not None}


def _window(window_id: str, row: list[Any], before: WindowEntry | None) -> WindowEntry:
    state, start_ms, end_ms, revision, attempt, owner, retained, *middle, (kept, added) = row
    published_ms, staging, files, rows_in, rows_out, error = middle
    known = segments_of(before)
    if kept > len(known):
        raise ValueError(f"{window_id} goes on from {kept} segments, and had {len(known)}")
    segments = known[:kept] + tuple(
        Segment(path, window_id, rows, size, start_ms, end_ms, _KINDS[kind], taken)
        for path, kind, taken, rows, size in added
    )
    waiting = len(segments)
    # What waits for the next revision came last.
    while (
        waiting and segments[waiting - 1].kind is SegmentKind.RECOMPUTE and not segments[waiting - 1].revision
    ):
        waiting -= 1
    known_by = (window_id, _STATES[state], start_ms, end_ms, revision, attempt, owner)
    taken = (segments[:waiting], segments[waiting:], bool(retained))
    return WindowEntry(*known_by, *taken, published_ms, staging, tuple(files), rows_in, rows_out, error)


def letter_row(letter: DeadLetter) -> list[Any]:
    """Return a dead letter as plain values."""
    key, behind = letter.partition_key, letter.parked_behind
    return [
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
        None if behind is None else str(behind),
        storable(letter.handler_version),
        letter.timer,
        letter.due_ms,
    ]


def letter_of(row: Iterable[Any]) -> DeadLetter:
    """Return the dead letter that ``letter_row`` made a row of."""
    shard_id, number, sub, key, data, arrival_ms, attempts, error, *later = row
    traceback, handler, at_ms, text, version, *of_timer = later
    timer, due_ms = of_timer or (None, None)
    behind = None
    if text is not None:
        before, _, part = text.partition("/")
        behind = Sequence(int(before), int(part or 0))
    failure = (attempts, error, traceback, handler, at_ms, behind, version, timer, due_ms)
    return DeadLetter(shard_id, Sequence(int(number), sub), key, data, arrival_ms, *failure)


def pack_letters(letters: tuple[DeadLetter, ...]) -> bytes:
    """Return dead letters as bytes: the length of a JSON array, the array, then all payloads one after another."""
    rows = [letter_row(letter) for letter in letters]
    for row in rows:
        row[_DATA] = len(row[_DATA])
    head = orjson.dumps(rows)
    return zlib.compress(
        b"".join((len(head).to_bytes(_LENGTH, "big"), head, *(letter.data for letter in letters)))
    )


def unpack_letters(packed: bytes) -> tuple[DeadLetter, ...]:
    """Return the letters that ``pack_letters`` made bytes of. Raises ValueError for bytes that are none."""
    try:
        data = memoryview(zlib.decompress(packed))
        at = _LENGTH + int.from_bytes(data[:_LENGTH], "big")
        letters = []
        for row in orjson.loads(data[_LENGTH:at]):
            size = row[_DATA]
            row[_DATA] = bytes(data[at : at + size])
            at += size
            letters.append(letter_of(row))
    except (zlib.error, TypeError, IndexError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return tuple(letters)


def pack_keys(letters: tuple[DeadLetter, ...]) -> bytes:
    """Return the keys of letters as bytes: an array of [shard, key, sequence], null for a letter without a key."""
    rows = [
        None
        if (key := letter.partition_key) is None
        else [letter.shard_id, storable(key), [str(letter.sequence.number), letter.sequence.sub]]
        for letter in letters
    ]
    return zlib.compress(orjson.dumps(rows))


def unpack_keys(packed: bytes) -> tuple[tuple[str, str, Sequence] | None, ...]:
    """Return the keys that ``pack_keys`` made bytes of: shard, key and sequence. Raises ValueError for bytes that are none."""
    try:
        rows = orjson.loads(zlib.decompress(packed))
        return tuple(
            None if row is None else (row[0], row[1], Sequence(int(row[2][0]), row[2][1])) for row in rows
        )
    except (zlib.error, TypeError, IndexError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
