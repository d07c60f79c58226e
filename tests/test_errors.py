from __future__ import annotations

import traceback

import pytest

from mldserver import errors
from mldserver.errors import (
    FramingError,
    MldserverError,
    NotThereYet,
    OperatorError,
    PeerError,
    folder_error,
    told_of,
    without_messages,
)

pytestmark = pytest.mark.quick

NAMES = [
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, MldserverError)
]


def test_an_error_is_one_paragraph_what_was_done_and_what_to_do() -> None:
    error = FramingError(
        "The line is too long.", did="The connection was closed.", advice="Raise line_limit."
    )
    assert str(error) == "The line is too long. The connection was closed. Raise line_limit."


def test_what_is_not_said_leaves_no_gap() -> None:
    assert str(FramingError("Too long.", advice="Raise it.")) == "Too long. Raise it."
    assert str(FramingError("Too long.")) == "Too long."


def test_an_errors_fields_go_into_the_log_without_the_empty_ones() -> None:
    error = FramingError("Too long.", did="Closed.", shard="s1", pipeline=None, sequence="", attempt=0)
    assert error.told(("shard", "attempt")) == {
        "error": "FramingError",
        "what": "Too long.",
        "did": "Closed.",
        "shard": "s1",
        "attempt": 0,
    }


def test_fields_may_hold_what_cannot_be_hashed() -> None:
    assert FramingError("x", shards=["a"], counts={"a": 1}).told(("shards",))["shards"] == ["a"]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, MldserverError)
    ],
)
def test_every_error_hangs_in_the_tree_and_says_what_it_stands_for(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, MldserverError)
    assert error.__doc__
    assert error("x").told()["error"] == name


def test_every_error_is_one_partys_fault() -> None:
    parties = {each.__name__ for each in MldserverError.__subclasses__()}
    assert parties == {
        "PeerError",
        "HandlerError",
        "LedgerError",
        "SparkError",
        "OperatorError",
        "InternalError",
    }
    assert issubclass(FramingError, PeerError)


def test_exit_code_2_is_for_what_the_next_start_would_meet_again() -> None:
    lasting = {name for name in NAMES if getattr(errors, name).lasting}
    assert lasting == {
        "ConfigError",
        "HandlerError",
        "HandlerHalted",
        "HandlerInvalid",
        "HandlerLost",
        "HandlerNotFound",
        "JavaError",
        "KeyElsewhere",
        "LedgerUnusable",
        "LedgerVersionError",
        "NoKey",
        "NotATimer",
        "OperatorError",
        "QueryFailed",
        "QueryTooLarge",
        "StateFull",
        "StateTooLarge",
    }
    assert not errors.NotThereYet.lasting
    assert not errors.HandlerUnready.lasting
    assert not errors.ServerExpired.lasting


def test_a_folder_may_come_where_none_is_and_a_file_stays_one() -> None:
    assert folder_error(FileNotFoundError()) is folder_error(PermissionError()) is NotThereYet
    for kind in (NotADirectoryError, FileExistsError, IsADirectoryError):
        assert folder_error(kind()) is OperatorError


def test_told_keeps_the_place_in_one_field_and_the_traceback_in_its_own() -> None:
    error = MldserverError("It broke.", window="w1", traceback="Traceback …", path=None)
    assert error.told() == {
        "error": "MldserverError",
        "what": "It broke.",
        "where": {"window": "w1"},
        "traceback": "Traceback …",
    }
    assert MldserverError("It broke.").told() == {"error": "MldserverError", "what": "It broke."}


def test_an_error_of_the_disk_is_told_with_what_to_do() -> None:
    told = told_of(OSError(28, "No space left on device"))
    assert set(told) == {"what", "did", "advice"}
    assert "No space left" in told["what"]
    assert told_of(MldserverError("x", did="y")) == {"error": "MldserverError", "what": "x", "did": "y"}


def test_an_error_fits_an_event_whatever_it_carries() -> None:
    error = PeerError("x", shard="s", server="one", excerpt="e")
    told = error.told({"error", "what", "shard", "excerpt"})
    assert told == {
        "error": "PeerError",
        "what": "x",
        "shard": "s",
        "excerpt": "e",
        "where": {"server": "one"},
    }
    assert "where" not in PeerError("x").told({"error", "what"})


SECRET = "4711-0815"
JAVA = f"""\
org.apache.spark.SparkException: [TASK_WRITE_FAILED] {SECRET}
 in two lines: {SECRET}
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.taskFailedError(QueryExecutionErrors.scala:776)
\tat java.base/java.lang.Thread.run(Unknown Source)
Caused by: org.postgresql.util.PSQLException: ERROR: null value violates not-null constraint
  Detail: Failing row contains ({SECRET}, null).
\t... 21 more
"""


UDF = """\
PythonException: {1}
Traceback (most recent call last):
  File "/app/h.py", line 3, in f
    return 1 / n
           ~~^~~
ValueError: {0}"""


def fail(error: Exception, cause: Exception | None = None) -> None:
    raise error from cause


def raised() -> str:
    """Return a traceback of errors that quote a row, each in its own way."""
    try:
        try:
            try:
                fail(KeyError(SECRET))
            except KeyError as error:
                fail(ValueError(f"in\nlines: {SECRET}\n    indented {SECRET}"), error)
        except ValueError:
            int(f"{SECRET}" * (1 + 1))
    except ValueError as error:
        return "".join(traceback.format_exception(error))
    raise AssertionError


def test_a_traceback_without_messages_has_its_frames_code_and_classes() -> None:
    text = without_messages(raised())
    assert SECRET not in text
    classes = [line for line in text.splitlines() if line.endswith(errors.WITHHELD)]
    assert classes == [f"{name}: {errors.WITHHELD}" for name in ("KeyError", "ValueError", "ValueError")]
    assert text.count('errors.py", line') == 5
    assert "fail(KeyError(SECRET))" in text
    assert "direct cause of" in text
    assert "During handling" in text


def test_a_group_without_messages_has_those_of_all_its_errors() -> None:
    try:
        fail(ExceptionGroup(SECRET, [ValueError(SECRET), OSError(SECRET)]))
    except ExceptionGroup as group:
        text = without_messages("".join(traceback.format_exception(group)))
    assert SECRET not in text
    for name in ("ExceptionGroup", "ValueError", "OSError"):
        assert f"| {name}: {errors.WITHHELD}" in text
    assert "fail(ExceptionGroup(" in text


def test_javas_stack_without_messages_has_its_places_and_classes() -> None:
    assert without_messages(JAVA).splitlines() == [
        f"org.apache.spark.SparkException: {errors.WITHHELD}",
        "\tat org.apache.spark.sql.errors.QueryExecutionErrors$.taskFailedError(QueryExecutionErrors.scala:776)",
        "\tat java.base/java.lang.Thread.run(Unknown Source)",
        f"Caused by: org.postgresql.util.PSQLException: {errors.WITHHELD}",
        "\t... 21 more",
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("KeyError", "KeyError"),
        ("mine.<locals>.Boom: 7", f"mine.<locals>.Boom: {errors.WITHHELD}"),
        ("a sentence about 7", errors.WITHHELD),
        (
            "Py4JJavaError: ValueError: 7 (job.py:3, in double)\nAn error occurred while calling o408.parquet.",
            f"Py4JJavaError: ValueError: {errors.WITHHELD} (job.py:3, in double)",
        ),
        (
            "PythonException: KeyError (job.py:3, in f)",
            f"PythonException: {errors.WITHHELD} (job.py:3, in f)",
        ),
        ("", errors.WITHHELD),
        (UDF.format("7", "\n  An exception was thrown:"), UDF.format(errors.WITHHELD, errors.WITHHELD)),
    ],
)
def test_without_its_message_an_error_is_its_class(text: str, shown: str) -> None:
    assert without_messages(text) == shown
