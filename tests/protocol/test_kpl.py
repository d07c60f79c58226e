"""Aggregates of the Kinesis Producer Library."""

from __future__ import annotations

import hashlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.protocol.batch_decoder import MAGIC, UserRecord, _schema, deaggregate

pytestmark = [pytest.mark.quick, pytest.mark.core]


def aggregate(*records: tuple[str, bytes], index_shift: int = 0) -> bytes:
    messages, _ = _schema()
    message = messages.AggregatedRecord()
    for index, (key, data) in enumerate(records):
        message.partition_key_table.append(key)
        message.records.add(partition_key_index=index + index_shift, data=data)
    return sealed(message.SerializeToString())


def sealed(body: bytes) -> bytes:
    return MAGIC + body + hashlib.md5(body).digest()


def test_an_aggregate_gives_its_user_records_in_order() -> None:
    assert deaggregate(aggregate(("a", b"1"), ("b", b""))) == (UserRecord("a", b"1"), UserRecord("b", b""))


def test_an_aggregate_without_records_has_none() -> None:
    messages, _ = _schema()
    assert deaggregate(sealed(messages.AggregatedRecord(partition_key_table=["k"]).SerializeToString())) == ()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"plain",
        MAGIC,
        MAGIC + b"x" * 16,
        sealed(b""),
        aggregate(("a", b"1"))[:-1],
        aggregate(("a", b"1"))[:-1] + b"\x00",
        sealed(b"\xff\xff\xff\xff"),
        aggregate(("a", b"1"), index_shift=1),
    ],
    ids=[
        "empty",
        "plain",
        "magic only",
        "no digest",
        "no body",
        "cut",
        "wrong digest",
        "no protobuf",
        "a key that is not there",
    ],
)
def test_what_is_damaged_is_a_plain_record(data: bytes) -> None:
    assert deaggregate(data) is None


@given(st.binary(max_size=60))
def test_any_bytes_behind_the_magic_and_a_right_digest_are_harmless(body: bytes) -> None:
    result = deaggregate(sealed(body))
    assert result is None or all(isinstance(record.data, bytes) for record in result)


def test_loading_the_schema_leaves_the_import_path_as_it_was() -> None:
    _schema.cache_clear()
    for name in [name for name in sys.modules if name.startswith("aws_kinesis_agg.deaggregator")]:
        del sys.modules[name]
    before = sys.path.copy()
    assert deaggregate(aggregate(("a", b"1"))) is not None
    assert sys.path == before
