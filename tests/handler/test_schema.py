"""The schema parser: Spark DDL into columns and Arrow types."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest

from mldserver.handler import spec
from mldserver.handler.spec import SchemaError, parse_schema

pytestmark = pytest.mark.quick

UTC_TIME = pa.timestamp("us", tz="UTC")


@pytest.mark.parametrize(
    ("ddl", "sql", "arrow"),
    [
        ("BOOLEAN", "BOOLEAN", pa.bool_()),
        ("TINYINT", "TINYINT", pa.int8()),
        ("BYTE", "TINYINT", pa.int8()),
        ("SMALLINT", "SMALLINT", pa.int16()),
        ("SHORT", "SMALLINT", pa.int16()),
        ("INT", "INT", pa.int32()),
        ("INTEGER", "INT", pa.int32()),
        ("BIGINT", "BIGINT", pa.int64()),
        ("long", "BIGINT", pa.int64()),
        ("FLOAT", "FLOAT", pa.float32()),
        ("REAL", "FLOAT", pa.float32()),
        ("DOUBLE", "DOUBLE", pa.float64()),
        ("STRING", "STRING", pa.string()),
        ("BINARY", "BINARY", pa.binary()),
        ("DATE", "DATE", pa.date32()),
        ("TIMESTAMP", "TIMESTAMP", UTC_TIME),
        ("TIMESTAMP_LTZ", "TIMESTAMP", UTC_TIME),
        ("TIMESTAMP_NTZ", "TIMESTAMP_NTZ", pa.timestamp("us")),
        ("DECIMAL", "DECIMAL(10,0)", pa.decimal128(10, 0)),
        ("DECIMAL(5)", "DECIMAL(5,0)", pa.decimal128(5, 0)),
        ("NUMERIC(38, 18)", "DECIMAL(38,18)", pa.decimal128(38, 18)),
        ("ARRAY<INT>", "ARRAY<INT>", pa.list_(pa.int32())),
        ("MAP<STRING, DATE>", "MAP<STRING, DATE>", pa.map_(pa.string(), pa.date32())),
        (
            "STRUCT<a: INT, b: ARRAY<DECIMAL(4,2)>>",
            "STRUCT<`a`: INT, `b`: ARRAY<DECIMAL(4,2)>>",
            pa.struct([("a", pa.int32()), ("b", pa.list_(pa.decimal128(4, 2)))]),
        ),
    ],
)
def test_each_type_has_its_arrow_type(ddl: Any, sql: Any, arrow: Any) -> None:
    (column,) = parse_schema(f"c {ddl}").columns
    assert (column.sql, column.type) == (sql, arrow)


@pytest.mark.parametrize("null", ["", " NOT NULL", " not  null\n"])
def test_plain_columns_are_what_the_parser_makes_of_them(monkeypatch: pytest.MonkeyPatch, null: str) -> None:
    known = ("BOOLEAN", "tinyint", "SMALLINT", "INT", "BIGINT", "FLOAT", "Double", "STRING", "BINARY", "DATE")
    for sql in (*known, "TIMESTAMP", "TIMESTAMP_NTZ"):
        plain = f"a {sql}{null}, `b 2`\t{sql}"
        *parsed, _ = parse_schema(f"{plain}, c INT COMMENT ''").columns
        with monkeypatch.context() as alone:
            alone.setattr(spec, "_definitions", lambda _: pytest.fail("the parser is asked"))
            assert list(parse_schema(plain).columns) == parsed


def test_only_what_is_not_plain_needs_the_parser() -> None:
    script = "import sys\nfrom mldserver.handler.spec import parse_schema\n"
    for ddl in ("parse_schema('a INT, b DATE').ddl", "'a INTEGER'"):
        script += f"parse_schema({ddl}); print('sqlglot' in sys.modules)\n"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).split() == ["False", "True"]


def test_not_null_comments_and_backticks_are_kept() -> None:
    schema = parse_schema("`strange ``name` STRING NOT NULL COMMENT 'it\\'s', n INT NULL")
    strange, n = schema.columns
    assert (strange.name, strange.nullable, strange.comment) == ("strange `name", False, "it's")
    assert (n.name, n.nullable, n.comment) == ("n", True, None)
    assert schema.names == ("strange `name", "n")


def test_the_ddl_that_it_writes_reads_back_as_the_same_schema() -> None:
    schema = parse_schema(
        "`a ``b` STRING NOT NULL COMMENT 'it\\'s \"x\"', m MAP<STRING, STRUCT<`x y`: INT>>, t TIMESTAMP, d DECIMAL(7,3)"
    )
    assert parse_schema(schema.ddl) == schema


def test_the_arrow_schema_says_which_columns_can_be_null() -> None:
    arrow = parse_schema("a INT NOT NULL, b TIMESTAMP").arrow
    assert arrow.equals(pa.schema([pa.field("a", pa.int32(), nullable=False), pa.field("b", UTC_TIME)]))


def test_a_column_is_found_by_its_exact_name() -> None:
    schema = parse_schema("a INT")
    assert schema.column("a") is schema.columns[0]
    assert schema.column("A") is None


@pytest.mark.parametrize(
    ("ddl", "problem"),
    [
        ("", "it is empty; a schema has at least one column, as in 'carrier STRING'"),
        ("carrier STRIG", "it cannot be read at 'STRIG'; did you mean STRING?"),
        ("a INT b INT", "it cannot be read at 'b'; types are BOOLEAN, TINYINT"),
        ("a ARRAY<NOPE>", "it cannot be read at 'NOPE'; types are"),
        ("'", "it is not Spark DDL such as 'carrier STRING, delay DOUBLE'"),
        ("carrier", "column carrier has no type (write: carrier STRING)"),
        ("a INT, PRIMARY KEY (a)", "'PRIMARY KEY (a)' is not a column (write: name TYPE)"),
        ("a.b INT", "is not a column (write: name TYPE)"),
        ("a INT DEFAULT 5", "column a: DEFAULT 5 has no meaning in a handler's schema"),
        ("a INT PRIMARY KEY", "column a: PRIMARY KEY has no meaning in a handler's schema"),
        ("a INT GENERATED ALWAYS AS (b + 1)", "has no meaning in a handler's schema"),
        ("select 1", "it is not a list of columns"),
        ("a INT) COMMENT 'x' -- ", "it cannot be read at ')'"),
        ("a COMMENT 'x'", "column a: it has no type"),
        ("a VARIANT", "column a: VARIANT is not supported; types are"),
        ("a INTERVAL DAY TO SECOND", "column a: INTERVAL DAY TO SECOND is not supported"),
        ("a VARCHAR(10)", "column a: VARCHAR(10): lengths are not enforced, write STRING"),
        ("a CHAR(3)", "column a: CHAR(3): lengths are not enforced, write STRING"),
        ("a DECIMAL(50, 2)", "column a: DECIMAL(50,2): precision is 1 to 38, scale at most the precision"),
        ("a DECIMAL(2, 5)", "column a: DECIMAL(2,5): precision is 1 to 38, scale at most the precision"),
        ("a DECIMAL(x)", "is not DECIMAL(precision, scale)"),
        ("a DECIMAL(1, 2, 3)", "is not DECIMAL(precision, scale)"),
        ("a ARRAY", "column a: ARRAY needs one element type, as in ARRAY<STRING>"),
        ("a MAP<STRING>", "column a: MAP needs a key type and a value type, as in MAP<STRING, DOUBLE>"),
        ("a STRUCT", "column a: STRUCT needs fields, as in STRUCT<street: STRING, number: INT>"),
        ("a STRUCT<x: INT NOT NULL>", "column a: field x: only whole columns can be NOT NULL"),
        ("a STRUCT<x: INT, X: INT>", "column a: field X is there twice"),
        ("a STRUCT<x: VARIANT>", "column a: column x: VARIANT is not supported"),
        ("_time INT", "column _time: names that begin with an underscore are the server's own"),
        ("a INT, A STRING", "column A is there twice (Spark ignores case)"),
        ("a " + "ARRAY<" * 3000 + "INT" + ">" * 3000, "nested too deeply"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(ddl: Any, problem: Any) -> None:
    with pytest.raises(SchemaError) as caught:
        parse_schema(ddl)
    assert problem in str(caught.value)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(SchemaError) as caught:
        parse_schema("a VARIANT, _b INT, c CHAR(2)")
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "column a",
        "column c",
        "column _b",
    ]
