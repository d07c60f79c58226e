"""Python values into Arrow columns: nothing changes its meaning in silence."""

from __future__ import annotations

import enum
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.handler.spec import parse_schema
from mldserver.runtime.values import converter, shown

pytestmark = pytest.mark.quick


def column(ddl: Any) -> Any:
    (found,) = parse_schema(f"c {ddl}").columns
    return converter(found.sql, found.type)


class Colour(enum.StrEnum):
    RED = "red"


class Day(date):
    pass


class Unprintable:
    def __repr__(self) -> None:
        raise RuntimeError("no")


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NOON = datetime(2020, 7, 1, 12, tzinfo=UTC)
MIN, MAX = datetime(2, 1, 1), datetime(9998, 1, 1)  # noqa: DTZ001  # hypothesis wants bounds without a zone
PARIS = timezone(timedelta(hours=2))


@pytest.mark.parametrize(
    ("ddl", "value", "held"),
    [
        ("BOOLEAN", True, True),
        ("BOOLEAN", np.bool_(False), False),
        ("INT", 7, 7),
        ("INT", np.int16(7), 7),
        ("BIGINT", 7.0, 7),
        ("BIGINT", Decimal("7.00"), 7),
        ("DOUBLE", 1, 1.0),
        ("DOUBLE", np.float32(0.5), 0.5),
        ("DOUBLE", Decimal("1.5"), 1.5),
        ("FLOAT", 0.5, 0.5),
        ("FLOAT", float("inf"), float("inf")),
        ("STRING", "é中", "é中"),
        ("STRING", np.str_("a"), "a"),
        ("STRING", Colour.RED, "red"),
        ("BINARY", b"a", b"a"),
        ("BINARY", bytearray(b"a"), b"a"),
        ("BINARY", memoryview(b"a"), b"a"),
        ("DECIMAL(6,2)", Decimal("12.34"), Decimal("12.34")),
        ("DECIMAL(6,2)", 12, Decimal("12.00")),
        ("DECIMAL(6,2)", 12.34, Decimal("12.34")),
        ("DECIMAL(6,2)", "12.34", Decimal("12.34")),
        ("DECIMAL(6,2)", np.int64(12), Decimal("12.00")),
        ("DATE", date(2020, 7, 1), date(2020, 7, 1)),
        ("DATE", "2020-07-01", date(2020, 7, 1)),
        ("DATE", Day(2020, 7, 1), date(2020, 7, 1)),
        ("DATE", np.datetime64("2020-07-01"), date(2020, 7, 1)),
        ("TIMESTAMP", NOON, NOON),
        ("TIMESTAMP", NOON.astimezone(PARIS), NOON),
        ("TIMESTAMP", "2020-07-01T12:00:00Z", NOON),
        ("TIMESTAMP", "2020-07-01T14:00:00.000+02:00", NOON),
        ("TIMESTAMP", pd.Timestamp("2020-07-01 14:00", tz="Europe/Paris"), NOON),
        ("TIMESTAMP", pd.NaT, None),
        ("TIMESTAMP_NTZ", datetime(2020, 7, 1, 12), datetime(2020, 7, 1, 12)),  # noqa: DTZ001  # that is its point
        ("TIMESTAMP_NTZ", "2020-07-01 12:00:00", datetime(2020, 7, 1, 12)),  # noqa: DTZ001  # that is its point
        ("ARRAY<INT>", [1, None], [1, None]),
        ("ARRAY<INT>", (1, 2), [1, 2]),
        ("ARRAY<DOUBLE>", np.array([1.5]), [1.5]),
        ("ARRAY<TIMESTAMP>", ["2020-07-01T12:00:00Z"], [NOON]),
        ("MAP<STRING, DATE>", {"a": "2020-07-01"}, [("a", date(2020, 7, 1))]),
        ("STRUCT<a: INT, b: STRING>", {"a": 1}, {"a": 1, "b": None}),
        ("STRUCT<a: INT, b: STRING>", (1, "x"), {"a": 1, "b": "x"}),
        ("DOUBLE", pd.NA, None),
        ("DOUBLE", None, None),
    ],
)
def test_a_value_keeps_its_meaning(ddl: Any, value: Any, held: Any) -> None:
    convert = column(ddl)
    assert convert.fault(value) is None
    # Plain values beside it take the column's fast path away, or not: both must agree.
    assert convert.array([value]).to_pylist() == [held]
    assert convert.array([None, value]).to_pylist() == [None, held]


@pytest.mark.parametrize(
    ("ddl", "value", "reason"),
    [
        ("BOOLEAN", 1, "1 is not BOOLEAN"),
        ("INT", "7", "'7' is not INT"),
        ("INT", True, "True is not INT"),
        ("INT", 1.5, "1.5 is not INT: it is no whole number"),
        ("INT", float("nan"), "nan is not INT: it is no whole number"),
        ("TINYINT", 300, "300 is not TINYINT"),
        ("BIGINT", 2**64, "18446744073709551616 is not BIGINT"),
        ("DOUBLE", "x", "'x' is not DOUBLE"),
        ("DOUBLE", True, "True is not DOUBLE"),
        ("FLOAT", 1e300, "1e+300 is not FLOAT: it is too large"),
        ("DOUBLE", Decimal("1e400"), "Decimal('1E+400') is not DOUBLE: it is too large"),
        ("FLOAT", Decimal("-1e400"), "Decimal('-1E+400') is not FLOAT: it is too large"),
        ("STRING", 1, "1 is not STRING"),
        ("STRING", b"x", "b'x' is not STRING: decode it first"),
        ("STRING", "\ud800", "'\\ud800' is not STRING"),
        ("BINARY", "x", "'x' is not BINARY"),
        ("DECIMAL(6,2)", True, "True is not DECIMAL(6,2)"),
        ("DECIMAL(6,2)", "x", "'x' is not DECIMAL(6,2)"),
        ("DECIMAL(6,2)", 1.234, "1.234 is not DECIMAL(6,2)"),
        ("DECIMAL(6,2)", Decimal("NaN"), "Decimal('NaN') is not DECIMAL(6,2)"),
        ("DECIMAL(6,2)", 123456, "123456 is not DECIMAL(6,2)"),
        ("DATE", 5, "5 is not DATE"),
        ("DATE", "yesterday", "'yesterday' is not DATE: it is not ISO-8601"),
        ("TIMESTAMP", 5, "5 is not TIMESTAMP: it wants a datetime or ISO-8601 text"),
        ("TIMESTAMP", date(2020, 1, 1), "is not TIMESTAMP: it wants a datetime or ISO-8601 text"),
        ("TIMESTAMP", "noon", "'noon' is not TIMESTAMP: it is not ISO-8601"),
        ("TIMESTAMP", "2020-07-01T12:00:00", "is not TIMESTAMP: it has no time zone"),
        ("TIMESTAMP", np.datetime64("2020-07-01T12:00:00"), "it has no time zone (give it one, or declare"),
        ("TIMESTAMP_NTZ", NOON, "it has a time zone (declare the column TIMESTAMP)"),
        ("DATE", NOON, "is not DATE: it is a point in time, use .date()"),
        ("ARRAY<STRING>", "ab", "'ab' is not ARRAY<STRING>: it wants a list"),
        ("ARRAY<DOUBLE>", ["x"], "['x'] is not ARRAY<DOUBLE>"),
        ("MAP<STRING, INT>", [1], "[1] is not MAP<STRING, INT>: it wants a dict"),
        ("MAP<STRING, INT>", {None: 1}, "{None: 1} is not MAP<STRING, INT>"),
        ("STRUCT<a: INT>", {"b": 1}, "it has no field 'b'"),
        ("STRUCT<a: INT, b: INT>", (1,), "it wants a dict or a tuple of 2"),
        ("DOUBLE", np.longdouble("1.5"), "is not DOUBLE"),
        ("DOUBLE", Unprintable(), "<Unprintable instance at"),
    ],
)
def test_a_value_that_does_not_fit_is_told_with_its_reason(ddl: Any, value: Any, reason: Any) -> None:
    convert = column(ddl)
    assert reason in str(convert.fault(value))
    with pytest.raises(Exception):  # noqa: B017,PT011  # whatever Arrow or Python raises: rows.py catches all
        convert.array([value])


def test_nan_stays_nan_and_is_not_null() -> None:
    array = column("DOUBLE").array([float("nan"), np.float64("nan"), None])
    assert array.null_count == 1
    assert [value != value for value in array.to_pylist()[:2]] == [True, True]  # the test for NaN


def test_long_values_are_shortened_in_messages() -> None:
    assert len(shown("x" * 10_000)) < 100


def test_a_value_that_cannot_be_shown_is_told_by_its_type() -> None:
    assert shown(10**5000) == "<int without a repr>"


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)))
def test_integers_come_through_unchanged(values: Any) -> None:
    assert column("BIGINT").array(values).to_pylist() == values


@given(st.lists(st.datetimes(MIN, MAX, timezones=st.timezones() | st.just(UTC), allow_imaginary=False)))
def test_points_in_time_come_through_unchanged_as_datetimes_and_as_text(values: Any) -> None:
    convert = column("TIMESTAMP")
    expected = pa.array([(v - EPOCH) // timedelta(microseconds=1) for v in values], pa.int64())
    assert convert.array(values).cast(pa.int64()).equals(expected)
    texts = [value.astimezone(UTC).isoformat() for value in values]
    assert convert.array(texts).cast(pa.int64()).equals(expected)


@given(st.lists(st.floats(width=32), min_size=1))
def test_the_bulk_and_the_single_value_agree(values: Any) -> None:
    convert = column("FLOAT")
    assert all(convert.fault(value) is None for value in values)
    assert len(convert.array(values)) == len(values)


@pytest.mark.parametrize(
    ("ddl", "value"),
    [
        *(("BOOLEAN", True), ("TINYINT", -128), ("INT", 2**31 - 1), ("BIGINT", -(2**63)), ("DOUBLE", 1.5)),
        *(("STRING", "text"), ("BINARY", b"a"), ("DATE", date(2020, 7, 1)), ("TIMESTAMP", NOON)),
        ("TIMESTAMP_NTZ", NOON.replace(tzinfo=None)),
    ],
)
def test_usual_values_need_no_arrow_to_be_known_as_good(ddl: str, value: Any) -> None:
    assert column(ddl).certain(value)


@pytest.mark.parametrize(
    ("ddl", "value"),
    [
        *(("BOOLEAN", 1), ("TINYINT", 128), ("INT", True), ("BIGINT", 2**63), ("DOUBLE", 1), ("FLOAT", 1.5)),
        *(("STRING", "\ud800"), ("BINARY", "a"), ("DATE", NOON), ("TIMESTAMP", NOON.replace(tzinfo=None))),
        *(("TIMESTAMP_NTZ", NOON), ("ARRAY<INT>", [1]), ("DECIMAL(5,2)", Decimal(1))),
    ],
)
def test_other_values_are_looked_at_by_arrow(ddl: str, value: Any) -> None:
    assert not column(ddl).certain(value)
