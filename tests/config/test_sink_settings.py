from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mldserver.config.resolve import resolve, side_sinks_of
from mldserver.config.settings import Settings
from mldserver.errors import ConfigError
from mldserver.sinks.sink import SinkSpec

pytestmark = pytest.mark.quick

URL = "jdbc:postgresql://db/flights"


def settings(**given: Any) -> Settings:
    return resolve({"handler": "h", **given}, environ={}, folder=Path("/"))


def test_files_are_what_readers_read_unless_a_table_is_named() -> None:
    assert settings().sink is None
    assert settings(sink=" Parquet ").sink is None
    assert settings(sink="parquet").given()["sink"].startswith("parquet (")


@pytest.mark.parametrize(
    ("told", "sink"),
    [
        ("delta:/lake/events", SinkSpec("delta", "/lake/events")),
        ("delta:events", SinkSpec("delta", str(Path("events").absolute()))),
        ("delta:s3://bucket/events?region=r", SinkSpec("delta", "s3://bucket/events?region=r")),
        ("iceberg:lake.air.`my flights`", SinkSpec("iceberg", "lake.air.`my flights`")),
    ],
)
def test_a_table_is_named_by_its_format_and_place(told: str, sink: SinkSpec) -> None:
    given = settings(sink=told, sink_options=["mergeSchema=true"])
    assert (given.sink, given.sink_options) == (sink, {"mergeSchema": "true"})
    assert settings(sink=str(sink)).sink == sink
    assert settings(sink=sink).sink is sink


@pytest.mark.parametrize(
    "table", ["flights", "air.flights", '"my air"."flights"', "[air].[flights]", "`a b`"]
)
def test_a_database_is_named_by_its_url_and_the_table_in_it(table: str) -> None:
    given = settings(sink=URL, sink_table=f" {table} ")
    assert (given.sink, given.sink_table) == (SinkSpec("jdbc", URL.removeprefix("jdbc:")), table)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("jdbc:postgresql://me:geheim@db/x", "jdbc:postgresql://…@db/x"),
        (
            "jdbc:postgresql://db/x?user=me&password=geheim&a=b",
            "jdbc:postgresql://db/x?user=me&password=…&a=b",
        ),
        ("jdbc:sqlserver://db;password=geheim;a=b", "jdbc:sqlserver://db;password=…;a=b"),
        ("jdbc:oracle:thin:me/geheim@db:1521/x", "jdbc:oracle:thin:me/…@db:1521/x"),
        (URL, URL),
    ],
)
def test_a_password_is_not_told(url: str, shown: str) -> None:
    given = settings(sink=url, sink_table="t", sink_options=["user=me", "password=geheim"])
    assert given.sink is not None
    assert f"jdbc:{given.sink.target}" == url
    assert (str(given.sink), repr(given.sink)) == (shown, shown)
    assert "geheim" not in str(given.given())
    assert given.given()["sink_options"].startswith("user=me; password=… (")


@pytest.mark.parametrize(
    ("sink", "told"),
    [
        ("avro:/x", "it names no sink of ours or of an installed package"),
        ("parquet:/x", "it names no sink of ours or of an installed package"),
        ("delta:", "after delta: comes a path or a URI"),
        ("delta:/", "after delta: comes a path or a URI"),
        ("delta:s3a://bucket/x", "its URI begins with s3a://, not with one of .*s3"),
        ("iceberg:db.table", "after iceberg: comes CATALOG.DATABASE.TABLE"),
        ("iceberg:a.b.c; DROP", "after iceberg: comes CATALOG.DATABASE.TABLE"),
        ("jdbc:x", "it is no JDBC URL"),
        (7, "it is not text"),
    ],
)
def test_what_names_no_table_is_refused(sink: object, told: str) -> None:
    with pytest.raises(ConfigError, match=f"sink = .* is not possible: {told}"):
        settings(sink=sink)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"sink": URL}, "names a database, and no table in it: set sink_table"),
        (
            {"sink": "delta:/x", "sink_table": "t"},
            "it names the table already, and sink_table = t another one",
        ),
        ({"sink_table": "t"}, "sink_table .* means nothing without a sink"),
        ({"sink_options": ["a=b"]}, "sink_options .* means nothing without a sink"),
        ({"late_sink": URL, "sink_table": "t"}, "sink_table .* means nothing without a sink"),
        ({"late_sink": URL}, "late_sink = jdbc:.* is not a table of files"),
        (
            {"sink": "delta:/x", "late_sink": "delta:/x"},
            "sink and late_sink .* name the same table, delta:/x",
        ),
        (
            {"late_sink": "delta:/x", "sink_options": ["partition_by=week"]},
            "late_sink = delta:/x .* partition_by = week is none of day",
        ),
    ],
)
def test_settings_of_a_sink_that_do_not_fit_together_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        settings(**given)


@pytest.mark.parametrize("sink", ["parquet", "delta:/x", "iceberg:a.b.c"])
def test_options_of_the_sink_are_those_of_late_rows_too_if_the_format_is_the_same(sink: str) -> None:
    given = settings(sink=sink, late_sink="delta:/late", sink_options=["partition_by=month"])
    options = {} if sink.startswith("iceberg") else {"partition_by": "month"}
    assert side_sinks_of(given) == {"late_rows": SinkSpec("delta", "/late", "", options)}
    assert side_sinks_of(settings(dead_letters="jsonl")) == {}


def test_dead_letters_go_into_tables_too() -> None:
    given = settings(dead_letters="iceberg:a.b.letters", late_sink="delta:/late", sink_options=["type=sql"])
    assert side_sinks_of(given) == {
        "late_rows": SinkSpec("delta", "/late", "", {"type": "sql"}),
        "dead_letters": SinkSpec("iceberg", "a.b.letters", "", {"type": "sql"}),
    }
    assert given.given()["dead_letters"].startswith("iceberg:a.b.letters (")
    with pytest.raises(ConfigError, match=r"late_sink and dead_letters .* name the same table, delta:/late"):
        settings(dead_letters="delta:/late", late_sink="delta:/late")
    with pytest.raises(ConfigError, match=r"after iceberg: comes CATALOG\.DATABASE\.TABLE"):
        settings(dead_letters="iceberg:x")
