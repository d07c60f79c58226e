"""What a handler must give that counts the records of each key in its state: the numbers 1 to N in the order of the records.

The handler sets one value in ``ctx.state`` to one more than it was, and gives it as a column of its row. An effect that is lost, doubled or
out of order shows in the numbers. Everything is computed from the records, the rows, and the state files that the ledger names;
nothing of the server's code is used.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow.parquet as pq

Range = tuple[int, int]
"""Hashes of keys, both bounds inclusive."""


class Run(NamedTuple):
    """The records of one key whose state was never absent in between."""

    name: str
    records: Sequence[Hashable]
    """In the order in which the stream holds them, without those that came to nothing."""
    silent: Collection[Hashable] = ()
    """Those of them that count without giving a row."""
    again: Collection[Hashable] = ()
    """Those of them that were dead letters and gave rows in a redrive: they may count at any later place."""


def check_counts(runs: Iterable[Run], rows: Iterable[tuple[Hashable, int]]) -> list[str]:
    """Compare the numbers in rows (a record and its number) with the records; return what is wrong."""
    numbers: dict[Hashable, list[int]] = {}
    for record, number in rows:
        numbers.setdefault(record, []).append(number)
    broken = [
        f"the row of {record} has the numbers {found}" for record, found in numbers.items() if len(found) > 1
    ]
    for run in runs:
        found = {record: numbers.pop(record)[0] for record in run.records if record in numbers}
        broken += _check_run(run, found)
    return broken + [
        f"{record} has the number {found}, and must not count" for record, found in numbers.items()
    ]


def _check_run(run: Run, found: Mapping[Hashable, int]) -> list[str]:
    counted, most = Counter(found.values()), len(run.records)
    if wrong := sorted(number for number, times in counted.items() if times > 1 or not 0 < number <= most):
        return [f"{run.name}: the numbers {wrong} are repeated, or of no record; {most} records count"]
    redriven = {found[record] for record in run.again}
    free = iter([number for number in range(1, most + 1) if number not in redriven])
    broken, latest = [], 0
    for record in run.records:
        number = found.get(record)
        if record in run.again:
            right = number is not None and number > latest
        else:
            latest = next(free)
            right = number == (None if record in run.silent else latest)
        if not right:
            broken.append(f"{run.name}: {record} has the number {number} behind {latest}")
    return broken


class Store(NamedTuple):
    """What the ledger says of a store."""

    hashes: Range
    closed: bool


def stored_counts(
    out: Path, stores: Mapping[str, Store], files: Mapping[str, Mapping[str, Iterable[Range]]]
) -> tuple[dict[str, int], list[str]]:
    """Read the present number of each key from the state files; return the numbers, and what is wrong. No timer may be pending.

    ``files``: by path below ``out``, for which hashes each store needs the file. Of a key, and of a timer, the row with the highest serial
    counts; a row without a value says that there is none.
    """
    found: dict[str, int] = {}
    broken = [
        f"{path} is needed by {sorted(needed)}"
        for path, needed in files.items()
        if any(name not in stores or stores[name].closed for name in needed)
    ]
    for name, store in stores.items():
        if store.closed:
            continue
        latest: dict[tuple[bytes, str | None], tuple[int, bytes | None]] = {}
        for path, needed in files.items():
            ranges = tuple(needed.get(name, ()))
            if not ranges:
                continue
            rows = pq.ParquetFile(out / path).read().to_pylist()
            # Stores of families have no ranges of their own. One that has inherited a file has written none of its rows.
            for row in [row for row in rows if row["store"] == name] or rows:
                entry = row["key"], row.get("timer")
                known = latest.get(entry, (-1, None))
                if _lies_in(row["key"], ranges) and row["serial"] > known[0]:
                    latest[entry] = row["serial"], row["value"]
        for (key, timer), (_, value) in latest.items():
            text = key.decode("utf-8", "surrogatepass")
            if value is None:
                continue
            if not _lies_in(key, (store.hashes,)):
                broken.append(f"{name} has {text}, which is outside of its range")
            if timer is not None:
                broken.append(f"{name} has the timer {timer} of {text} pending")
                continue
            if text in found:
                broken.append(f"{name} has {text}, and so has another store")
            [found[text]] = msgspec.msgpack.decode(value).values()
    return found, broken


def _lies_in(key: bytes, ranges: Iterable[Range]) -> bool:
    hashed = int(hashlib.md5(key).hexdigest(), 16)
    return any(first <= hashed <= last for first, last in ranges)


class Named(NamedTuple):
    """What a ledger says of keyed state."""

    stores: Mapping[str, Store]
    files: Mapping[str, Mapping[str, Iterable[Range]]]
    """By path below the output folder, for which hashes each store needs the file."""

    @classmethod
    def of(cls, state: Any) -> Named:
        """Take it from a ``LedgerState``."""
        stores = state.stores.items()
        return cls(
            {name: Store((store.first, store.last), store.closed) for name, store in stores},
            {path: file.needed for path, file in state.state_files.items()},
        )


def check_stored(
    out: Path, named: Named, expected: Mapping[str, int], *, forgotten: Collection[str] = ()
) -> list[str]:
    """Compare the state that a ledger names with the number of each key; return what is wrong.

    ``forgotten``: keys whose state has expired, and may still be there.
    """
    found, broken = stored_counts(out, *named)
    return broken + [
        f"the state of {key} is {found.get(key)}, not {expected.get(key)}"
        for key in sorted({*found, *expected})
        if found.get(key) != expected.get(key) and key not in forgotten
    ]
