"""What hooks return, into tables: good rows stay, records at fault are named."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.handler.spec import parse_schema
from mldserver.runtime.rows import BadRow, RowBuilder

pytestmark = pytest.mark.quick

SCHEMA = parse_schema("carrier STRING NOT NULL, delay DOUBLE, at TIMESTAMP")
AT = "2013-01-01T10:15:00Z"


def build(*returned: Any, time_column: Any = None, schema: Any = SCHEMA) -> Any:
    return RowBuilder(schema, time_column=time_column).build(enumerate(returned))


class Flight(NamedTuple):
    carrier: str
    delay: float
    at: str


class Hostile(Mapping):
    def __repr__(self) -> str:
        return "<hostile>"

    def __getitem__(self, key: Any) -> None:
        raise RuntimeError("no")

    def __len__(self) -> Any:
        return 1

    def __iter__(self) -> None:
        raise SystemError("no")


HOSTILE = Hostile()


def test_tuples_dicts_lists_and_none_make_rows_in_order() -> None:
    built = build(
        ("UA", 1.0, AT),
        None,
        {"delay": 2.0, "carrier": "AA"},
        [("B6", None, None), {"carrier": "DL"}],
        [],
        Flight("F9", 3.0, AT),
    )
    assert built.faults == {}
    assert built.records == [0, 2, 3, 3, 5]
    assert built.table.column("carrier").to_pylist() == ["UA", "AA", "B6", "DL", "F9"]
    assert built.table.column("delay").to_pylist() == [1.0, 2.0, None, None, 3.0]
    assert built.table.schema.equals(SCHEMA.arrow)


def test_no_rows_make_no_table() -> None:
    assert build(None, []) == build()
    assert build().table is None


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (("UA", "x", AT), "column delay: 'x' is not DOUBLE"),
        (
            ("UA", "x", "y"),
            "column delay: 'x' is not DOUBLE; column at: 'y' is not TIMESTAMP: it is not ISO-8601",
        ),
        ((None, 1.0, AT), "column carrier: it is null, but declared NOT NULL"),
        ({"delay": 1.0}, "column carrier: it is null, but declared NOT NULL"),
        (("UA", 1.0), "returned 2 values for 3 columns (carrier, delay, at)"),
        (("UA",), "returned 1 value for 3 columns (carrier, delay, at)"),
        ({"carrier": "UA", "dely": 1.0}, "the schema has no column 'dely'; did you mean delay?"),
        ({"carrier": "UA", 7: 1.0}, "the schema has no column 7; its columns are carrier, delay, at"),
        ("UA", "'UA' is not a row: return a tuple, a dict, a list of rows, or None"),
        (["UA", 1.0, AT], "'UA' is not a row: return a tuple, a dict, a list of rows, or None"),
        ([("UA", 1.0, AT), ("UA", "x", AT)], "column delay: 'x' is not DOUBLE"),
        (HOSTILE, "<hostile> is not a row"),
    ],
)
def test_a_record_at_fault_is_named_and_the_others_keep_their_rows(value: Any, fault: Any) -> None:
    built = build(("AA", 1.0, AT), value, ("B6", 2.0, AT))
    assert list(built.faults) == [1]
    assert built.faults[1].startswith(fault)
    assert built.records == [0, 2]
    assert built.table.column("carrier").to_pylist() == ["AA", "B6"]


def test_a_null_in_the_column_that_windows_are_cut_on_is_a_fault() -> None:
    built = build(("UA", 1.0, None), ("AA", 1.0, AT), time_column="at")
    assert built.faults == {0: "column at: it is null, but windows are cut on it"}
    assert built.records == [1]


def test_when_every_record_is_at_fault_there_is_no_table() -> None:
    built = build(("UA", "x", AT), ("UA", "y", AT))
    assert (built.table, built.records, sorted(built.faults)) == (None, [], [0, 1])


def test_rows_without_a_schema_are_a_fault_of_each_record() -> None:
    built = build(None, ("UA",), [], {"a": 1}, [1], (), schema=None)
    assert built.faults == {
        1: "returned ('UA',), but the handler declares no schema",
        3: "returned {'a': 1}, but the handler declares no schema",
        4: "returned 1, but the handler declares no schema",
        5: "returned (), but the handler declares no schema",
    }
    assert built.table is None


VALUE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
ROW = st.tuples(VALUE, VALUE) | st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUE) | VALUE


@given(st.lists(ROW | st.lists(ROW, max_size=3)))
def test_every_record_is_either_in_the_table_or_at_fault(returned: Any) -> None:
    schema = parse_schema("a BIGINT NOT NULL, b STRING")
    built = build(*returned, schema=schema)
    wanted = [0 if value is None else len(value) if isinstance(value, list) else 1 for value in returned]
    assert not set(built.faults) & set(built.records)
    for record, rows in enumerate(wanted):
        assert built.records.count(record) == (0 if record in built.faults else rows)
    assert built.records == sorted(built.records)
    if built.table is not None:
        assert built.table.num_rows == len(built.records)
        assert built.table.column("a").null_count == 0
        assert isinstance(built.table, pa.Table)


def taken(*returned: Any, schema: Any = SCHEMA, **options: Any) -> Any:
    rows = RowBuilder(schema, **options)
    return [value if type(value) in rows.plain else rows.convert(value) for value in returned]


NESTED = parse_schema(
    "tags ARRAY<STRING>, of STRUCT<a: ARRAY<INT>, b: BINARY>, more MAP<STRING, ARRAY<INT>>, raw BINARY"
)


def test_what_is_taken_gives_the_rows_that_it_would_have_given() -> None:
    returned = (
        ("UA", 1.0, AT),
        None,
        {"delay": 2.0, "carrier": "AA"},
        [("B6", None, None), {"carrier": "DL"}],
        [],
        [("UA", 1.0)],
        Flight("F9", 3.0, AT),
        {"carier": "AA"},
        {},
        ("UA",),
        [("UA", None, AT)] * 2,
        [("UA", 1.0, AT)],
        5,
    )
    of_taken, of_these = build(*taken(*returned)), build(*returned)
    assert (of_taken.records, of_taken.faults) == (of_these.records, of_these.faults)
    assert of_taken.table.equals(of_these.table)
    assert sorted(of_taken.faults) == [5, 7, 8, 9, 12]


def test_what_is_taken_cannot_be_changed_any_more() -> None:
    def row() -> dict[str, Any]:
        return {
            "tags": ["a"],
            "of": {"a": (1, 2), "b": bytearray(b"x")},
            "more": {"m": np.array([1])},
            "raw": bytearray(b"y"),
        }

    mine = row()
    kept = taken(
        mine, tuple(mine.values()), [mine, tuple(mine.values())], [tuple(mine.values())], schema=NESTED
    )
    before = build(row(), schema=NESTED).table.to_pylist()
    mine["tags"].append("b")
    mine["of"]["b"][0] = 0
    mine["of"]["a"] = None
    mine["more"]["m"][0] = 7
    mine["more"]["n"] = []
    mine["raw"][0] = 0
    assert build(*kept, schema=NESTED).table.to_pylist() == before * 5


@pytest.mark.parametrize(
    "wrong",
    [
        (None, 1.0, AT),
        ("UA", "x", AT),
        ("UA", 1.0, "noon"),
        ("UA", 1.0),
        {"carier": "UA"},
        [("UA", 1.0, AT), ("UA", "x", AT)],
        [("UA",)],
        5,
    ],
)
def test_where_faults_are_to_be_found_at_once_they_are_the_same(wrong: Any) -> None:
    (late,) = build(wrong).faults.values()
    with pytest.raises(BadRow) as caught:
        taken(wrong, at_once=True)
    assert str(caught.value) == late


def test_a_null_in_the_column_that_windows_are_cut_on_is_found_at_once_too() -> None:
    with pytest.raises(BadRow, match="windows are cut on it"):
        taken(("UA", 1.0, None), at_once=True, time_column="at")


def test_without_a_schema_nothing_can_be_taken() -> None:
    assert taken(None, [], schema=None, at_once=True) == [None, []]
    for value in ((), {}, [()]):
        with pytest.raises(BadRow, match="declares no schema"):
            taken(value, schema=None, at_once=True)


ONE_COLUMN = [
    parse_schema(f"x {kind}")
    for kind in (
        *(
            "INT",
            "BIGINT",
            "TINYINT",
            "DOUBLE",
            "FLOAT",
            "STRING",
            "BINARY",
            "BOOLEAN",
            "DECIMAL(5,2)",
            "DATE",
        ),
        *("TIMESTAMP", "TIMESTAMP_NTZ", "ARRAY<INT>", "MAP<STRING, INT>", "STRUCT<x: INT>"),
        *("INT NOT NULL", "ARRAY<DOUBLE>"),
    )
]
ANY_VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-130, 130),
    st.floats(),
    st.text(st.characters(), max_size=3),
    st.binary(max_size=3),
    st.decimals(allow_nan=False, allow_infinity=False, places=2),
    st.dates(),
    st.datetimes(),
    st.datetimes(timezones=st.just(UTC)),
    st.lists(st.integers(-(2**40), 2**40) | st.none(), max_size=3),
    st.dictionaries(st.sampled_from("xy"), st.integers(), max_size=2),
)


@given(st.sampled_from(ONE_COLUMN), ANY_VALUE)
def test_a_fault_is_found_at_once_when_and_only_when_it_is_found_at_the_end(schema: Any, value: Any) -> None:
    built = build((value,), schema=schema)
    if not built.faults:
        kept = taken((value,), schema=schema, at_once=True)
        assert repr(build(*kept, schema=schema).table.to_pylist()) == repr(built.table.to_pylist())
        return
    with pytest.raises(BadRow) as caught:
        taken((value,), schema=schema, at_once=True)
    assert str(caught.value) == built.faults[0]
