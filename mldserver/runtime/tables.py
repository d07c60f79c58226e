"""What ``process_table`` returns, checked and cast to the schema. Synchronous, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from mldserver.handler.spec import RECORD_COLUMN, Schema, SchemaColumn
from mldserver.runtime.rows import Built, unknown_columns
from mldserver.runtime.values import shown
from mldserver.windows import counted

_ANY_INTEGER: Final = pa.decimal128(20, 0)


class TableMismatch(ValueError):
    """The server cannot assign a returned table's rows and columns: the whole call failed."""

    def __init__(self, problem: str, *, whole_call: bool = False) -> None:
        """Say what is wrong; ``whole_call``: as ``Failure`` has it."""
        super().__init__(problem)
        self.whole_call = whole_call


def take_table(
    returned: Any,
    *,
    schema: Schema | None,
    time_column: str | None,
    indices: Sequence[int],
    without: frozenset[int] = frozenset(),
) -> Built:
    """Return the rows of a table that was returned for the records ``indices``.

    Rows of the records at the places ``without`` are left out, whatever they hold.
    Raises TableMismatch when no single record is at fault; values that do not fit the schema are faults of
    their records.
    """
    if returned is None:
        return Built()
    table = _as_table(returned, schema)
    assert schema is not None, "_as_table refuses tables without a schema"
    places, table = _places(table, len(indices))
    if without:
        wanted = [row for row, place in enumerate(places) if place not in without]
        places, table = [places[row] for row in wanted], table.take(pa.array(wanted, pa.int64()))
    unknown = [name for name in table.column_names if schema.column(name) is None]
    if unknown:
        raise TableMismatch(unknown_columns(unknown, schema.names))
    columns = [_column(table, column) for column in schema.columns]
    arrays = [_whole(held, column, time_column) for held, column in zip(columns, schema.columns, strict=True)]
    faults: dict[int, str] = {}
    if any(array is None for array in arrays):
        problems = [_row_fault(columns, schema, time_column, row) for row in range(table.num_rows)]
        for place, problem in zip(places, problems, strict=True):
            if problem:
                faults.setdefault(indices[place], problem)
        kept = [row for row, place in enumerate(places) if indices[place] not in faults]
        places = [places[row] for row in kept]
        columns = [held.take(pa.array(kept, pa.int64())) for held in columns]
        arrays = [
            _whole(held, column, time_column) for held, column in zip(columns, schema.columns, strict=True)
        ]
    if not places:
        return Built(None, [], faults)
    return Built(pa.Table.from_arrays(arrays, schema=schema.arrow), [indices[p] for p in places], faults)


def _as_table(returned: Any, schema: Schema | None) -> Any:
    if isinstance(returned, pa.RecordBatch):
        returned = pa.Table.from_batches([returned])
    if not isinstance(returned, pa.Table):
        raise TableMismatch(
            f"{shown(returned)} is not a pyarrow.Table; return one, a RecordBatch, or None", whole_call=True
        )
    if schema is None:
        raise TableMismatch("returned a table, but the handler declares no schema", whole_call=True)
    try:
        # What Arrow is given as buffers it takes on trust, and crashes later. Of 10,000 rows a column of numbers takes
        # 1 µs, one of short texts 40 to 100 µs.
        returned.validate(full=True)
    except pa.ArrowException as error:
        raise TableMismatch(f"the table is damaged: {error}") from None
    return returned


def _places(table: Any, records: int) -> tuple[list[int], Any]:
    """Return for each row the place of its record in the input, and the table in the records' order."""
    if RECORD_COLUMN not in table.column_names:
        if table.num_rows != records:
            rows, given = counted(table.num_rows, "row"), counted(records, "record")
            raise TableMismatch(
                f"returned {rows} for {given}: add a column {RECORD_COLUMN!r} with the index of each row's record",
                whole_call=True,
            )
        return list(range(records)), table
    column = table.column(RECORD_COLUMN)
    if not types.is_integer(column.type) or column.null_count:
        raise TableMismatch(
            f"column {RECORD_COLUMN!r} must hold the index of each row's record", whole_call=True
        )
    places = column.to_pylist()
    wrong = [place for place in places if not 0 <= place < records]
    if wrong:
        raise TableMismatch(
            f"column {RECORD_COLUMN!r}: there is no record {wrong[0]} among {records}", whole_call=True
        )
    order = sorted(range(len(places)), key=places.__getitem__)
    table = table.drop_columns([RECORD_COLUMN]).take(pa.array(order, pa.int64()))
    return [places[row] for row in order], table


def _column(table: Any, column: SchemaColumn) -> Any:
    found = table.column_names.count(column.name)
    if found > 1:
        raise TableMismatch(f"column {column.name} is there {found} times")
    if not found:
        if not column.nullable:
            raise TableMismatch(f"column {column.name} is missing")
        return pa.chunked_array([pa.nulls(table.num_rows, column.type)])
    held = table.column(column.name)
    problem = _kind_problem(held.type, column.type, column.sql)
    if problem:
        raise TableMismatch(f"column {column.name}: {problem}")
    return held


def _kind_problem(held: Any, wanted: Any, sql: str) -> str | None:
    """Say where Arrow would cast from one meaning to another, or leave something out.

    ``held`` and ``wanted`` are Arrow types of a column called ``sql``, or of a part of its values.
    """
    held = held.value_type if types.is_dictionary(held) else held
    if types.is_timestamp(held) and types.is_timestamp(wanted) and bool(held.tz) != bool(wanted.tz):
        return f"{held} {'has a' if held.tz else 'has no'} time zone, so it is not {sql}"
    if types.is_struct(held) and types.is_struct(wanted):
        lost = [field.name for field in held if wanted.get_field_index(field.name) < 0]
        if lost:
            return f"{sql} has no field {lost[0]!r}"
        parts = [(field.type, wanted.field(field.name).type) for field in held]
    elif types.is_map(held) and types.is_map(wanted):
        parts = [(held.key_type, wanted.key_type), (held.item_type, wanted.item_type)]
    elif _is_list(held) and types.is_list(wanted):
        parts = [(held.value_type, wanted.value_type)]
    else:
        # One of two simple types may be a time, a date, or a truth value, and the other none.
        is_text = types.is_string(held) or types.is_large_string(held) or types.is_string_view(held)
        if types.is_null(held) or is_text or types.is_string(wanted):
            return None
        kinds = (types.is_timestamp, types.is_date, types.is_temporal)
        if types.is_boolean(wanted):
            other = not types.is_boolean(held)
        else:
            other = any(kind(held) != kind(wanted) for kind in kinds)
        return f"{held} is not {sql}" if other else None
    problems = (_kind_problem(part, of, sql) for part, of in parts)
    return next(filter(None, problems), None)


def _is_list(type_: Any) -> bool:
    return bool(types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_))


def _whole(held: Any, column: SchemaColumn, time_column: str | None) -> Any:
    """Return the column cast to its type, or None when some value is at fault."""
    try:
        if types.is_integer(held.type) and types.is_decimal(column.type):
            # Arrow asks for room for every number that the type can hold; here the values are what counts.
            held = held.cast(_ANY_INTEGER)
        cast = held if held.type == column.type else held.cast(column.type, safe=True)
    except (pa.ArrowException, ValueError):
        return None
    bad_null = cast.null_count and (column.name == time_column or not column.nullable)
    # A cast to a smaller float turns what is too large into infinity.
    grown = cast is not held and _infinities(cast) != _infinities(held)
    return None if bad_null or grown else cast


def _infinities(held: Any) -> int:
    if types.is_floating(held.type):
        return pc.sum(pc.is_inf(held)).as_py() or 0
    if _is_list(held.type):
        return _infinities(pc.list_flatten(held))
    if types.is_struct(held.type):
        return sum(_infinities(pc.struct_field(held, [place])) for place in range(held.type.num_fields))
    return 0


def _row_fault(columns: list[Any], schema: Schema, time_column: str | None, row: int) -> str:
    told = []
    for held, column in zip(columns, schema.columns, strict=True):
        if _whole(held.slice(row, 1), column, time_column) is None:
            value = held[row]
            try:
                text = shown(str(value))
            except (OverflowError, ValueError):  # Arrow's times can be beyond Python's
                text = shown(value)
            reason = f"{text} is not {column.sql}" if value.is_valid else "it is null"
            told.append(f"column {column.name}: {reason}")
    return "; ".join(told)
