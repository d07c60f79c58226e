from __future__ import annotations

import base64
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver import Batch, Record, Sequence, Shard
from mldserver.protocol.batch_decoder import BatchDecoder
from mldserver.protocol.messages import Version
from mldserver.records import DeadLetter

pytestmark = pytest.mark.quick

BIG = "49590338271490256608559692538361571095921575989136588898"


def record(**fields: object) -> Record:
    return Record(**({"shard_id": "s1", "sequence_number": BIG} | fields))  # type: ignore[arg-type]  # passed on


def test_sequences_compare_as_two_integers() -> None:
    assert Sequence(9) < Sequence(10) < Sequence(10, 1) < Sequence(11)
    assert str(Sequence(int(BIG))) == BIG
    assert str(Sequence(5, 2)) == "5/2"


def test_a_record_tells_its_place_in_the_shard() -> None:
    made = record(sub_sequence_number=3)
    assert made.sequence_number == int(BIG)
    assert made.sequence_text == BIG
    assert made.sequence == Sequence(int(BIG), 3)
    assert repr(record(partition_key="k")) == f"<Record s1 {BIG} key='k'>"


@given(st.binary())
def test_data_is_decoded_from_base64_when_it_is_first_read(payload: bytes) -> None:
    made = record(data=base64.b64encode(payload).decode())
    assert made.data == payload
    assert made.data is made.data


@pytest.mark.parametrize(("data", "expected"), [(b"plain", b"plain"), (None, b""), (b"", b""), ("", b"")])
def test_plain_bytes_and_null_are_data_too(data: bytes | str | None, expected: bytes) -> None:
    assert record(data=data).data == expected


@pytest.mark.parametrize("data", ["a", "%%%%", "aGk=\n!", "ä"])
def test_damaged_base64_is_an_error_that_names_the_record(data: str) -> None:
    with pytest.raises(ValueError, match=r"base64|ASCII"):
        _ = record(data=data).data


def test_what_came_can_be_kept_though_it_cannot_be_decoded() -> None:
    assert record(data="%%%%").raw_data == "%%%%"


def test_a_payload_is_read_as_text_and_as_json() -> None:
    made = record(data=b'{"a": "\xc3\xa4"}')
    assert made.text() == '{"a": "ä"}'
    assert made.json() == {"a": "ä"}
    assert record(data=b"\xe4").text("latin-1") == "ä"
    with pytest.raises(ValueError, match="invalid literal"):
        record(data=b"none").json()


def test_arrival_times_are_aware_and_exact_to_the_millisecond() -> None:
    made = record(arrival_ms=1_357_034_400_123)
    assert made.approximate_arrival_timestamp == datetime(2013, 1, 1, 10, 0, 0, 123_000, tzinfo=UTC)
    assert made.arrival_ms == 1_357_034_400_123


def test_v1_daemons_send_no_arrival_times() -> None:
    assert record().approximate_arrival_timestamp is None
    assert record().arrival_ms is None


def test_a_batch_is_a_sequence_of_its_records() -> None:
    records = [record(data=bytes([number])) for number in range(4)]
    batch = Batch(records, shard_id="s1", millis_behind_latest=7)
    assert len(batch) == 4
    assert list(batch) == records
    assert batch[1] is records[1]
    part = batch[1:3]
    assert isinstance(part, Batch)
    assert list(part) == records[1:3]
    assert (part.shard_id, part.millis_behind_latest) == ("s1", 7)
    assert repr(part) == "<Batch s1 records=2>"


def test_a_batch_becomes_an_arrow_table() -> None:
    batch = Batch(
        [record(data="aGk=", partition_key="k", sub_sequence_number=2, arrival_ms=5), record(data=None)],
        shard_id="s1",
    )
    table = batch.to_arrow()
    assert table.schema == pa.schema(
        {
            "data": pa.binary(),
            "partition_key": pa.string(),
            "sequence_number": pa.string(),
            "sub_sequence_number": pa.int64(),
            "approximate_arrival_timestamp": pa.timestamp("ms", tz="UTC"),
        }
    )
    assert table.to_pydict() == {
        "data": [b"hi", b""],
        "partition_key": ["k", None],
        "sequence_number": [BIG, BIG],
        "sub_sequence_number": [2, 0],
        "approximate_arrival_timestamp": [datetime(1970, 1, 1, 0, 0, 0, 5000, tzinfo=UTC), None],
    }


def test_an_empty_batch_has_the_same_columns() -> None:
    assert Batch([], shard_id="s1").to_arrow().num_rows == 0


def test_a_shard_knows_where_the_daemon_starts() -> None:
    assert Shard("s1").start is None
    assert Shard("s1", "TRIM_HORIZON") == Shard("s1", "TRIM_HORIZON")


def test_a_record_cannot_be_changed() -> None:
    line = b'{"action":"processRecords","records":[{"sequenceNumber":"5","data":"","approximateArrivalTimestamp":1}]}'
    (decoded,) = BatchDecoder("s").decode(line, Version.V2).records
    for made in (record(), decoded):
        for name in (
            "sequence_text",
            "partition_key",
            "arrival_ms",
            "sub_sequence_number",
            "shard_id",
            "data",
        ):
            with pytest.raises(AttributeError):
                setattr(made, name, 7)
            with pytest.raises(AttributeError):
                delattr(made, name)


def test_the_dead_letter_of_a_timer_is_told_apart_from_others_after_the_same_record() -> None:
    letter = DeadLetter("shard", Sequence(7), "key", b"\xc0", None, 1, "OSError", "", "handler", 5)
    assert letter.record == "shard/7/0"
    assert replace(letter, timer="alarm/name", due_ms=9).record == "shard/9/alarm/name/key"
