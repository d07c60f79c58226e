"""One ``processRecords`` line to records, with a full validation that names what is wrong.

Keys that come twice are read as orjson reads them: the last one counts. User records are taken out of an aggregate of the
Kinesis Producer Library here, for daemons that do not (V1): magic ``F3 89 9A C2``, a protobuf ``AggregatedRecord``, its MD5
(16 bytes). Source: KPL aggregation format.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import sys
from typing import Any, Final, NamedTuple

import orjson

from mldserver.errors import DecodeError, ProtocolViolation
from mldserver.protocol.codec import (
    MAX_ARRIVAL_MS,
    MAX_LONG,
    MAX_SEQUENCE_DIGITS,
    excerpt,
    is_sequence,
    optional_long,
    wrong,
)
from mldserver.protocol.messages import Version
from mldserver.protocol.wire_records import DecodedBatch, FastDecoder
from mldserver.records import Record


class BatchDecoder:
    """Decodes one shard's lines: fast where they are as KCL writes them, with care where they are not."""

    __slots__ = ("_fast", "_shard_id")

    def __init__(self, shard_id: str) -> None:
        self._shard_id = shard_id
        self._fast = FastDecoder(shard_id)

    def decode(self, line: bytes | bytearray | memoryview, version: Version) -> DecodedBatch:
        """Decode a line. Raises as ``decode_records``."""
        # V1 has no arrival times, and aggregates that are still whole.
        fast = self._fast.decode(line) if version is Version.V2 else None
        return fast or decode_records(line, version=version, shard_id=self._shard_id)


def decode_records(line: bytes | bytearray | memoryview, *, version: Version, shard_id: str) -> DecodedBatch:
    """Decode a ``processRecords`` line field by field; V1 data that is a KPL aggregate becomes its user records.

    Payloads stay base64 text until they are read. Raises DecodeError (naming the field and the record's index) for a
    wrong type or range, ProtocolViolation when sequences go down inside the batch.
    """
    try:
        message = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DecodeError(f"A batch is not JSON: {error.msg}.", excerpt=excerpt(line)) from None
    if type(message) is not dict or message.get("action") != "processRecords":
        raise DecodeError("A line is not a processRecords message.", excerpt=excerpt(line))
    items = message.get("records")
    if type(items) is not list:
        raise wrong("records", items, "a list")
    lag = optional_long(message, "millisBehindLatest")
    records: list[Record] = []
    previous_order = (0, "", 0)
    for index, item in enumerate(items):
        record = _record(item, index, version, shard_id)
        # Digit texts sort as numbers by (length, text), which saves 164 ns a record. DynamoDB Local pads its numbers.
        digits = record.sequence_text
        digits = digits.lstrip("0") if digits[0] == "0" else digits
        order = (len(digits), digits, record.sub_sequence_number)
        if order < previous_order:
            raise ProtocolViolation(
                f"Sequences go down inside a batch: records[{index}] ({record.sequence}) comes after a later one."
            )
        previous_order = order
        user_records = _user_records(record, item.get("data")) if version is Version.V1 else None
        if user_records is None:
            records.append(record)
        else:
            records.extend(user_records)
    return DecodedBatch(records, lag)


def _record(item: Any, index: int, version: Version, shard_id: str) -> Record:
    """Return one element of ``records`` as a Record. Raises DecodeError for a field of a wrong type or range."""
    if type(item) is not dict:
        raise wrong(f"records[{index}]", item, "an object")
    number = item.get("sequenceNumber")
    if not is_sequence(number):
        wanted = f"a text of 1 to {MAX_SEQUENCE_DIGITS} digits"
        raise wrong("sequenceNumber", number, wanted, where=f"records[{index}]")
    data = item.get("data", 0)
    if data is not None and type(data) is not str:
        wanted = "a text or null" if "data" in item else "there"
        raise wrong("data", item.get("data"), wanted, where=f"records[{index}]")
    key = item.get("partitionKey")
    if key is not None and type(key) is not str:
        raise wrong("partitionKey", key, "a text or null", where=f"records[{index}]")
    arrival = item.get("approximateArrivalTimestamp")
    if arrival is not None and (type(arrival) is not int or not 0 <= arrival <= MAX_ARRIVAL_MS):
        wanted = f"milliseconds from 0 to {MAX_ARRIVAL_MS}, or null"
        raise wrong("approximateArrivalTimestamp", arrival, wanted, where=f"records[{index}]")
    sub = None if version is Version.V1 else item.get("subSequenceNumber")
    if sub is not None and (type(sub) is not int or not 0 <= sub <= MAX_LONG):
        wanted = "an integer from 0 to 2**63-1, or null"
        raise wrong("subSequenceNumber", sub, wanted, where=f"records[{index}]")
    return Record(
        shard_id=shard_id,
        sequence_number=number,
        sub_sequence_number=sub or 0,
        data=data,
        partition_key=key,
        arrival_ms=arrival,
    )


def _user_records(record: Record, data_base64: str | None) -> list[Record] | None:
    """Return the user records if ``record`` is a KPL aggregate (sub-sequences 0 to n-1), None for a plain record."""
    if data_base64 is None or not data_base64.startswith(MAGIC_BASE64):
        return None
    try:
        user_records = deaggregate(base64.b64decode(data_base64, validate=True))
    except binascii.Error:
        return None  # reading the record's data raises the error, as for any damaged payload
    if user_records is None:
        return None
    return [
        Record(
            shard_id=record.shard_id,
            sequence_number=record.sequence_text,
            sub_sequence_number=sub,
            data=user_record.data,
            partition_key=user_record.partition_key,
            arrival_ms=record.arrival_ms,
        )
        for sub, user_record in enumerate(user_records)
    ]


MAGIC: Final = b"\xf3\x89\x9a\xc2"
MAGIC_BASE64: Final = "84maw"
"""How the base64 text of every aggregate starts: the 30 bits that the magic fixes."""
_DIGEST_SIZE: Final = 16


class UserRecord(NamedTuple):
    """One record of an aggregate; its place in the result is its sub-sequence number."""

    partition_key: str
    data: bytes


def deaggregate(data: bytes) -> tuple[UserRecord, ...] | None:
    """Return the user records that ``data`` aggregates, None if it is not a valid aggregate of the Kinesis Producer Library.

    A damaged aggregate counts as a plain record, as in the KCL (KCL 1.x UserRecord, KCL 3.1.3 AggregatorUtil).
    """
    body, digest = data[len(MAGIC) : -_DIGEST_SIZE], data[-_DIGEST_SIZE:]
    if not data.startswith(MAGIC) or len(data) <= len(MAGIC) + _DIGEST_SIZE:
        return None
    # MD5 is the format's checksum, not a safeguard.
    if hashlib.md5(body, usedforsecurity=False).digest() != digest:
        return None
    messages, damaged = _schema()
    aggregate = messages.AggregatedRecord()
    try:
        aggregate.ParseFromString(body)
        keys = aggregate.partition_key_table
        return tuple(UserRecord(keys[r.partition_key_index], r.data) for r in aggregate.records)
    except (damaged, IndexError):
        return None


@functools.cache
def _schema() -> tuple[Any, type[Exception]]:
    """Return the protobuf schema of aggregates and its parse error; loaded at the first aggregate, since few daemons send any.

    ``aws_kinesis_agg.deaggregator`` puts two folders in front of ``sys.path``; they are removed, so that they cannot hide
    a handler's modules. Its own ``deaggregate`` is not used: it prints, and returns the start of a damaged aggregate.
    """
    path = sys.path.copy()
    try:
        from aws_kinesis_agg.deaggregator import messages_pb2  # noqa: PLC0415  # see the docstring
        from google.protobuf.message import DecodeError  # noqa: PLC0415  # loaded with its user
    finally:
        sys.path[:] = path
    return messages_pb2, DecodeError
