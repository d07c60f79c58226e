from __future__ import annotations

import json
from typing import Any

import pytest

from mldserver.errors import WITHHELD
from mldserver.spark.driver_session import Entry, parse


def line(**told: Any) -> str:
    return json.dumps(told)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("TRACE", "debug"),
        ("DEBUG", "debug"),
        ("INFO", "info"),
        ("WARN", "warning"),
        ("ERROR", "warning"),
        ("FATAL", "error"),
        ("NOTICE", "info"),
    ],
)
def test_log4j_levels_become_the_logs_own(name: str, level: str) -> None:
    assert parse(line(level=name, msg="m", logger="a.b.C")) == Entry(level, "m", "a.b.C")


def test_a_java_stack_is_kept_but_not_all_of_it() -> None:
    stack = "\n".join(["java.io.IOException: no", *(f"\tat x.Y.z{i}(Y.java:{i})" for i in range(100))])
    exception = parse(line(level="ERROR", msg="m", exception=stack)).exception.splitlines()
    assert exception[:2] == ["java.io.IOException: no", "\tat x.Y.z0(Y.java:0)"]
    assert exception[-1] == "\t… 61 more"
    assert len(exception) == 41


def test_pysparks_own_logger_tells_its_exception_in_parts() -> None:
    entry = parse(
        line(level="ERROR", msg="m", logger="X", exception={"class": "E", "msg": "no", "stacktrace": []})
    )
    assert entry.exception == "E: no"


def test_what_only_repeats_a_jobs_error_is_for_developers() -> None:
    assert parse(line(level="ERROR", msg="m", logger="DataFrameQueryContextLogger")).level == "debug"


def test_what_is_said_at_every_start_is_for_developers() -> None:
    assert parse("WARNING: Using incubator modules: jdk.incubator.vector").level == "debug"
    told = "Unable to load native-hadoop library for your platform..."
    assert parse(line(level="WARN", msg=told)).level == "debug"


def test_tasks_of_a_job_that_the_server_has_cancelled_are_no_news() -> None:
    killed = (
        "Lost task 0.0 in stage 251.0 (TID 259) (localhost executor driver): TaskKilled (Stage cancelled: [SPARK_JOB_CANCELLED]"
        " Job 170 cancelled part of cancelled job group mldserver-84-window-w0 SQLSTATE: XXKDA)"
    )
    assert parse(line(level="WARN", msg=killed)).level == "debug"
    assert parse(line(level="WARN", msg=killed.replace("cancelled job group", "another"))).level == "warning"


@pytest.mark.parametrize("text", ["hello", "{not json", '{"a": 1}', '{"level": "INFO"}', "", "{}"])
def test_any_other_line_is_passed_on_as_it_is(text: str) -> None:
    assert parse(text) == Entry("info", text)


STACK = "org.postgresql.util.PSQLException: ERROR: no\n  Detail: Failing row contains (4711).\n\tat a.B.c(B.java:1)"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "Lost task 0.0 in stage 1.0 (TID 5): java.lang.RuntimeException: no 4711",
            f"Lost task 0.0 in stage 1.0 (TID 5): java.lang.RuntimeException: {WITHHELD}",
        ),
        ("Lost executor 1: worker lost", "Lost executor 1: worker lost"),
        ("ValueError: 4711", f"ValueError: {WITHHELD}"),
    ],
)
def test_sparks_log_can_be_told_without_what_errors_say(said: str, shown: str) -> None:
    entry = parse(line(level="WARN", msg=said, logger="X", exception=STACK)).without_messages()
    stack = f"org.postgresql.util.PSQLException: {WITHHELD}\n\tat a.B.c(B.java:1)"
    assert entry == Entry("warning", shown, "X", stack)
    assert parse(line(level="WARN", msg=said, logger="X")).without_messages().exception == ""
