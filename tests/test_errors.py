from __future__ import annotations

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
)

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
        "LedgerUnusable",
        "LedgerVersionError",
        "OperatorError",
    }
    assert not errors.NotThereYet.lasting
    assert not errors.HandlerUnready.lasting
    assert not errors.ServerBuried.lasting


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
