"""Where a stream is read from: what users may give, and tokens that they can read."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.dynamodb_streams.positions import ReadPosition, Token, parse_position
from mldserver.dynamodb_streams.shard_tree import LATEST, TRIM_HORIZON, After, At, Since
from mldserver.errors import ConfigError

pytestmark = pytest.mark.quick

ARN = "arn:aws:dynamodb:eu-west-1:123456789012:table/orders/stream/2026-11-22T00:00:00.000"
NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
NOON_MS = int(NOON.timestamp() * 1000)
NUMBER = 495_000_000_000_000_000_000_123

TOKEN = Token(
    ARN,
    (
        ReadPosition("shardId-1", None, After(NUMBER), NOON_MS),
        ReadPosition("shardId-2", "shardId-0", TRIM_HORIZON, NOON_MS - 1),
        ReadPosition("shardId-3", "shardId-0", Since(NOON_MS + 1)),
        ReadPosition("shardId-4", "shardId-0", At(7)),
    ),
    NOON_MS + 1,
)


@pytest.mark.parametrize("name", ["trim_horizon", "TRIM_HORIZON", "Trim_Horizon", " trim-horizon\n"])
def test_trap_06_names_are_taken_in_any_case(name: str) -> None:
    assert parse_position(name) is TRIM_HORIZON


@pytest.mark.parametrize("name", ["latest", "LATEST", "Latest"])
def test_trap_06_latest_is_taken_in_any_case(name: str) -> None:
    assert parse_position(name) is LATEST


@pytest.mark.parametrize("naive", [NOON.replace(tzinfo=None), "2026-11-22T12:00:00", "2026-11-22"])
def test_trap_06_a_naive_time_is_refused_and_the_error_says_why(naive: object) -> None:
    with pytest.raises(ConfigError, match="has no offset: it means another instant on every host"):
        parse_position(naive)


@pytest.mark.parametrize(
    "time",
    [
        NOON,
        NOON.astimezone(timezone(timedelta(hours=2))),
        "2026-11-22T12:00:00Z",
        "2026-11-22T14:00:00+02:00",
        "2026-11-22 12:00:00.000000+00:00",
    ],
)
def test_an_aware_time_is_an_instant(time: object) -> None:
    assert parse_position(time) == Since(NOON_MS)


@pytest.mark.parametrize(
    "wrong", ["newest", "", "49590338271490256608559692538361571095", 3, None, b"latest"]
)
def test_what_is_no_position_is_refused_with_what_would_be_one(wrong: object) -> None:
    with pytest.raises(ConfigError, match="is not a position in a stream") as raised:
        parse_position(wrong)
    assert "trim_horizon, latest, a time with its offset" in raised.value.advice


def test_a_token_is_json_for_people() -> None:
    assert json.loads(str(TOKEN)) == {
        "version": 1,
        "stream": ARN,
        "since": "2026-11-22T12:00:00.001+00:00",
        "shards": [
            {
                "id": "shardId-1",
                "parent": None,
                "iterator": "AFTER_SEQUENCE_NUMBER",
                "sequence_number": str(NUMBER),
                "time": "2026-11-22T12:00:00.000+00:00",
            },
            {
                "id": "shardId-2",
                "parent": "shardId-0",
                "iterator": "TRIM_HORIZON",
                "time": "2026-11-22T11:59:59.999+00:00",
            },
            {
                "id": "shardId-3",
                "parent": "shardId-0",
                "iterator": "AT_TIMESTAMP",
                "time": "2026-11-22T12:00:00.001+00:00",
            },
            {
                "id": "shardId-4",
                "parent": "shardId-0",
                "iterator": "AT_SEQUENCE_NUMBER",
                "sequence_number": "7",
                "time": None,
            },
        ],
    }


def test_a_token_is_read_back_as_it_was() -> None:
    assert parse_position(str(TOKEN)) == TOKEN
    assert parse_position(TOKEN) is TOKEN


positions = st.builds(
    ReadPosition,
    st.text(min_size=1),
    st.none() | st.text(),
    st.just(TRIM_HORIZON) | st.builds(At, st.integers(0, 10**40)) | st.builds(After, st.integers(0, 10**40)),
    st.none() | st.integers(0, 10**13),
) | st.builds(
    ReadPosition, st.text(min_size=1), st.none(), st.builds(Since, st.integers(0, 10**13)), st.none()
)


@given(
    shards=st.lists(positions, min_size=1, unique_by=lambda position: position.id),
    since=st.none() | st.integers(0, 10**13),
)
def test_every_token_is_read_back_as_it_was(shards: list[ReadPosition], since: int | None) -> None:
    token = Token(ARN, tuple(shards), since)
    assert parse_position(str(token)) == token


SHARD = {"id": "a", "parent": None, "iterator": "AFTER_SEQUENCE_NUMBER", "sequence_number": "7", "time": None}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 2}, "its version is 2, this program reads 1"),
        ({"version": None}, "its version is None"),
        ({"stream": 7}, "it needs a stream"),
        ({"shards": {}}, "it needs a stream (an ARN) and a list of shards"),
        ({"shards": []}, "it names no shard"),
        ({"shards": ["a"]}, "'a' is no shard"),
        ({"shards": [SHARD | {"id": 7}]}, "is no shard"),
        ({"shards": [SHARD, SHARD]}, "it names a shard twice"),
        ({"shards": [SHARD | {"parent": 7}]}, "shard a has the parent 7"),
        ({"shards": [SHARD | {"iterator": "LATEST"}]}, "shard a has the iterator 'LATEST'"),
        ({"shards": [SHARD | {"iterator": "AT_TIMESTAMP"}]}, "shard a has the iterator 'AT_TIMESTAMP', or lacks its time"),
        ({"shards": [SHARD | {"sequence_number": 7}]}, "shard a has the sequence number 7"),
        ({"shards": [SHARD | {"sequence_number": "7a"}]}, "shard a has the sequence number '7a'"),
        ({"shards": [SHARD | {"sequence_number": "\u0667"}]}, "it must be a text of digits"),
        ({"shards": [SHARD | {"time": 7}]}, "7 is not a time with an offset"),
        ({"since": "yesterday"}, "'yesterday' is not a time with an offset"),
        ({"since": "2026-11-22T12:00:00"}, "is not a time with an offset"),
    ],
)  # fmt: skip
def test_a_token_that_is_none_is_refused_and_the_error_says_why(change: dict[str, Any], why: str) -> None:
    token = {"version": 1, "stream": ARN, "since": None, "shards": [SHARD]}
    parse_position(json.dumps(token))
    with pytest.raises(ConfigError) as raised:
        parse_position(json.dumps(token | change))
    assert why in raised.value.what
    assert raised.value.did == "Nothing was moved."


def test_a_token_that_was_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="The token cannot be read: it is no JSON"):
        parse_position(str(TOKEN)[:-5])


def test_a_token_of_another_stream_is_refused() -> None:
    TOKEN.require(ARN)
    with pytest.raises(ConfigError, match="not of arn:other"):
        TOKEN.require("arn:other")
