"""Sequences, shards, records and batches, and the exceptions with which a handler decides about failures.

Every module of the package may import this one; it imports nothing of the package.

A record hook, synchronous or not, may raise one of these exceptions instead of an error::

    raise Retry("the service is busy", after=5)     # again, in 5 seconds
    raise Discard("a test record")                  # no row, no dead letter
    raise Fatal("no such account")                  # no more attempts

A hook that receives a whole batch names the affected records: with ``records=`` of ``Discard`` and ``Fatal``, or by
returning a ``BatchResult``. If it does not name them, the server finds them by halving the batch, as for other errors.
"""

from __future__ import annotations

import enum
import math
from abc import ABCMeta
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, overload

import orjson
import pybase64

if TYPE_CHECKING:
    import pyarrow as pa

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Sequence(NamedTuple):
    """A record's place in its shard: sequence number and sub-sequence number, compared as two integers.

    Never compare sequences of different shards: the result has no meaning.
    """

    number: int
    """The sequence number."""
    sub: int = 0
    """The record's index in a KPL aggregate, from 0; 0 for a plain record."""

    def __str__(self) -> str:
        """Return ``number`` for plain records and ``number/sub`` for later records of a KPL aggregate."""
        return f"{self.number}/{self.sub}" if self.sub else str(self.number)


_SUB_BITS: Final = 64


def pack_sequence(sequence: Sequence | None) -> bytes | None:
    """Return a sequence as bytes for another process: its number may have 56 digits, more than MessagePack's integers."""
    if sequence is None:
        return None
    number = sequence[0] << _SUB_BITS | sequence[1]
    return number.to_bytes((number.bit_length() + 7) // 8)


def unpack_sequence(data: bytes | None) -> Sequence | None:
    """Return the sequence that ``pack_sequence`` made bytes of."""
    if data is None:
        return None
    number = int.from_bytes(data)
    return Sequence(number >> _SUB_BITS, number & (1 << _SUB_BITS) - 1)


@dataclass(frozen=True, slots=True)
class Shard:
    """One ordered source of records, as the life-cycle hooks see it."""

    id: str
    """The shard's id, e.g. ``shardId-000000000001``."""
    start: str | None = None
    """Where the daemon starts: a sequence number in digits, or ``TRIM_HORIZON``, ``LATEST``, ``AT_TIMESTAMP`` or
    ``SHARD_END``. None in version 1 of the protocol, which does not send it."""
    start_sub: int = 0
    """The sub-sequence number of ``start``: the index in a KPL aggregate, from 0."""


class RecordMethods:
    """The methods that all kinds of records share. They compute their results from the fields at each call."""

    __slots__ = ()

    if TYPE_CHECKING:
        shard_id: str
        data: Any
        partition_key: str | None
        sequence_text: str
        sub_sequence_number: int
        arrival_ms: int | None

    def text(self, encoding: str = "utf-8") -> str:
        """Return the payload as text. Raises ValueError when the bytes are not valid in ``encoding``."""
        return str(self.data, encoding)

    def json(self) -> Any:
        """Return the payload as parsed JSON. Raises ValueError (``orjson.JSONDecodeError``) when it is not JSON."""
        return orjson.loads(self.data)

    @property
    def sequence_number(self) -> int:
        """The sequence number as an integer."""
        return int(self.sequence_text)

    @property
    def sequence(self) -> Sequence:
        """Sequence number and sub-sequence number, comparable within one shard."""
        return Sequence(int(self.sequence_text), self.sub_sequence_number)

    @property
    def approximate_arrival_timestamp(self) -> datetime | None:
        """When the stream received the record, approximately: an aware UTC datetime.

        None if the daemon does not send it (version 1 of the protocol).
        """
        ms = self.arrival_ms
        return None if ms is None else _EPOCH + timedelta(milliseconds=ms)

    @property
    def raw_data(self) -> str | bytes | None:
        """The payload as received (base64 text), or its bytes once it was decoded. A dead letter keeps invalid base64 text."""
        return self.data  # type: ignore[no-any-return]  # kinds that decode at once have nothing else

    def __repr__(self) -> str:
        """Name the record without its payload."""
        return f"<Record {self.shard_id} {self.sequence} key={self.partition_key!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a plain Record: the classes of the wire's records are made while the server runs."""
        remade = partial(
            Record,
            shard_id=self.shard_id,
            sequence_number=self.sequence_text,
            sub_sequence_number=self.sub_sequence_number,
            data=self.raw_data,
            partition_key=self.partition_key,
            arrival_ms=self.arrival_ms,
        )
        return remade, ()


class Record(RecordMethods, metaclass=ABCMeta):
    """One record of a shard. It is immutable, and decodes its payload, numbers and times when they are first read.

    The records of a batch are instances of other classes with the same attributes (``protocol/wire_records.py``).
    ``isinstance(record, Record)`` is true for them.
    """

    __slots__ = ("_data", "arrival_ms", "partition_key", "sequence_text", "shard_id", "sub_sequence_number")

    shard_id: str
    """The shard's id."""
    partition_key: str | None
    """The partition key; None if the source sends null, as DynamoDB Streams always do."""
    sequence_text: str
    """The sequence number in digits, as the source sent it."""
    sub_sequence_number: int
    """The record's index in a KPL aggregate, from 0; 0 for a plain record."""
    arrival_ms: int | None
    """When the stream received the record, approximately: milliseconds since the Unix epoch; None if the daemon does not
    send it (version 1 of the protocol)."""
    _data: str | bytes | None

    def __init__(
        self,
        *,
        shard_id: str,
        sequence_number: str,
        sub_sequence_number: int = 0,
        data: str | bytes | None = b"",
        partition_key: str | None = None,
        arrival_ms: int | None = None,
    ) -> None:
        """Create a record, for example in a test: ``data`` is base64 text or plain bytes, ``sequence_number`` is digits."""
        keep = object.__setattr__
        keep(self, "shard_id", shard_id)
        keep(self, "sequence_text", sequence_number)
        keep(self, "sub_sequence_number", sub_sequence_number)
        keep(self, "_data", data)
        keep(self, "partition_key", partition_key)
        keep(self, "arrival_ms", arrival_ms)

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __setattr__(self, name: str, value: object) -> None:
            """Raise AttributeError: retries, dead letters and later calls use the record as it was received."""
            raise AttributeError(f"a record cannot be changed: {name}")

        def __delattr__(self, name: str) -> None:
            """Raise AttributeError, as ``__setattr__`` does."""
            raise AttributeError(f"a record cannot be changed: {name}")

    @property
    def data(self) -> bytes:
        """The payload as bytes; empty if the daemon sent null. Raises ValueError if the base64 text is invalid."""
        data = self._data
        if isinstance(data, str):
            data = decode_payload(self, data)
            object.__setattr__(self, "_data", data)
        return data or b""

    @property
    def raw_data(self) -> str | bytes | None:
        """The payload as received (base64 text), or its bytes once it was decoded. A dead letter keeps invalid base64 text."""
        return self._data


def decode_payload(record: RecordMethods, text: str) -> bytes:
    """Return a payload of base64. Raises ValueError, naming the record, when it is damaged."""
    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"record {record.sequence}: data is not base64: {error}") from error


class Batch(SequenceABC[Record]):
    """The records of one ``processRecords`` call, in shard order: a sequence with ``len``, indexes, slices, iteration."""

    __slots__ = ("_records", "millis_behind_latest", "shard_id")

    shard_id: str
    """The shard's id."""
    millis_behind_latest: int | None
    """How far the batch is behind the shard's newest record, in milliseconds; None if the daemon does not send it."""

    def __init__(
        self, records: SequenceABC[Record], *, shard_id: str, millis_behind_latest: int | None = None
    ) -> None:
        """Create a batch of one shard's records; ``millis_behind_latest`` is None if the daemon does not send it."""
        self._records = records
        self.shard_id = shard_id
        self.millis_behind_latest = millis_behind_latest

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Batch: ...
    def __getitem__(self, index: int | slice) -> Record | Batch:
        if isinstance(index, slice):
            return Batch(
                self._records[index], shard_id=self.shard_id, millis_behind_latest=self.millis_behind_latest
            )
        return self._records[index]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def to_arrow(self) -> pa.Table:
        """Return the batch as an Arrow table with one row for each record, in order.

        Columns: ``data`` binary, ``partition_key`` string, ``sequence_number`` string (decimal digits),
        ``sub_sequence_number`` int64, ``approximate_arrival_timestamp`` timestamp[ms, UTC]. Raises ValueError if the
        base64 text of a record is invalid.
        """
        import pyarrow as pa  # noqa: PLC0415  # handlers that never ask for Arrow never load it

        records = self._records
        return pa.table(
            {
                "data": pa.array([r.data for r in records], pa.binary()),
                "partition_key": pa.array([r.partition_key for r in records], pa.string()),
                "sequence_number": pa.array([r.sequence_text for r in records], pa.string()),
                "sub_sequence_number": pa.array([r.sub_sequence_number for r in records], pa.int64()),
                "approximate_arrival_timestamp": pa.array(
                    [r.arrival_ms for r in records], pa.timestamp("ms", tz="UTC")
                ),
            }
        )

    def __repr__(self) -> str:
        """Name the batch without its records."""
        return f"<Batch {self.shard_id} records={len(self)}>"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that the handler could not process, with everything needed to inspect it and to process it again."""

    shard_id: str
    sequence: Sequence
    partition_key: str | None
    data: bytes
    arrival_ms: int | None
    attempts: int
    error: str
    """``ExceptionType: message``."""
    traceback: str
    handler: str
    at_ms: int
    parked_behind: Sequence | None = None
    """The dead letter of the same partition key that it waits behind (``on_key_failure = park``); the handler was
    then not called with it, unless ``attempts`` says so."""
    handler_version: str = ""
    """Which version of the handler it was (``HandlerSpec.version``); empty when that is not known."""
    timer: str | None = None
    """For a timer whose callback failed, its id: ``callback`` or ``callback/name``. Then ``data`` is its payload in MessagePack, and
    ``sequence`` that of the last record before it (0: there was none)."""
    due_ms: int | None = None
    """When the timer was due; None for records."""

    @property
    def record(self) -> str:
        """Which record it is, ``shard/sequence/sub-sequence``: the same however often its letter is written.

        Of a timer, ``shard/due time/timer/key``: after a crash it may fire behind another record.
        """
        if self.timer is not None:
            return f"{self.shard_id}/{self.due_ms}/{self.timer}/{self.partition_key}"
        return f"{self.shard_id}/{self.sequence.number}/{self.sequence.sub}"


class Hook(enum.StrEnum):
    """The life-cycle hooks, named as the KCL names them."""

    INITIALIZE = "initialize"
    LEASE_LOST = "lease_lost"
    SHARD_ENDED = "shard_ended"
    SHUTDOWN_REQUESTED = "shutdown_requested"


class Verdict(Exception):
    """The base class of exceptions that a handler may raise to decide what happens to its records.

    The attributes have defaults: a subclass need not call ``super().__init__``.
    """

    reason: str = ""
    """Why, for the log and the dead letter."""
    records: tuple[int | Record, ...] | None = None
    """The affected records, or their indexes in the batch (from 0); None: all records of the call."""

    def __init__(self, reason: str = "", *, records: Iterable[int | Record] | None = None) -> None:
        """Create the exception for ``records`` (records, or their indexes in the batch from 0; None: all of the call).

        The server calls the handler again at once with the other records. That does not count as an attempt for them.
        ``reason`` appears in the log and in the dead letter.
        """
        super().__init__(*([reason] if reason else []))
        self.reason = reason
        self.records = None if records is None else tuple(records)


class Discard(Verdict):
    """Raise it for a record that gives neither a row nor a dead letter.

    The server only counts it (``discarded`` of the log event ``batch.done``).
    """


class Fatal(Verdict):
    """Raise it for a record that cannot succeed. The server makes no further attempt and applies ``on_failure`` at once."""


class Retry(Verdict):
    """Raise it to have the call repeated after ``after`` seconds. The repetition counts as an attempt."""

    after: float | None = None
    """Seconds until the next attempt; None: the back-off's delay."""

    def __init__(self, reason: str = "", *, after: float | None = None) -> None:
        """Create the exception. Raises ValueError unless ``after`` is None, or finite and at least 0 (seconds)."""
        if after is not None and not (math.isfinite(after) and after >= 0):
            raise ValueError(f"Retry(after={after!r}): it must be a number of seconds from 0 on")
        super().__init__(reason)
        self.after = after


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of ``process_records`` or ``process_table`` when some records failed. The others are done."""

    rows: Any = None
    """What the hook returns without failures: a list with an item for each record, or a table. The server ignores rows
    of failed records."""
    failed: Iterable[int | Record] | Mapping[int | Record, str | BaseException] = ()
    """The failed records, or their indexes in the batch (from 0). A mapping also gives the cause: a text, or an exception.
    The server treats an exception (``Retry``, ``Discard`` and ``Fatal``, too) as if the record had raised it."""
