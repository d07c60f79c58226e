"""What ``process_table`` returns: row for row, or by a ``record`` column, cast to the schema."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mldserver.handler.spec import parse_schema
from mldserver.runtime.tables import TableMismatch, take_table

pytestmark = pytest.mark.quick

SCHEMA = parse_schema("name STRING NOT NULL, value DOUBLE")


def take(returned: Any, *, schema: Any = SCHEMA, time_column: Any = None, indices: Any = (10, 11, 12)) -> Any:
    return take_table(returned, schema=schema, time_column=time_column, indices=indices)


def table(**columns: Any) -> Any:
    return pa.table(columns)


def test_a_table_of_the_same_length_means_row_for_row() -> None:
    built = take(table(value=[1, 2, 3], name=["a", "b", "c"]))
    assert built.records == [10, 11, 12]
    assert built.table.schema.equals(SCHEMA.arrow)
    assert built.table.to_pylist()[0] == {"name": "a", "value": 1.0}


def test_a_record_batch_is_as_good_as_a_table() -> None:
    batch = pa.record_batch({"name": ["a", "b", "c"]})
    assert take(batch).table.column("value").to_pylist() == [None] * 3


def test_a_record_column_says_which_record_each_row_comes_from() -> None:
    built = take(table(name=["c", "a", "c2"], record=[2, 0, 2]))
    assert built.records == [10, 12, 12]
    assert built.table.column("name").to_pylist() == ["a", "c", "c2"]


def test_none_and_empty_tables_are_no_rows() -> None:
    assert take(None).table is None
    assert take(table(name=pa.array([], pa.string()), record=pa.array([], pa.int64()))).table is None


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ([("a", 1.0)], "[('a', 1.0)] is not a pyarrow.Table"),
        (table(name=["a"]), "returned 1 row for 3 records: add a column 'record'"),
        (table(name=["a"], record=["x"]), "column 'record' must hold the index"),
        (table(name=["a"], record=pa.array([None], pa.int64())), "column 'record' must hold the index"),
        (table(name=["a"], record=[3]), "column 'record': there is no record 3 among 3"),
        (table(name=["a"], record=[-1]), "column 'record': there is no record -1 among 3"),
        (table(name=["a", "b", "c"], valeu=[1, 2, 3]), "no column 'valeu'; did you mean value?"),
        (table(value=[1.0, 2.0, 3.0]), "column name is missing"),
        (
            pa.Table.from_arrays([pa.array(["a", "b", "c"])] * 2, names=["name", "name"]),
            "column name is there 2 times",
        ),
    ],
)
def test_a_table_that_cannot_be_told_apart_fails_the_whole_call(returned: Any, problem: Any) -> None:
    with pytest.raises(TableMismatch) as caught:
        take(returned)
    assert problem in str(caught.value)


def test_a_table_without_a_schema_fails_the_whole_call() -> None:
    with pytest.raises(TableMismatch, match="declares no schema"):
        take(table(name=["a"]), schema=None)
    assert take(None, schema=None).table is None


def test_values_that_do_not_fit_are_faults_of_their_records() -> None:
    built = take(table(name=["a", None, "c"], value=["1.5", "2", "x"]))
    assert built.faults == {11: "column name: it is null", 12: "column value: 'x' is not DOUBLE"}
    assert built.table.to_pylist() == [{"name": "a", "value": 1.5}]


def test_when_every_record_is_at_fault_there_is_no_table() -> None:
    built = take(table(name=pa.nulls(3, pa.string())))
    assert (built.table, sorted(built.faults)) == (None, [10, 11, 12])


def test_a_null_in_the_column_that_windows_are_cut_on_is_a_fault() -> None:
    schema = parse_schema("at TIMESTAMP")
    times = pa.array([0, None, 1], pa.timestamp("ms", tz="UTC"))
    built = take(table(at=times), schema=schema, time_column="at")
    assert built.faults == {11: "column at: it is null"}
    assert built.table.column("at").to_pylist()[0] == datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("ddl", "column", "problem"),
    [
        (
            "TIMESTAMP",
            pa.array([1], pa.timestamp("us")),
            "timestamp[us] has no time zone, so it is not TIMESTAMP",
        ),
        (
            "TIMESTAMP_NTZ",
            pa.array([1], pa.timestamp("us", tz="UTC")),
            "timestamp[us, tz=UTC] has a time zone, so it is not TIMESTAMP_NTZ",
        ),
        ("TIMESTAMP", pa.array([1]), "int64 is not TIMESTAMP"),
        ("TIMESTAMP", pa.array([1], pa.timestamp("us")).dictionary_encode(), "[us] has no time zone"),
        ("ARRAY<TIMESTAMP>", pa.array([[1]], pa.list_(pa.timestamp("us"))), "not ARRAY<TIMESTAMP>"),
        ("ARRAY<TIMESTAMP>", pa.array([[1]], pa.large_list(pa.timestamp("us"))), "not ARRAY<TIMESTAMP>"),
        (
            "MAP<STRING, TIMESTAMP_NTZ>",
            pa.array([[("a", 1)]], pa.map_(pa.string(), pa.timestamp("us", tz="UTC"))),
            "timestamp[us, tz=UTC] has a time zone, so it is not MAP<STRING, TIMESTAMP_NTZ>",
        ),
        (
            "STRUCT<a: STRUCT<b: TIMESTAMP>>",
            pa.array([{"a": {"b": 1}}], pa.struct({"a": pa.struct({"b": pa.timestamp("us")})})),
            "timestamp[us] has no time zone",
        ),
        ("STRUCT<a: INT>", pa.array([{"a": 1, "lost": 2}]), "STRUCT<`a`: INT> has no field 'lost'"),
        ("DATE", pa.array([1], pa.int32()), "int32 is not DATE"),
        ("DATE", pa.array([1], pa.timestamp("us", tz="UTC")), "timestamp[us, tz=UTC] is not DATE"),
        ("BIGINT", pa.array([1], pa.timestamp("us")), "timestamp[us] is not BIGINT"),
        ("INT", pa.array([1], pa.date32()), "date32[day] is not INT"),
        ("BOOLEAN", pa.array([5]), "int64 is not BOOLEAN"),
    ],
)
def test_columns_of_another_meaning_are_refused(ddl: Any, column: Any, problem: Any) -> None:
    with pytest.raises(TableMismatch) as caught:
        take(table(at=column), schema=parse_schema(f"at {ddl}"), indices=[0])
    assert problem in str(caught.value)


def test_text_and_nulls_can_become_times() -> None:
    schema = parse_schema("at TIMESTAMP, till TIMESTAMP")
    built = take(table(at=["1970-01-01T00:00:00Z"], till=pa.nulls(1)), schema=schema, indices=[0])
    assert built.table.to_pylist() == [{"at": datetime(1970, 1, 1, tzinfo=UTC), "till": None}]


def test_numbers_too_large_for_a_float_do_not_become_infinite() -> None:
    schema = parse_schema("x FLOAT")
    built = take(table(x=[1e300, float("inf"), 1.0]), schema=schema)
    assert built.faults == {10: "column x: '1e+300' is not FLOAT"}
    assert built.table.column("x").to_pylist() == [float("inf"), 1.0]
    assert take(table(x=[1, 2, 3]), schema=schema).faults == {}


@pytest.mark.parametrize(
    ("ddl", "wrap"),
    [
        ("ARRAY<FLOAT>", lambda number: [number, None]),
        ("STRUCT<a: INT, b: FLOAT>", lambda number: {"b": number}),
        ("ARRAY<STRUCT<b: ARRAY<FLOAT>>>", lambda number: [{"b": [number]}, None]),
    ],
)
def test_numbers_too_large_for_a_float_are_faults_inside_lists_and_structs_too(ddl: str, wrap: Any) -> None:
    built = take(table(x=[wrap(1e300), wrap(float("inf")), wrap(1.0)]), schema=parse_schema(f"x {ddl}"))
    assert (list(built.faults), built.records) == ([10], [11, 12])


@pytest.mark.parametrize(
    ("ddl", "column", "value"),
    [
        (
            "ARRAY<TIMESTAMP>",
            pa.array([["1970-01-01T00:00:00Z", None]]),
            [datetime(1970, 1, 1, tzinfo=UTC), None],
        ),
        ("STRUCT<a: INT, b: STRING>", pa.array([{"b": "x"}]), {"a": None, "b": "x"}),
        ("MAP<STRING, INT>", pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), [("a", 1)]),
        ("DATE", pa.array([date(1970, 1, 2)], pa.date64()), date(1970, 1, 2)),
        ("STRING", pa.array(["a"]).dictionary_encode(), "a"),
        (
            "TIMESTAMP",
            pa.array([0], pa.timestamp("s", tz="UTC")).dictionary_encode(),
            datetime(1970, 1, 1, tzinfo=UTC),
        ),
        ("DECIMAL(5,2)", pa.array([7]), Decimal("7.00")),
        ("BIGINT", pa.array([True]), 1),
    ],
)
def test_columns_of_the_same_meaning_are_cast(ddl: Any, column: Any, value: Any) -> None:
    built = take(table(at=column), schema=parse_schema(f"at {ddl}"), indices=[0])
    assert built.table.column("at").to_pylist() == [value]


def test_whole_numbers_become_decimals_when_they_fit() -> None:
    largest = 2**63 - 1
    built = take(table(n=[999, 1000, largest]), schema=parse_schema("n DECIMAL(5,2)"))
    assert built.faults == {
        11: "column n: '1000' is not DECIMAL(5,2)",
        12: f"column n: '{largest}' is not DECIMAL(5,2)",
    }
    assert built.table.column("n").to_pylist() == [Decimal("999.00")]


def test_a_time_beyond_pythons_is_a_fault_of_its_record_alone() -> None:
    times = pa.array([0, 2**62, 0], pa.timestamp("s", tz="UTC"))
    built = take(table(at=times), schema=parse_schema("at TIMESTAMP"))
    assert (built.records, list(built.faults)) == ([10, 12], [11])


def test_numbers_with_a_fraction_are_not_cut() -> None:
    built = take(table(n=[1.0, 1.5, 2.0]), schema=parse_schema("n BIGINT"))
    assert built.faults == {11: "column n: '1.5' is not BIGINT"}


def texts(offsets: list[int], data: bytes) -> Any:
    """Return an array of strings out of raw memory, which Arrow does not look at."""
    raw = pa.py_buffer(np.array(offsets, np.int32).tobytes())
    return pa.StringArray.from_buffers(len(offsets) - 1, raw, pa.py_buffer(data))


@pytest.mark.parametrize(
    "name",
    [
        texts([0, 1, 1_000_000_000, 3], b"abc"),
        texts([0, 2, 1, 3], b"abc"),
        texts([0, 1, 2, 3], b"a\xffc"),
        pa.DictionaryArray.from_arrays(pa.array([0, 1, 7]), pa.array(["a", "b"]), safe=False),
    ],
    ids=["beyond the end", "down", "no UTF-8", "no such entry"],
)
@pytest.mark.parametrize("record", [{}, {"record": [2, 1, 0]}], ids=["", "by record"])
def test_a_table_whose_memory_is_not_what_it_says_fails_the_whole_call(name: Any, record: Any) -> None:
    returned = pa.table({"name": name, **record})
    for each in (returned, returned.to_batches()[0]):
        with pytest.raises(TableMismatch, match="the table is damaged: "):
            take(each)
