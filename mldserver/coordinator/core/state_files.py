"""The content of state files: the changes of a flush, a store's entries, and compaction. A synchronous core on Arrow tables.

A flush writes one file with the changes of all its stores (``COLUMNS``). The ledger says for which ranges of MD5 hashes each store
needs the file. A store's entries are the rows of these ranges in all its files. An entry is a key's state, or one of its timers. Of
the rows of one entry the row with the highest serial counts: serials grow along the history of a key, also when its shard splits or
merges.

A store that has rows of its own in a file needs no other rows of it. Otherwise the store has inherited the file: the rows were
written for the shard's ancestors, and the hashes of their keys say which rows it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mldserver.ledger.contract import StateFile, StoreState
from mldserver.stores import ALL_KEYS, KeyRange, divide, hash_of, unpack_columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

COLUMNS: Final = pa.schema(
    [
        pa.field("store", pa.string(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("expires_ms", pa.int64()),
        pa.field("value", pa.binary()),
        pa.field("serial", pa.int64(), nullable=False),
        pa.field("timer", pa.string()),
    ]
)
"""The columns of a state file. A row without a value is a *tombstone*: the entry is gone. ``timer``: the timer's id, whose due time
is ``expires_ms``; null: the row is a key's state. The first files of format 7 have no such column."""

WITHOUT_TIMERS: Final = COLUMNS.remove(COLUMNS.get_field_index("timer"))
"""The columns of those files."""

BUFFERED: Final = (1 << 63) - 1
"""The serial of changes that no flush has written yet: higher than any other."""

FILES_AT_ONCE: Final = 8
"""Compaction joins so many files of similar size, or more. A store with fewer files is not compacted."""
SIMILAR: Final = 4
"""The largest of them has at most so many times the bytes of the smallest."""
MOST_FILES: Final = 24
"""With more files than these, compaction joins the smallest, whatever their sizes are."""
STEP_BYTES: Final = 64 * 1024 * 1024
"""The most that one step of compaction writes."""
_PORTION: Final = 1000
"""Changes of a store that become Arrow's at a time."""


def changes(blobs: SequenceABC[tuple[str, bytes]], serials: Mapping[str, int]) -> pa.Table:
    """Return the changes of stores as one table in order of the stores: the last change of each entry.

    ``blobs``: stores and their changes (``stores.pack_changes``), the newest first. ``serials``: of each store, the serial that its
    rows get.
    """
    found: dict[str, list[pa.Table]] = {store: [] for store, _ in blobs}
    waiting = {store: _Lists([], [], [], []) for store in found}
    for store, blob in blobs:
        decoded, more = waiting[store], unpack_columns(blob)
        decoded.keys.extend(more.keys)
        decoded.values.extend(more.values)
        decoded.expiries.extend(more.expiries)
        decoded.timers.extend(more.timers or repeat("", len(more.keys)))
        if len(decoded.keys) >= _PORTION:
            # Python's objects are gone at once, so that neither they nor the collector of garbage hold up the event loop.
            found[store].append(_table(store, decoded, serials[store]))
            waiting[store] = _Lists([], [], [], [])
    tables = [COLUMNS.empty_table()]
    for store in sorted(found):
        rest = [_table(store, waiting[store], serials[store])] if waiting[store].keys else []
        if portions := [*found[store], *rest]:
            tables.append(_first(portions))
    return pa.concat_tables(tables)


class _Lists(NamedTuple):
    """Changes as columns; ``timers`` is empty text for a key's state."""

    keys: list[bytes]
    values: list[bytes | None]
    expiries: list[int | None]
    timers: list[str]


def _table(store: str, found: _Lists, serial: int) -> pa.Table:
    rows = len(found.keys)
    timers = [timer or None for timer in found.timers] if any(found.timers) else None
    columns = [
        pa.repeat(store, rows),
        pa.array(found.keys, pa.binary()),
        pa.array(found.expiries, pa.int64()),
        pa.array(found.values, pa.binary()),
        pa.repeat(serial, rows),
        pa.nulls(rows, pa.string()) if timers is None else pa.array(timers, pa.string()),
    ]
    return pa.table(columns, COLUMNS)


def _first(tables: SequenceABC[pa.Table], order: NDArray[np.int64] | None = None) -> pa.Table:
    """Return the first row of each entry, in an order of the rows (default: as they stand)."""
    rows = pa.concat_tables(tables)
    codes = pa.concat_arrays(rows.column("key").chunks).dictionary_encode()
    timers = rows.column("timer")
    if timers.null_count < len(rows):
        # One number for each pair of key and timer.
        of_timer = pa.concat_arrays(timers.chunks).dictionary_encode(null_encoding="encode")
        pairs = (
            codes.indices.to_numpy().astype(np.int64) * len(of_timer.dictionary) + of_timer.indices.to_numpy()
        )
        codes = pa.array(pairs).dictionary_encode()
    order = np.arange(len(rows)) if order is None else order
    first = np.empty(len(codes.dictionary), np.int64)
    # Where an index occurs several times, NumPy keeps the last assignment.
    first[codes.indices.to_numpy()[order[::-1]]] = order[::-1]
    return rows.take(pa.array(first))


def entries(
    files: Iterable[tuple[pa.Table, StateFile]],
    store: StoreState,
    *,
    buffered: pa.Table | None = None,
    expired_ms: int | None = None,
) -> pa.Table:
    """Return the present entries of a store: ``key``, ``value``, ``expires_ms`` and ``timer``.

    ``files``: the files that the store needs, with their content. ``buffered``: changes that are newer than all files.
    ``expired_ms``: states that expire at or before this time are left out; None: none has expired. Timers never expire.
    """
    tables = [rows_of(table, store, file.needed[store.store_id]) for table, file in files]
    rows = newest([*tables, *filter(None, (buffered,))])
    return rows.filter(_present(rows, expired_ms)).select(["key", "value", "expires_ms", "timer"])


def first_due_ms(found: pa.Table) -> int | None:
    """Return when the first timer among entries is due; None: there is none."""
    due_ms: int | None = pc.min(found.filter(pc.is_valid(found.column("timer"))).column("expires_ms")).as_py()
    return due_ms


def pending_timers(found: pa.Table) -> tuple[int, tuple[str, ...]]:
    """Return how many of a store's entries are timers, and the callbacks that these call."""
    ids = found.column("timer").drop_null()
    callbacks = pc.list_element(pc.split_pattern(ids, "/", max_splits=1), 0)
    return len(ids), tuple(callbacks.unique().to_pylist())


def rows_of(table: pa.Table, store: StoreState, ranges: SequenceABC[KeyRange]) -> pa.Table:
    """Return the rows of a file that belong to a store which needs the file for ``ranges``."""
    if "timer" not in table.column_names:
        table = table.append_column(COLUMNS.field("timer"), pa.nulls(len(table), pa.string()))
    own = table.filter(pc.equal(table.column("store"), store.store_id))
    if len(own) and tuple(ranges) == (store.key_range,):
        return own
    rows = own if len(own) else table
    # An array of 16 bytes each compares as the numbers do, and all keys at once.
    hashes = np.array([_sortable(hash_of(key)) for key in rows.column("key").to_pylist()], "S16")
    inside = np.zeros(len(rows), bool)
    for each in ranges:
        inside |= (hashes >= _sortable(each.first)) & (hashes <= _sortable(each.last))
    return rows.filter(pa.array(inside))


def _sortable(number: int) -> bytes:
    return number.to_bytes(16, "big")


def newest(tables: Iterable[pa.Table]) -> pa.Table:
    """Return the row of each entry with the highest serial, from rows of one store. Each table has an entry once at most."""
    found = [table for table in tables if len(table)]
    rows = pa.concat_tables(found or [COLUMNS.empty_table()])
    if len(found) <= 1:
        return rows
    return _first([rows], np.argsort(rows.column("serial").to_numpy(), kind="stable")[::-1])


def _present(rows: pa.Table, expired_ms: int | None) -> pa.ChunkedArray:
    has_value = pc.is_valid(rows.column("value"))
    if expired_ms is None:
        return has_value
    stays = pc.fill_null(pc.greater(rows.column("expires_ms"), expired_ms), fill_value=True)
    return pc.and_(has_value, pc.or_(stays, pc.is_valid(rows.column("timer"))))


@dataclass(frozen=True, slots=True)
class StateCompaction:
    """Files of which the rows of some stores become one new file."""

    files: tuple[StateFile, ...]
    stores: tuple[str, ...]
    """In order. The rows of other stores stay where they are."""
    part: KeyRange
    """Only rows in this range of hashes are taken."""
    whole: frozenset[str]
    """The stores that need no other file for ``part``: their tombstones and expired entries go."""

    @property
    def needed(self) -> dict[str, tuple[KeyRange, ...]]:
        """For which ranges each store needs the new file. The old files are not needed for these ranges any more."""
        found = {
            store: _joined(each for file in self.files for each in self._ranges(file, store))
            for store in self.stores
        }
        return {store: ranges for store, ranges in found.items() if ranges}

    def _ranges(self, file: StateFile, store: str) -> tuple[KeyRange, ...]:
        return divide(file.needed.get(store, ()), self.part)[0]

    def rows(
        self,
        read: Callable[[StateFile], pa.Table],
        stores: Mapping[str, StoreState],
        expired_ms: Mapping[str, int],
    ) -> pa.Table:
        """Return the rows of the new file, in order of the stores. ``read`` returns a file's content.

        ``expired_ms``: the time at or before which a store's entries have expired; without a store's time none has.

        A store without rows gets a tombstone that no other row counts less than, so that it has a row of its own (``rows_of``).
        """
        parts: dict[str, list[pa.Table]] = {store: [] for store in self.needed}
        for file in self.files:
            table = read(file)
            for store, tables in parts.items():
                if ranges := self._ranges(file, store):
                    tables.append(rows_of(table, stores[store], ranges))
        found = [COLUMNS.empty_table()]
        for store, tables in parts.items():
            rows = newest(tables)
            if store in self.whole:
                rows = rows.filter(_present(rows, expired_ms.get(store)))
            if not len(rows):
                rows = _table(store, _Lists([b""], [None], [None], [""]), 0)
            found.append(rows.set_column(0, COLUMNS.field(0), pa.array([store] * len(rows), pa.string())))
        return pa.concat_tables(found)


def compaction(
    chosen: Iterable[StateFile],
    files: Iterable[StateFile],
    stores: AbstractSet[str],
    part: KeyRange = ALL_KEYS,
) -> StateCompaction:
    """Return how to make one of the chosen files, for these stores. ``files``: all files."""
    chosen = tuple(chosen)
    paths = {file.path for file in chosen}
    here = {store for file in chosen for store in file.needed if store in stores}
    partly = {
        store
        for file in files
        if file.path not in paths
        for store in here & file.needed.keys()
        if divide(file.needed[store], part)[0]
    }
    return StateCompaction(chosen, tuple(sorted(here)), part, frozenset(here - partly))


def choose(files: SequenceABC[StateFile], stores: AbstractSet[str]) -> StateCompaction | None:
    """Return the next step of compaction for stores that this server serves; None: nothing is worth a step.

    All files that these stores need become one when at least half of their bytes is not in the largest: as large as the largest
    is, about half of the content is obsolete then. If all are more than STEP_BYTES, one step does this for a part of the hashes.
    Otherwise files of similar size become one, so that a change is written a few times at most.
    """
    mine = sorted((file for file in files if not stores.isdisjoint(file.needed)), key=lambda file: file.bytes)
    total, parts = sum(file.bytes for file in mine), 1
    while total > parts * STEP_BYTES:
        parts *= 2
    for part in _parts(parts if len(mine) >= FILES_AT_ONCE else 0):
        sizes = {file.path: size for file in mine if (size := file.bytes * _share(file, stores, part))}
        if len(sizes) >= FILES_AT_ONCE and 2 * max(sizes.values()) <= sum(sizes.values()):
            return compaction((file for file in mine if file.path in sizes), files, stores, part)
    for first in range(len(mine) - FILES_AT_ONCE + 1):
        group = mine[first : first + FILES_AT_ONCE]
        alike = group[-1].bytes <= SIMILAR * group[0].bytes or (len(mine) > MOST_FILES and not first)
        if alike and sum(file.bytes for file in group) <= STEP_BYTES:
            return compaction(group, files, stores)
    return None


def _parts(count: int) -> list[KeyRange]:
    """Return so many equal parts of all hashes; a power of two."""
    bounds = [(ALL_KEYS.last + 1) * each // count for each in range(count + 1)] if count else [0]
    return [KeyRange(first, behind - 1) for first, behind in pairwise(bounds)]


def _share(file: StateFile, stores: AbstractSet[str], part: KeyRange) -> float:
    """Return the share of a file's rows that lies in a part of the hashes, as far as these stores need the file."""
    if part == ALL_KEYS:
        return 1.0
    ranges = [each for store in stores & file.needed.keys() for each in file.needed[store]]
    return _width(divide(ranges, part)[0]) / _width(ranges)


def _width(ranges: Iterable[KeyRange]) -> int:
    return sum(each.last - each.first + 1 for each in ranges)


def _joined(ranges: Iterable[KeyRange]) -> tuple[KeyRange, ...]:
    """Return ranges in order, those that overlap or touch as one."""
    found: list[KeyRange] = []
    for each in sorted(ranges):
        if found and each.first <= found[-1].last + 1:
            found[-1] = KeyRange(found[-1].first, max(found[-1].last, each.last))
        else:
            found.append(each)
    return tuple(found)
