"""Whole batches to records."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.errors import DecodeError, PeerError, ProtocolViolation
from mldserver.protocol.batch_decoder import DecodedBatch, decode_records
from mldserver.protocol.codec import MAX_ARRIVAL_MS
from mldserver.protocol.messages import Version
from mldserver.records import Sequence
from tests.protocol.test_kpl import aggregate

pytestmark = [pytest.mark.quick, pytest.mark.core]

RECORD = {
    "data": "aGk=",
    "partitionKey": "é中😀",
    "sequenceNumber": "49680413909925582756864750443479855425736328331474763778",
    "approximateArrivalTimestamp": 1_795_221_970_967,
    "subSequenceNumber": 0,
    "action": "record",
}


def decoded(*records: Any, version: Version = Version.V2, **fields: Any) -> DecodedBatch:
    message = {"action": "processRecords", "records": list(records), "millisBehindLatest": 0} | fields
    line = json.dumps(message, ensure_ascii=False).encode()
    return decode_records(line, version=version, shard_id="s")


def changed(**fields: Any) -> dict[str, Any]:
    return {**RECORD, **fields}


def test_a_record_comes_with_all_its_fields() -> None:
    batch = decoded(RECORD, millisBehindLatest=12)
    (record,) = batch.records
    assert batch.millis_behind_latest == 12
    assert (record.shard_id, record.data, record.partition_key) == ("s", b"hi", "é中😀")
    assert record.sequence == Sequence(int(RECORD["sequenceNumber"]), 0)
    assert record.arrival_ms == 1_795_221_970_967


def test_nulls_are_accepted_where_java_writes_them() -> None:
    nulls = changed(data=None, partitionKey=None, approximateArrivalTimestamp=None, subSequenceNumber=None)
    batch = decoded(nulls, millisBehindLatest=None)
    (record,) = batch.records
    assert (record.data, record.partition_key, record.arrival_ms, record.sub_sequence_number) == (
        b"",
        None,
        None,
        0,
    )
    assert batch.millis_behind_latest is None


def test_an_empty_batch_is_a_batch() -> None:
    assert decoded() == DecodedBatch([], 0)


def test_v1_has_neither_lag_nor_times() -> None:
    line = b'{"action":"processRecords","records":[{"data":"aGk=","partitionKey":"k","sequenceNumber":"5"}]}'
    batch = decode_records(line, version=Version.V1, shard_id="s")
    assert batch.millis_behind_latest is None
    assert batch.records[0].arrival_ms is None


def test_unknown_fields_are_ignored() -> None:
    assert len(decoded(changed(encryptionType="KMS"), new=[{}]).records) == 1


def test_of_keys_that_come_twice_the_last_one_counts() -> None:
    line = b'{"action":"processRecords","records":[7],"records":[],"millisBehindLatest":1,"millisBehindLatest":2}'
    assert decode_records(line, version=Version.V2, shard_id="s") == DecodedBatch([], 2)


def test_a_line_that_only_begins_like_a_batch_is_none() -> None:
    for line in (b'{"action":"processRecords","action":"leaseLost","records":[]}', b"[]"):
        with pytest.raises(DecodeError, match="not a processRecords message"):
            decode_records(line, version=Version.V2, shard_id="s")


@pytest.mark.parametrize(
    "line", [b'{"action":"processRecords"', b'{"action":"processRecords","records":["\xff"]}', b"[" * 100_000]
)
def test_a_line_that_is_no_json_is_a_decode_error(line: bytes) -> None:
    with pytest.raises(DecodeError, match="not JSON"):
        decode_records(line, version=Version.V2, shard_id="s")


@pytest.mark.parametrize("records", [None, {}, "x", 7])
def test_records_must_be_a_list(records: object) -> None:
    with pytest.raises(DecodeError, match="Field records must be a list"):
        decoded(records=records)


@pytest.mark.parametrize("lag", [-1, 1.5, "0", True, 2**63])
def test_the_lag_must_be_a_long(lag: object) -> None:
    with pytest.raises(DecodeError, match="Field millisBehindLatest"):
        decoded(millisBehindLatest=lag)


BAD_FIELDS = [
    ("sequenceNumber", None),
    ("sequenceNumber", 5),
    ("sequenceNumber", ""),
    ("sequenceNumber", "LATEST"),
    ("sequenceNumber", "٣"),
    ("sequenceNumber", "1" * 130),
    ("data", 5),
    ("data", []),
    ("partitionKey", 5),
    ("approximateArrivalTimestamp", "now"),
    ("approximateArrivalTimestamp", 1.5),
    ("approximateArrivalTimestamp", True),
    ("approximateArrivalTimestamp", -1),
    ("approximateArrivalTimestamp", MAX_ARRIVAL_MS + 1),
    ("approximateArrivalTimestamp", 10**30),
    ("subSequenceNumber", -1),
    ("subSequenceNumber", 2**63),
    ("subSequenceNumber", "0"),
    ("subSequenceNumber", False),
]


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS)
def test_a_wrong_field_is_named_with_its_records_index(name: str, value: object) -> None:
    with pytest.raises(DecodeError, match=rf"records\[1\]\.{name}"):
        decoded(RECORD, changed(**{name: value}))


def test_a_record_must_be_an_object_and_have_data() -> None:
    with pytest.raises(DecodeError, match=r"records\[0\] must be an object"):
        decoded([])
    with pytest.raises(DecodeError, match=r"records\[0\]\.data must be there"):
        decoded({"sequenceNumber": "5"})


def test_the_latest_arrival_time_that_is_allowed_is_a_datetime() -> None:
    (record,) = decoded(changed(approximateArrivalTimestamp=MAX_ARRIVAL_MS)).records
    assert record.approximate_arrival_timestamp is not None
    assert record.approximate_arrival_timestamp.year == 9998


@pytest.mark.parametrize(
    "sequences", [[("9", 0), ("10", 0)], [("5", 0), ("5", 1)], [("5", 0), ("5", 0)], [("009", 0), ("10", 0)]]
)
def test_sequences_go_up_as_numbers(sequences: list[tuple[str, int]]) -> None:
    records = [changed(sequenceNumber=number, subSequenceNumber=sub) for number, sub in sequences]
    assert [record.sequence_text for record in decoded(*records).records] == [
        number for number, _ in sequences
    ]


@pytest.mark.parametrize("sequences", [[("10", 0), ("9", 0)], [("5", 1), ("5", 0)], [("10", 0), ("0009", 0)]])
def test_sequences_that_go_down_break_the_protocol(sequences: list[tuple[str, int]]) -> None:
    records = [changed(sequenceNumber=number, subSequenceNumber=sub) for number, sub in sequences]
    with pytest.raises(ProtocolViolation, match=r"records\[1\]"):
        decoded(*records)


@given(st.lists(st.tuples(st.integers(0, 10**40), st.integers(0, 3)), min_size=1, max_size=6))
def test_the_order_of_texts_is_the_order_of_numbers(sequences: list[tuple[int, int]]) -> None:
    records = [changed(sequenceNumber=str(number), subSequenceNumber=sub) for number, sub in sequences]
    if sequences == sorted(sequences):
        assert [record.sequence for record in decoded(*records).records] == sequences
    else:
        with pytest.raises(ProtocolViolation):
            decoded(*records)


# KPL aggregates.

AGGREGATE = base64.b64encode(aggregate(("a", b"1"), ("b", b"2"))).decode()


def test_a_v1_aggregate_becomes_its_user_records_with_sub_sequences() -> None:
    plain = {"data": "aGk=", "partitionKey": "k", "sequenceNumber": "6"}
    batch = decoded(
        {"data": AGGREGATE, "partitionKey": "x", "sequenceNumber": "5"}, plain, version=Version.V1
    )
    told = [(record.sequence, record.partition_key, record.data) for record in batch.records]
    assert told == [((5, 0), "a", b"1"), ((5, 1), "b", b"2"), ((6, 0), "k", b"hi")]


def test_a_v2_daemon_has_taken_its_aggregates_apart_itself() -> None:
    (record,) = decoded(changed(data=AGGREGATE)).records
    assert record.data == base64.b64decode(AGGREGATE)


@pytest.mark.parametrize("data", [AGGREGATE[:-4], AGGREGATE[:-1], "84maw!", "84mawg==", None])
def test_a_damaged_v1_aggregate_is_a_plain_record(data: str | None) -> None:
    (record,) = decoded(
        {"data": data, "partitionKey": "x", "sequenceNumber": "5"}, version=Version.V1
    ).records
    assert (record.sequence, record.partition_key) == ((5, 0), "x")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(list(RECORD)) | st.text(max_size=3), inner, max_size=6)
        ),
        max_leaves=12,
    ),
    st.sampled_from(Version),
)
def test_whatever_the_records_are_only_peer_errors_come_out(records: object, version: Version) -> None:
    with contextlib.suppress(PeerError):
        assert len(decoded(records=[records], version=version).records) == 1
