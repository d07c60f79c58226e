"""The fast way from a ``processRecords`` line to records: msgspec's typed structs, checked by columns.

Why msgspec: it makes the records' objects in one pass over the line, and turns base64 into bytes as it goes. CPU ns a
record on one machine (Python 3.11), data read afterwards:

                                     500 x 100 B   500 x 1 KiB   10,000 x 1 KiB
    json + base64, dicts                    1300          4900             5500
    orjson + pybase64, own objects           900          1500             3000
    msgspec, ``data: bytes``                 300          1210             1260
    msgspec, ``data: str``, pybase64         750          1240             1490
    msgspec, ``data: str``, not read         240           580              700

So payloads are decoded at once, unless they are large and the shard's handler was not seen to read any. The structs are
frozen, which costs nothing: no handler can change what is read of a record after it.

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

    __slots__ = ("_eager", "_large", "_last", "_lazy", "_reads", "_shard_id")

    def __init__(self, shard_id: str) -> None:
        """Make nothing yet: an idle shard has no need of classes."""
        self._shard_id = shard_id
        self._eager: msgspec.json.Decoder[Any] | None = None
        self._lazy: msgspec.json.Decoder[Any] | None = None
        self._large = False
        self._last: Any = None
        """A record that was not decoded, to see later whether the handler read it."""
        self._reads = False
        """Whether the handler was seen to read payloads."""

    def decode(self, line: bytes | bytearray | memoryview) -> DecodedBatch | None:
        """Return the records of a line; None when it must be read with more care (or is wrong)."""
        if self._last is not None and type(self._last._text) is bytes:  # noqa: SLF001  # of this module
            self._reads, self._last = True, None
        lazy = self._large and not self._reads
        decoder = (self._lazy if lazy else self._eager) or self._made(lazy=lazy)
        try:
            message = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        records = message.records
        if records:
            self._large = len(line) > LARGE_RECORD * len(records)
            if not (is_sequence(records[0].sequence_text) if len(records) == 1 else _rising(records)):
                return None
            if lazy:
                self._last = records[-1]
        return DecodedBatch(records, message.millisBehindLatest)

    def _made(self, *, lazy: bool) -> msgspec.json.Decoder[Any]:
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


def _rising(records: list[Any]) -> bool:
    """Whether all have sequence numbers, and are in order."""
    numbers = [record.sequence_text for record in records]
    rising = _as_one_table(numbers)
    if rising is None:
        if not all(map(is_sequence, numbers)):
            return False
        numbers = [number.rjust(MAX_SEQUENCE_DIGITS, "0") for number in numbers]
        rising = all(map(lt, numbers, islice(numbers, 1, None)))
    if rising:
        return True
    places = list(zip(numbers, [record.sub_sequence_number for record in records], strict=True))
    return all(map(le, places, islice(places, 1, None)))


def _as_one_table(numbers: list[str]) -> bool | None:
    """Return whether each is above the one before it, if each is a text of as many ASCII digits, 1 to 129; else None.

    They are looked at as one array of bytes, not one by one. Of few records it says None: each is quicker to look at.
    """
    width = len(numbers[0])
    if len(numbers) < _FEW or not 0 < width <= MAX_SEQUENCE_DIGITS:
        return None
    lines = ("\n".join(numbers) + "\n").encode()
    if len(lines) != len(numbers) * (width + 1):
        return None
    table = np.frombuffer(lines, np.uint8)
    # Line ends in the last column, and only there: all are of this width.
    if (
        np.count_nonzero(table < _ZERO) != len(numbers)
        or table.max() > _NINE
        or (table[width :: width + 1] != _LF).any()
    ):
        return None
    texts = np.frombuffer(lines, f"S{width + 1}")
    return bool((texts[1:] > texts[:-1]).all())
