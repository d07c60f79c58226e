"""Strict reading of single fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mldserver.errors import DecodeError
from mldserver.protocol.codec import (
    decode,
    excerpt,
    is_sequence,
    optional_long,
    optional_text,
    wrong,
)
from mldserver.protocol.messages import Initialize

pytestmark = [pytest.mark.quick, pytest.mark.core]


@pytest.mark.parametrize("value", [0, 1, 2**63 - 1, None])
def test_a_long_is_an_integer_of_java_or_null(value: int | None) -> None:
    assert optional_long({"n": value}, "n") == value


@pytest.mark.parametrize("value", [-1, 2**63, True, 1.0, "1", [], {}])
def test_anything_else_is_no_long(value: object) -> None:
    with pytest.raises(DecodeError, match="Field n must be an integer"):
        optional_long({"n": value}, "n")


def test_a_missing_field_counts_as_null() -> None:
    assert optional_long({}, "n") is None
    assert optional_text({}, "t") is None


@pytest.mark.parametrize("value", [1, True, [], {}])
def test_a_text_is_a_text(value: object) -> None:
    with pytest.raises(DecodeError, match="Field t must be a text or null"):
        optional_text({"t": value}, "t")


@pytest.mark.parametrize(
    ("value", "is_one"), [("0", True), ("007", True), ("9" * 129, True), ("9" * 130, False)]
)
def test_a_sequence_has_a_bounded_number_of_digits(value: str, *, is_one: bool) -> None:
    assert is_sequence(value) is is_one


@pytest.mark.parametrize("value", ["", "-1", "1.0", "٣", "²", " 1", "1 ", 1, None, True])
def test_only_ascii_digits_make_a_sequence(value: object) -> None:
    assert not is_sequence(value)


def started(at: object) -> str | None:
    message = decode(json.dumps({"action": "initialize", "shardId": "s", "sequenceNumber": at}).encode())
    assert isinstance(message, Initialize)
    return message.sequence_number


@pytest.mark.parametrize("value", [None, "TRIM_HORIZON", "LATEST", "AT_TIMESTAMP", "SHARD_END", "495"])
def test_a_start_is_digits_a_sentinel_or_null(value: str | None) -> None:
    assert started(value) == value


@pytest.mark.parametrize("value", ["latest", "", "12x", 12])
def test_any_other_start_is_refused(value: Any) -> None:
    with pytest.raises(DecodeError, match="Field sequenceNumber must be"):
        started(value)


def test_a_long_value_is_cut_in_the_error() -> None:
    assert len(str(wrong("f", "x" * 1000, "short", where="records[3]"))) < 200
    assert "records[3].f" in str(wrong("f", 1, "a text", where="records[3]"))


def test_an_excerpt_is_short_and_safe_to_log() -> None:
    assert excerpt(b"\xff\n" + b"a" * 1000) == "\\xff\n" + "a" * 78
