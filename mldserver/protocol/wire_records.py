"""The fast way from a ``processRecords`` line to records: msgspec's typed structs, checked by columns.

Why msgspec: it makes the records' objects in one pass over the line, and decodes base64 in the same pass. CPU ns a record
of 100 B (of 1 KiB), Python 3.11: json and dicts 1300 (4900), orjson and pybase64 900 (1500), msgspec with ``data: bytes``
300 (1210), msgspec with ``data: str`` that is never read 240 (580).

So payloads are decoded at once, unless they are large and the shard's handler was not seen to read any. The structs are
frozen, which costs nothing, so no handler can change a record that is read again later.

This module reports no reasons: for any unexpected value it returns None, and ``batch_decoder.py`` reads the line
again, field by field, to find the fault, or to accept the line (rare nulls, V1).
"""

from __future__ import annotations

from itertools import islice
from operator import le, lt
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np

from mldserver.protocol.codec import MAX_ARRIVAL_MS, MAX_LONG, MAX_SEQUENCE_DIGITS, is_sequence
from mldserver.records import Record, RecordMethods, decode_payload

LARGE_RECORD: Final = 1024
"""Bytes of a record on the wire, on average, above which its payload may stay as it is until it is read."""

_NAMES: Final = {
    "_text": "data",
    "sequence_text": "sequenceNumber",
    "partition_key": "partitionKey",
    "arrival_ms": "approximateArrivalTimestamp",
    "sub_sequence_number": "subSequenceNumber",
}
_FEW: Final = 16
"""Records for which numpy costs more than it saves."""
_ZERO: Final = np.uint8(ord("0"))
_NINE: Final = np.uint8(ord("9"))
_LF: Final = np.uint8(ord("\n"))
_Arrival = Annotated[int, msgspec.Meta(ge=0, le=MAX_ARRIVAL_MS)]
_Long = Annotated[int, msgspec.Meta(ge=0, le=MAX_LONG)]


class _EagerRecord(msgspec.Struct, RecordMethods, frozen=True, gc=False, eq=False, rename=_NAMES):
    """A record whose payload was decoded with its line."""

    data: bytes
    sequence_text: str
    arrival_ms: _Arrival
    partition_key: str | None = None
    sub_sequence_number: _Long = 0

    __repr__ = RecordMethods.__repr__
    __reduce__ = RecordMethods.__reduce__


class _LazyRecord(msgspec.Struct, RecordMethods, frozen=True, gc=False, eq=False, rename=_NAMES):
    """A record whose payload is base64 text until it is read."""

    _text: str
    sequence_text: str
    arrival_ms: _Arrival
    partition_key: str | None = None
    sub_sequence_number: _Long = 0

    __repr__ = RecordMethods.__repr__
    __reduce__ = RecordMethods.__reduce__

    @property
    def data(self) -> bytes:
        """The payload. Raises ValueError when the daemon's base64 is damaged."""
        data: Any = self._text
        if type(data) is str:
            data = decode_payload(self, data)  # once, then it is bytes
            msgspec.structs.force_setattr(self, "_text", data)
        return data  # type: ignore[no-any-return]  # bytes by now

    @property
    def raw_data(self) -> str | bytes | None:
        """The payload as it came, or as it was decoded since."""
        return self._text


# What users hold is a Record for ``isinstance`` too.
Record.register(_EagerRecord)
Record.register(_LazyRecord)


class DecodedBatch(msgspec.Struct, frozen=True):
    """The records of one line, in shard order."""

    records: list[Record]
    millis_behind_latest: int | None
    """None when the daemon said null, or nothing (V1)."""


class FastDecoder:
    """Decodes one shard's lines. Its records know their shard by their class, which costs nothing for each."""

    __slots__ = (
        "_eager",
        "_handler_reads_payloads",
        "_large_records",
        "_last_lazy_record",
        "_lazy",
        "_shard_id",
    )

    def __init__(self, shard_id: str) -> None:
        """Prepare. Decoders are made with the first lines: an idle shard needs none."""
        self._shard_id = shard_id
        self._eager: msgspec.json.Decoder[Any] | None = None
        self._lazy: msgspec.json.Decoder[Any] | None = None
        self._large_records = False
        self._last_lazy_record: Any = None
        """A record that was not decoded, to see later whether the handler read it."""
        self._handler_reads_payloads = False
        """Whether the handler was seen to read payloads."""

    def decode(self, line: bytes | bytearray | memoryview) -> DecodedBatch | None:
        """Return the records of a ``processRecords`` line; None if it is unusual or invalid: ``decode_records`` then reads it.

        If the last batch had large records and the handler has not read any payload so far, payloads remain base64 until they
        are read. Reading one turns its text into bytes. Once that is seen in a record of an earlier batch, all later batches are
        decoded at once.
        """
        if self._last_lazy_record is not None and type(self._last_lazy_record._text) is bytes:  # noqa: SLF001  # the handler has read it
            self._handler_reads_payloads, self._last_lazy_record = True, None
        lazy = self._large_records and not self._handler_reads_payloads
        decoder = (self._lazy if lazy else self._eager) or self._make_decoder(lazy=lazy)
        try:
            message = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        records = message.records
        if records:
            self._large_records = len(line) > LARGE_RECORD * len(records)
            if not (is_sequence(records[0].sequence_text) if len(records) == 1 else _in_order(records)):
                return None
            if lazy:
                self._last_lazy_record = records[-1]
        return DecodedBatch(records, message.millisBehindLatest)

    def _make_decoder(self, *, lazy: bool) -> msgspec.json.Decoder[Any]:
        """Make and keep a decoder of lines. Its record class has the shard's id as an attribute, so no record stores it."""
        base = _LazyRecord if lazy else _EagerRecord
        options: dict[str, Any] = {"frozen": True, "gc": False, "eq": False, "rename": _NAMES}
        namespace = {"shard_id": self._shard_id}
        record = msgspec.defstruct("Record", [], bases=(base,), namespace=namespace, **options)
        message = msgspec.defstruct(
            "Message",
            [
                # Not msgspec's tag: of keys that come twice the last one counts, here as elsewhere.
                ("action", Literal["processRecords"]),
                ("records", list[record]),  # type: ignore[valid-type]  # made above
                ("millisBehindLatest", _Long | None, None),
            ],
        )
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(message)
        setattr(self, "_lazy" if lazy else "_eager", decoder)
        return decoder


def _in_order(records: list[Any]) -> bool:
    """Whether all records have valid sequence numbers, and (sequence, sub-sequence) never descends."""
    numbers = [record.sequence_text for record in records]
    ascending = _strictly_ascending(numbers)
    if ascending is None:
        if not all(map(is_sequence, numbers)):
            return False
        numbers = [number.rjust(MAX_SEQUENCE_DIGITS, "0") for number in numbers]
        ascending = all(map(lt, numbers, islice(numbers, 1, None)))
    if ascending:
        return True
    # Equal numbers are valid if their sub-sequences are in order: the records of one aggregate.
    pairs = list(zip(numbers, [record.sub_sequence_number for record in records], strict=True))
    return all(map(le, pairs, islice(pairs, 1, None)))


def _strictly_ascending(numbers: list[str]) -> bool | None:
    """Return whether each number is above the previous one, by one comparison of byte arrays.

    None: not compared, since they are fewer than 16 (one by one is faster), or not digits of one length from 1 to 129.
    """
    width = len(numbers[0])
    if len(numbers) < _FEW or not 0 < width <= MAX_SEQUENCE_DIGITS:
        return None
    lines = ("\n".join(numbers) + "\n").encode()
    if len(lines) != len(numbers) * (width + 1):
        return None
    table = np.frombuffer(lines, np.uint8)
    # All numbers have this width if line ends are in the last column, and only there.
    if (
        np.count_nonzero(table < _ZERO) != len(numbers)
        or table.max() > _NINE
        or (table[width :: width + 1] != _LF).any()
    ):
        return None
    texts = np.frombuffer(lines, f"S{width + 1}")
    return bool((texts[1:] > texts[:-1]).all())
