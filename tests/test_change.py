"""A change: what is read of a record's payload, in each of the forms that DynamoDB's changes come in."""

from __future__ import annotations

import copy
import json
import pickle
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from mldserver.dynamodb_streams import Change, NotAChange
from mldserver.records import Record, Sequence

pytestmark = pytest.mark.quick

AT = datetime(2026, 11, 22, 10, 15, 30, tzinfo=UTC)
SECONDS = int(AT.timestamp())
ITEM = {
    "id": {"S": "a"},
    "price": {"N": "0.1000000000000000000000000000000001"},
    "count": {"N": "12"},
    "picture": {"B": "AP8="},
    "tags": {"SS": ["x", "y"]},
    "sizes": {"NS": ["1", "2.5"]},
    "parts": {"BS": ["AA=="]},
    "old": {"BOOL": False},
    "note": {"NULL": True},
    "lines": {"L": [{"M": {"n": {"N": "-0.25"}}}]},
}
PYTHON = {
    "id": "a",
    "price": Decimal("0.1000000000000000000000000000000001"),
    "count": Decimal(12),
    "picture": b"\x00\xff",
    "tags": {"x", "y"},
    "sizes": {Decimal(1), Decimal("2.5")},
    "parts": {b"\x00"},
    "old": False,
    "note": None,
    "lines": [{"n": Decimal("-0.25")}],
}
DIRECT: dict[str, Any] = {
    "eventID": "e7",
    "eventName": "MODIFY",
    "eventVersion": "1.1",
    "eventSource": "aws:dynamodb",
    "awsRegion": "eu-central-1",
    "dynamodb": {
        "ApproximateCreationDateTime": SECONDS,
        "Keys": {"id": {"S": "a"}},
        "NewImage": ITEM,
        "OldImage": {"id": {"S": "a"}},
        "SequenceNumber": "400000000000000499660",
        "SizeBytes": 41,
        "StreamViewType": "NEW_AND_OLD_IMAGES",
    },
}
KINESIS: dict[str, Any] = {
    "awsRegion": "eu-central-1",
    "eventID": "e7",
    "eventName": "MODIFY",
    "userIdentity": None,
    "recordFormat": "application/json",
    "tableName": "orders",
    "dynamodb": {
        "ApproximateCreationDateTime": SECONDS * 1_000_000 + 7,
        "ApproximateCreationDateTimePrecision": "MICROSECOND",
        "Keys": {"id": {"S": "a"}},
        "NewImage": ITEM,
        "OldImage": {"id": {"S": "a"}},
        "SizeBytes": 41,
    },
    "eventSource": "aws:dynamodb",
}


def change(event: Any, *, key: str | None = None, plain_numbers: bool = False) -> Change:
    data = event if isinstance(event, bytes) else json.dumps(event).encode()
    record = Record(shard_id="shard-1", sequence_number="400", data=data, partition_key=key, arrival_ms=1_000)
    return Change(record, plain_numbers=plain_numbers)


def at(time: Any) -> datetime:
    """Return when a change was made that says so in its own way."""
    return change({**DIRECT, "dynamodb": {"Keys": {}, "ApproximateCreationDateTime": time}}).created_at


@pytest.mark.parametrize("event", [DIRECT, KINESIS], ids=["DynamoDB Streams", "Kinesis Data Streams"])
def test_a_change_is_decoded_by_boto3_whichever_way_it_came(event: Any) -> None:
    one = change(event)
    assert (one.kind, one.event_id, one.keys, one.old) == ("update", "e7", {"id": "a"}, {"id": "a"})
    assert one.new == PYTHON
    assert one.created_at.replace(microsecond=0) == AT
    assert not one.expired


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        (SECONDS, AT),
        (float(SECONDS), AT),
        (SECONDS + 0.25, AT + timedelta(milliseconds=250)),
        (SECONDS * 1000 + 7, AT + timedelta(milliseconds=7)),
        (SECONDS * 1_000_000 + 7, AT + timedelta(microseconds=7)),
        ("2026-11-22T11:15:30+01:00", AT),
        ("2026-11-22T10:15:30", AT),
        (0, datetime(1970, 1, 1, tzinfo=UTC)),
    ],
)
def test_times_in_every_unit_are_aware_datetimes(time: Any, expected: datetime) -> None:
    assert at(time) == expected
    assert at(time).tzinfo is UTC


@pytest.mark.parametrize("time", [None, True, -1, 10**17, "yesterday", []])
def test_what_is_no_time_is_told(time: Any) -> None:
    with pytest.raises(NotAChange, match=r"its ApproximateCreationDateTime is .* no time"):
        at(time)


def test_plain_numbers_are_int_and_float() -> None:
    new = change(DIRECT, plain_numbers=True).new
    assert new is not None
    assert (new["count"], type(new["count"])) == (12, int)
    assert (new["price"], type(new["price"])) == (0.1, float)
    assert new["sizes"] == {1, 2.5}
    assert new["lines"] == [{"n": -0.25}]


@pytest.mark.parametrize(
    ("name", "images", "kind"),
    [
        ("INSERT", {"NewImage": ITEM}, "insert"),
        ("REMOVE", {"OldImage": ITEM}, "delete"),
        ("MODIFY", {}, "update"),
    ],
)
def test_an_image_that_is_not_there_is_none(name: str, images: dict[str, Any], kind: str) -> None:
    one = change({"eventName": name, "dynamodb": {"Keys": {"id": {"S": "a"}}, **images}})
    assert one.kind == kind
    assert one.new == (PYTHON if "NewImage" in images else None)
    assert one.old == (PYTHON if "OldImage" in images else None)
    assert one.event_id == ""


@pytest.mark.parametrize(
    ("identity", "name", "expired"),
    [
        ({"type": "Service", "principalId": "dynamodb.amazonaws.com"}, "REMOVE", True),
        ({"Type": "Service", "PrincipalId": "dynamodb.amazonaws.com"}, "REMOVE", True),
        ({"type": "Service", "principalId": "replication.dynamodb.amazonaws.com"}, "REMOVE", False),
        ({"type": "Service", "principalId": "dynamodb.amazonaws.com"}, "MODIFY", False),
        (None, "REMOVE", False),
        ("dynamodb.amazonaws.com", "REMOVE", False),
        ({"principalId": ["dynamodb.amazonaws.com"]}, "REMOVE", False),
    ],
)
def test_a_delete_by_time_to_live_has_expired(identity: Any, name: str, expired: bool) -> None:
    assert change({**DIRECT, "eventName": name, "userIdentity": identity}).expired is expired


def test_a_change_has_what_its_record_has() -> None:
    one = change(DIRECT, key='{"id":{"S":"a"}}')
    assert isinstance(one, Record)
    assert (one.shard_id, one.sequence, one.sequence_number) == ("shard-1", Sequence(400), 400)
    assert (one.partition_key, one.arrival_ms) == ('{"id":{"S":"a"}}', 1_000)
    assert one.approximate_arrival_timestamp == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert one.json() == DIRECT
    assert (one.data, one.raw_data) == (json.dumps(DIRECT).encode(),) * 2
    assert repr(one) == "<Change shard-1 400>"
    with pytest.raises(AttributeError, match="nothing"):
        one.nothing  # type: ignore[attr-defined]  # noqa: B018  # that it is not there


def test_a_change_is_copied_and_pickled() -> None:
    one = change(DIRECT, plain_numbers=True)
    for other in (copy.copy(one), pickle.loads(pickle.dumps(one))):
        assert (other.sequence, other.new) == (one.sequence, one.new)


def test_nothing_is_decoded_before_it_is_read() -> None:
    one = change(b"no JSON at all")
    assert one.sequence == Sequence(400)
    with pytest.raises(NotAChange):
        one.kind  # noqa: B018  # reading it decodes it


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (b"", "its data is no JSON"),
        (b"\xff", "its data is no JSON"),
        ([1], "its data is list in JSON, no object"),
        ({"order": 7}, "its eventName is None, none of INSERT, MODIFY, REMOVE"),
        ({"eventName": ["INSERT"], "dynamodb": {"Keys": {}}}, "its eventName is"),
        ({"eventName": "INSERT"}, "it has no dynamodb.Keys"),
        ({"eventName": "INSERT", "dynamodb": {"Keys": "a"}}, "it has no dynamodb.Keys"),
    ],
)
def test_data_that_is_no_change_is_told_with_its_record(event: Any, why: str) -> None:
    with pytest.raises(NotAChange, match=why) as raised:
        change(event).kind  # noqa: B018  # reading it decodes it
    assert str(raised.value).startswith("record 400 is not a change of a DynamoDB table: ")
    assert [record.sequence for record in raised.value.records or ()] == [Sequence(400)]  # type: ignore[union-attr]  # as records


@pytest.mark.parametrize(
    "image",
    [
        7,
        {"a": 7},
        {"a": {}},
        {"a": {"X": "1"}},
        {"a": {"N": "many"}},
        {"a": {"N": "1" * 39}},
        {"a": {"B": "%"}},
    ],
)
def test_an_image_that_is_damaged_is_told(image: Any) -> None:
    with pytest.raises(NotAChange, match="its NewImage is not in DynamoDB's notation"):
        change({"eventName": "INSERT", "dynamodb": {"Keys": {}, "NewImage": image}}).new  # noqa: B018  # see above


def test_damaged_base64_is_told_as_for_any_record() -> None:
    with pytest.raises(ValueError, match="data is not base64"):
        Change(Record(shard_id="s", sequence_number="1", data="%%%")).kind  # noqa: B018  # see above
