"""The fast way to records, held against the careful one."""

from __future__ import annotations

import base64
import copy
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.errors import PeerError
from mldserver.protocol.batch_decoder import BatchDecoder, decode_records
from mldserver.protocol.codec import MAX_ARRIVAL_MS, MAX_LONG
from mldserver.protocol.messages import Version
from mldserver.protocol.wire_records import LARGE_RECORD, FastDecoder
from mldserver.records import Record, RecordMethods, Sequence

pytestmark = [pytest.mark.quick, pytest.mark.core]

FIRST = 49680413909925582756864750443479855425736328331474763778


def record(number: object = FIRST, **fields: Any) -> dict[str, Any]:
    return {
        "data": "aGk=",
        "partitionKey": "k",
        "sequenceNumber": str(number),
        "approximateArrivalTimestamp": 1_795_221_970_967,
        "subSequenceNumber": 0,
        "action": "record",
    } | fields


def line(*records: Any, **fields: Any) -> bytes:
    message = {"action": "processRecords", "records": list(records), "millisBehindLatest": 0} | fields
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()


def large(number: int, data: bytes | None = None) -> dict[str, Any]:
    return record(number, data=base64.b64encode(bytes(LARGE_RECORD) if data is None else data).decode())


def told(each: RecordMethods) -> tuple[object, ...]:
    return each.shard_id, each.sequence, each.sequence_text, each.data, each.partition_key, each.arrival_ms


def test_records_come_with_all_their_fields_and_are_records() -> None:
    batch = FastDecoder("s").decode(
        line(record(), record(FIRST + 1, partitionKey=None), millisBehindLatest=7)
    )
    assert batch is not None
    one, other = batch.records
    assert told(one) == ("s", Sequence(FIRST), str(FIRST), b"hi", "k", 1_795_221_970_967)
    assert isinstance(one, Record)
    assert one.raw_data == b"hi"
    assert repr(one) == f"<Record s {FIRST} key='k'>"
    assert other.partition_key is None
    assert batch.millis_behind_latest == 7


def test_a_memoryview_is_a_line_too() -> None:
    batch = FastDecoder("s").decode(memoryview(line(record())))
    assert batch is not None
    assert batch.records[0].data == b"hi"


def test_an_empty_batch_needs_no_care() -> None:
    batch = FastDecoder("s").decode(line())
    assert batch is not None
    assert batch.records == []


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"{",
        b'{"action":"processRecords","records":["\xff"]}',
        b"[" * 100_000,
        line(action="leaseLost"),
        line(record(data=None)),
        line(record(data="%%%")),
        line(record("x")),
        line(record("")),
        line(record("1" * 130)),
        line(record("٣")),
        line(record("1\n2")),
        line(record("10"), record("9")),
        line(record("5"), record("")),
        line(record("1 "), record("22")),
        line(record("12"), record("11")),
        line(record("5", subSequenceNumber=1), record("5")),
        line(record(approximateArrivalTimestamp=None)),
        line(record(approximateArrivalTimestamp=MAX_ARRIVAL_MS + 1)),
        line(record(subSequenceNumber=-1)),
        line(record(subSequenceNumber=MAX_LONG + 1)),
        line(millisBehindLatest=-1),
    ],
)
def test_whatever_is_not_plainly_right_is_left_to_the_careful_way(wrong: bytes) -> None:
    assert FastDecoder("s").decode(wrong) is None


@pytest.mark.parametrize(
    "numbers", [["9", "10"], ["5", "5"], ["009", "010"], [str(FIRST), str(FIRST + 1)], ["0", "1" * 129]]
)
def test_sequences_that_go_up_as_numbers_need_no_care(numbers: list[str]) -> None:
    batch = FastDecoder("s").decode(line(*map(record, numbers)))
    assert batch is not None
    assert [each.sequence_text for each in batch.records] == numbers


@pytest.mark.parametrize("wrong", ["x", "", "1\n2", "1" * 130, "٣", "1 "])
@pytest.mark.parametrize("place", [0, 7, 39])
def test_a_number_that_is_none_is_found_among_many(wrong: str, place: int) -> None:
    numbers = [str(number) for number in range(10, 50)]
    decoder = FastDecoder("s")
    assert decoder.decode(line(*map(record, numbers))) is not None
    numbers[place] = wrong
    assert decoder.decode(line(*map(record, numbers))) is None


@pytest.mark.parametrize("first", [90, 999_990])
def test_many_numbers_may_grow_by_a_digit(first: int) -> None:
    batch = FastDecoder("s").decode(line(*map(record, range(first, first + 20))))
    assert batch is not None
    assert len(batch.records) == 20


def test_the_user_records_of_an_aggregate_are_in_order_by_their_sub_sequences() -> None:
    batch = FastDecoder("s").decode(line(*(record("5", subSequenceNumber=sub) for sub in range(3))))
    assert batch is not None
    assert [each.sequence for each in batch.records] == [(5, 0), (5, 1), (5, 2)]


def test_large_payloads_stay_text_until_they_are_read() -> None:
    decoder = FastDecoder("s")
    assert decoder.decode(line(large(1))) is not None
    batch = decoder.decode(line(large(2, b"x" * 2000), record("3", data="%" * 3000)))
    assert batch is not None
    (one, _) = batch.records
    assert isinstance(one.raw_data, str)
    assert (one.data, one.data) == (b"x" * 2000, one.raw_data)
    with pytest.raises(ValueError, match="record 3: data is not base64"):
        _ = batch.records[1].data


def test_a_handler_that_reads_large_payloads_gets_them_decoded_at_once() -> None:
    decoder = FastDecoder("s")
    decoder.decode(line(large(1)))
    batch = decoder.decode(line(large(2)))
    assert batch is not None
    assert batch.records[0].data == bytes(LARGE_RECORD)
    for number in (3, 4):
        batch = decoder.decode(line(large(number)))
        assert batch is not None
        assert type(batch.records[0].raw_data) is bytes


def test_a_handler_that_never_reads_payloads_never_pays_for_them() -> None:
    decoder = FastDecoder("s")
    kinds = []
    for number in range(1, 5):
        batch = decoder.decode(line(large(number)))
        assert batch is not None
        kinds.append(type(batch.records[0].raw_data))
    assert kinds == [bytes, str, str, str]


@pytest.mark.parametrize("size", [2, 2 * LARGE_RECORD])
def test_records_can_be_pickled_and_copied(size: int) -> None:
    decoder = FastDecoder("s")
    decoder.decode(line(large(1, bytes(size))))
    batch = decoder.decode(line(large(2, bytes(size))))
    assert batch is not None
    (made,) = batch.records
    assert told(pickle.loads(pickle.dumps(made))) == told(made)  # our own
    assert told(copy.copy(made)) == told(made)


# Against the careful way.

FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "data": st.none() | st.sampled_from(["", "aGk=", "aGk", "%"]) | st.integers(),
        "partitionKey": st.none() | st.text(max_size=2) | st.integers(),
        "sequenceNumber": st.none() | st.sampled_from(["", "5", "05", "10", "x"]) | st.integers(),
        "approximateArrivalTimestamp": st.none()
        | st.sampled_from([0, 1.0, True, MAX_ARRIVAL_MS + 1, 10**30]),
        "subSequenceNumber": st.none() | st.sampled_from([0, 1, MAX_LONG + 1, False]),
        "action": st.none() | st.text(max_size=2),
    },
)


@given(
    st.lists(st.tuples(st.integers(0, 12), FIELDS), max_size=4),
    st.none() | st.integers(-1, 2) | st.just(2**63),
)
def test_both_ways_come_to_the_same(records: list[tuple[int, dict[str, Any]]], lag: int | None) -> None:
    text = line(*(record(number, **fields) for number, fields in records), millisBehindLatest=lag)

    def outcome(decode: Any) -> object:
        try:
            batch = decode()
        except PeerError as error:
            return str(error)
        return batch.millis_behind_latest, [
            (each.sequence, each.partition_key, each.arrival_ms, payload(each)) for each in batch.records
        ]

    careful = outcome(lambda: decode_records(text, version=Version.V2, shard_id="s"))
    assert outcome(lambda: BatchDecoder("s").decode(text, Version.V2)) == careful


def payload(each: Record) -> object:
    try:
        return each.data
    except ValueError:
        return "damaged"


def test_v1_lines_are_read_with_care() -> None:
    text = b'{"action":"processRecords","records":[{"data":"aGk=","partitionKey":"k","sequenceNumber":"5"}]}'
    (made,) = BatchDecoder("s").decode(text, Version.V1).records
    assert (made.data, made.arrival_ms) == (b"hi", None)
