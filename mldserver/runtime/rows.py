"""What a handler returns: rows, as an Arrow table, and the records that it names as failed. Synchronous, no I/O.

A value for a record is a tuple in the order of the schema, a dict by column name, a list of these, or None. What
``process_record`` returns is converted call by call (``RowBuilder.convert``): a handler may use one dict again and again. Whole
columns are converted at once; only when that fails are the values looked at one by one, so that every record at
fault is named with its column and value, and all others keep their rows.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyarrow import types

from mldserver.handler.failure import Failure, describe, printed
from mldserver.handler.spec import Schema
from mldserver.records import BatchResult, Record
from mldserver.runtime.values import converter, materialized, owned, shown
from mldserver.windows import counted


@dataclass(slots=True)
class Built:
    """Rows of some records."""

    table: Any = None
    """The handler's columns (``pyarrow.Table``); None without rows."""
    records: list[int] = field(default_factory=list)
    """For each row the index of its record, in the order of the rows."""
    faults: dict[int, str] = field(default_factory=dict)
    """The error of each record whose rows are refused. It has no rows in ``table``."""


class BadRow(ValueError):
    """A returned value is not a row of the schema."""


@dataclass(frozen=True, slots=True)
class _BadRow:
    """Stands for the rows of one record that are refused, with the reason."""

    text: str


_TUPLES: Final = {tuple}


class RowBuilder:
    """Builds rows for one handler."""

    def __init__(
        self, schema: Schema | None, *, time_column: str | None = None, at_once: bool = False
    ) -> None:
        """Build rows of ``schema``; a null in ``time_column`` (what windows are cut on) is a fault.

        ``at_once``: ``convert`` finds every fault.
        """
        self._schema = schema
        columns = () if schema is None else schema.columns
        self._names = tuple(column.name for column in columns)
        self._known = frozenset(self._names)
        self._width = -1 if schema is None else len(self._names)
        self._converters = [converter(column.sql, column.type) for column in columns]
        self._null_faults = [
            None if each.nullable else "it is null, but declared NOT NULL" for each in columns
        ]
        """For each column, the error for a null in it; None if it may hold null."""
        if time_column in self._names:
            self._null_faults[self._names.index(time_column)] = "it is null, but windows are cut on it"
        self._at_once = at_once
        self._copied = [
            place
            for place, column in enumerate(columns)
            if types.is_nested(column.type) or types.is_binary(column.type)
        ]
        """The places of columns whose values may be of mutable Python types."""
        self.plain: frozenset[type] = frozenset(
            {type(None)} if at_once or self._copied else {type(None), tuple}
        )
        """Types of values that ``convert`` returns as they are."""

    def convert(self, value: Any) -> Any:
        """Return a value as it is kept until ``build``: the handler cannot change it any more.

        With ``at_once``, raises BadRow for a row with a fault, otherwise ``build`` reports it. Raises what the
        value's own code raises.
        """
        kind = type(value)
        # Most values need no more than this.
        if kind is dict and self._known.issuperset(value):
            value, kind = tuple(map(value.get, self._names)), tuple
        if kind is tuple and len(value) == self._width:
            row = value if not self._copied else self._own(value)
            if not self._at_once or self._is_certain(row):
                return row
        elif kind is list and not (self._at_once or self._copied) and set(map(type, value)) == _TUPLES:
            # Some may be of another width, but none can change.
            return value[0] if len(value) == 1 else value[:]
        value = materialized(value)
        if value is None:
            return None
        try:
            rows = list(map(self._row, value)) if type(value) is list else [self._row(value)]
        except BadRow as error:
            if self._at_once:
                raise
            return _BadRow(str(error))
        if self._copied:
            rows = list(map(self._own, rows))
        if self._at_once and (told := next(filter(None, map(self._row_fault, rows)), None)):
            raise BadRow(told)
        return rows

    def _is_certain(self, row: tuple[Any, ...]) -> bool:
        """Return whether a row has no fault, as far as that is seen quickly."""
        for value, convert, null_fault in zip(row, self._converters, self._null_faults, strict=True):
            if not convert.certain(value) and (value is not None or null_fault):
                return False
        return True

    def _own(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        mine = list(row)
        for place in self._copied:
            mine[place] = owned(mine[place])
        return tuple(mine)

    def build(self, returned: Iterable[tuple[int, Any]]) -> Built:
        """Return the rows of ``returned``: pairs of a record's index and what the handler returned for it."""
        rows, records, faults = self._flatten(returned)
        if not rows:
            return Built(None, [], faults)
        arrays, bad = self._arrays(rows)
        if bad:
            for row, record in zip(rows, records, strict=True):
                if fault := self._row_fault(row, bad):
                    faults.setdefault(record, fault)
            kept = [place for place, record in enumerate(records) if record not in faults]
            rows, records = [rows[place] for place in kept], [records[place] for place in kept]
            arrays, bad = self._arrays(rows)
        if not rows or self._schema is None:
            return Built(None, [], faults)
        assert not bad, "rows without a fault convert"
        return Built(pa.Table.from_arrays(arrays, schema=self._schema.arrow), records, faults)

    def _flatten(
        self, returned: Iterable[tuple[int, Any]]
    ) -> tuple[list[tuple[Any, ...]], list[int], dict[int, str]]:
        rows: list[tuple[Any, ...]] = []
        records: list[int] = []
        faults: dict[int, str] = {}
        for record, value in returned:
            if value is None:
                continue
            if type(value) is tuple and len(value) == self._width:
                rows.append(value)
                records.append(record)
                continue
            if type(value) is _BadRow:
                faults[record] = value.text
                continue
            try:
                found = [self._row(row) for row in value] if type(value) is list else [self._row(value)]
            except Exception as error:  # noqa: BLE001  # a user's Mapping may raise anything
                faults[record] = str(error) if isinstance(error, BadRow) else f"{shown(value)} is not a row"
                continue
            rows += found
            records += [record] * len(found)
        return rows, records, faults

    def _row(self, value: Any) -> tuple[Any, ...]:
        if self._schema is None:
            raise BadRow(f"returned {shown(value)}, but the handler declares no schema")
        if isinstance(value, tuple):
            had, wanted = len(value), len(self._names)
            if had != wanted:
                columns = f"{counted(wanted, 'column')} ({', '.join(self._names)})"
                raise BadRow(f"returned {counted(had, 'value')} for {columns}")
            return value
        if isinstance(value, Mapping):
            unknown = [name for name in value if name not in self._known]
            if unknown:
                raise BadRow(unknown_columns(unknown, self._names))
            return tuple([value.get(name) for name in self._names])
        raise BadRow(f"{shown(value)} is not a row: return a tuple, a dict, a list of rows, or None")

    def _arrays(self, rows: Sequence[tuple[Any, ...]]) -> tuple[list[Any], list[int]]:
        """Return an array for each column, and the places of the columns in which some value is at fault."""
        arrays, bad = [], []
        for place, (convert, null_fault) in enumerate(zip(self._converters, self._null_faults, strict=True)):
            try:
                array = convert.array([row[place] for row in rows])
            except Exception:  # noqa: BLE001  # Arrow and the values' own code may raise anything
                bad.append(place)
                continue
            if array.null_count and null_fault:
                bad.append(place)
            arrays.append(array)
        return arrays, bad

    def _row_fault(self, row: tuple[Any, ...], places: Iterable[int] | None = None) -> str:
        """Return what is wrong with a row, in the columns ``places`` or in any; empty when nothing is."""
        problems = []
        for place in range(self._width) if places is None else places:
            convert, value = self._converters[place], row[place]
            problem = convert.fault(value)
            if problem is None and convert.one(value) is None:
                problem = self._null_faults[place]
            if problem:
                problems.append(f"column {self._names[place]}: {problem}")
        return "; ".join(problems)


def unknown_columns(unknown: Sequence[Any], known: Sequence[str]) -> str:
    """Return the sentence that refuses columns which the schema does not have."""
    close = difflib.get_close_matches(str(unknown[0]), known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"its columns are {', '.join(known)}"
    return f"the schema has no column {shown(unknown[0])}; {hint}"


def failed_records(result: BatchResult, records: Sequence[Record]) -> dict[int, Failure]:
    """Return the failed records that a result names, by their place in the call, each with its failure.

    Raises ValueError if a name is not one of the call's records.
    """
    failed = result.failed
    told = failed if isinstance(failed, Mapping) else dict.fromkeys(failed)
    places = named_places(told, records)
    failures = {}
    for place, reason in zip(places, told.values(), strict=True):
        if isinstance(reason, BaseException):
            failures[place] = describe(reason)
        else:
            text = "the handler named it" if reason is None else printed(reason)
            failures[place] = Failure(f"Failed: {text}", names=("Failed",))
    return failures


def named_places(named: Iterable[Any], records: Sequence[Record]) -> list[int]:
    """Return the place in the call of each named record; names are records or places.

    Raises ValueError if a name is not one of the call's records.
    """
    places = []
    by_sequence = None
    for name in named:
        place: int | None = None
        if isinstance(name, Record):
            by_sequence = by_sequence or {record.sequence: place for place, record in enumerate(records)}
            place = by_sequence.get(name.sequence)
        elif isinstance(name, int | np.integer) and not isinstance(name, bool) and 0 <= name < len(records):
            place = int(name)
        if place is None:
            raise ValueError(f"{shown(name)} was named as failed, but is none of the {len(records)} records")
        places.append(place)
    return places
