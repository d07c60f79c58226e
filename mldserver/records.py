"""The vocabulary: sequences, shards, records and batches; and what a handler may say about its own failures.

Everything else in the package may import this module; it imports nothing of the package.

Instead of letting an error speak, any record hook may raise, synchronous or not::

    raise Retry("the service is busy", after=5)     # again, in 5 seconds
    raise Discard("a test record")                  # no row, no dead letter
    raise Fatal("no such account")                  # no more attempts

A hook that takes a whole batch says which records it means: by ``records=`` of ``Discard`` and ``Fatal``, or by
returning a ``BatchResult``. What it does not name is looked for by halving, as with any other error.
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
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import orjson
import pybase64

if TYPE_CHECKING:
    import pyarrow as pa

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Sequence(NamedTuple):
    """A record's place in its shard: (sequence number, sub-sequence number), compared as two integers.

    Sequences of different shards are not comparable in any meaningful way and must never be compared.
    """

    number: int
    sub: int = 0

    def __str__(self) -> str:
        """Return ``number`` for plain records and ``number/sub`` for later records of a KPL aggregate."""
        return f"{self.number}/{self.sub}" if self.sub else str(self.number)


@dataclass(frozen=True, slots=True)
class Shard:
    """One ordered source of records, as the life-cycle hooks see it."""

    id: str
    """The shard's id, e.g. ``shardId-000000000001``."""
    start: str | None = None
    """Where the daemon starts: digits, ``TRIM_HORIZON``, ``LATEST``, ``AT_TIMESTAMP``, ``SHARD_END``; None in V1."""
    start_sub: int = 0
    """Which user record of a KPL aggregate that is, if its number is one's; else 0."""


class RecordMethods:
    """What is the same for every kind of record: what is read from its fields when it is asked for."""

    __slots__ = ()

    if TYPE_CHECKING:
        shard_id: str
        data: Any
        partition_key: str | None
        sequence_text: str
        sub_sequence_number: int
        arrival_ms: int | None

    def text(self, encoding: str = "utf-8") -> str:
        """Return the payload as text."""
        return str(self.data, encoding)

    def json(self) -> Any:
        """Return the payload as parsed JSON. Raises ValueError (orjson's) when it is none."""
        return orjson.loads(self.data)

    @property
    def sequence_number(self) -> int:
        """The sequence number as an integer."""
        return int(self.sequence_text)

    @property
    def sequence(self) -> Sequence:
        """Sequence number and sub-sequence number, comparable inside one shard."""
        return Sequence(int(self.sequence_text), self.sub_sequence_number)

    @property
    def approximate_arrival_timestamp(self) -> datetime | None:
        """Approximate arrival time as an aware UTC datetime; None when the daemon does not say (V1)."""
        ms = self.arrival_ms
        return None if ms is None else _EPOCH + timedelta(milliseconds=ms)

    @property
    def raw_data(self) -> str | bytes | None:
        """The payload as it came, or as it was decoded since: what is left to keep of damaged base64."""
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
    """One record of a shard. Made lazily: times and numbers are made of the wire's digits when they are first read.

    It cannot be changed. The records of a batch are of other classes (``protocol/wire_records.py``), which count as
    subclasses of this one and look the same.
    """

    __slots__ = ("_data", "arrival_ms", "partition_key", "sequence_text", "shard_id", "sub_sequence_number")

    shard_id: str
    """The shard's id."""
    partition_key: str | None
    """None for null (always in DynamoDB Streams)."""
    sequence_text: str
    """The sequence number in the digits of the wire."""
    sub_sequence_number: int
    arrival_ms: int | None
    """Approximate arrival time in milliseconds since the epoch; None when the daemon does not say (V1)."""
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
        """Take the wire's own forms: ``data`` as base64 text (or plain bytes), ``sequence_number`` as digits."""
        keep = object.__setattr__
        keep(self, "shard_id", shard_id)
        keep(self, "sequence_text", sequence_number)
        keep(self, "sub_sequence_number", sub_sequence_number)
        keep(self, "_data", data)
        keep(self, "partition_key", partition_key)
        keep(self, "arrival_ms", arrival_ms)

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __setattr__(self, name: str, value: object) -> None:
            """Refuse: what is read of a record later (rows, dead letters, further calls) is what came."""
            raise AttributeError(f"a record cannot be changed: {name}")

        def __delattr__(self, name: str) -> None:
            """Refuse, too."""
            raise AttributeError(f"a record cannot be changed: {name}")

    @property
    def data(self) -> bytes:
        """The payload; empty when the daemon sent null.

        Raises ValueError when the daemon's base64 is damaged.
        """
        data = self._data
        if isinstance(data, str):
            data = decode_payload(self, data)
            object.__setattr__(self, "_data", data)
        return data or b""

    @property
    def raw_data(self) -> str | bytes | None:
        """The payload as it came, or as it was decoded since: what is left to keep of damaged base64."""
        return self._data


def decode_payload(record: RecordMethods, text: str) -> bytes:
    """Return a payload of base64. Raises ValueError, naming the record, when it is damaged."""
    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"record {record.sequence}: data is not base64: {error}") from error


class Batch(SequenceABC[Record]):
    """The records of one ``processRecords`` call, in shard order."""

    __slots__ = ("_records", "millis_behind_latest", "shard_id")

    def __init__(
        self, records: SequenceABC[Record], *, shard_id: str, millis_behind_latest: int | None = None
    ) -> None:
        """Hold ``records`` of one shard; ``millis_behind_latest`` is None when the daemon does not say."""
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
        """Return the batch as an Arrow table.

        Columns: ``data`` binary, ``partition_key`` string, ``sequence_number`` string (decimal),
        ``sub_sequence_number`` int64, ``approximate_arrival_timestamp`` timestamp[ms, UTC].
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
    """A record that the handler could not take, with all that is needed to look at it and to run it again."""

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

    @property
    def record(self) -> str:
        """Which record it is, ``shard/sequence/sub-sequence``: the same however often its letter is written."""
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
    records: tuple[int | Record, ...] | None = None

    def __init__(self, reason: str = "", *, records: Iterable[int | Record] | None = None) -> None:
        """Give a ``reason`` for the log and the dead letter.

        ``records``: the affected records, or their indexes in the batch (from 0). None: all records of the call. The
        handler is called again at once with the others, which does not count as an attempt for them.
        """
        super().__init__(*([reason] if reason else []))
        self.reason = reason
        self.records = None if records is None else tuple(records)


class Discard(Verdict):
    """The record produces neither a row nor a dead letter; the server counts it (``discarded`` of ``batch.done``)."""


class Fatal(Verdict):
    """The record cannot succeed: no more attempts, what ``on_failure`` says happens at once."""


class Retry(Verdict):
    """The server repeats the call after ``after`` seconds; the repetition counts as an attempt."""

    after: float | None = None

    def __init__(self, reason: str = "", *, after: float | None = None) -> None:
        """Wait ``after`` seconds (None: the back-off). Raises ValueError unless it is finite and at least 0."""
        if after is not None and not (math.isfinite(after) and after >= 0):
            raise ValueError(f"Retry(after={after!r}): it must be a number of seconds from 0 on")
        super().__init__(reason)
        self.after = after


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What ``process_records`` or ``process_table`` may return to name the records that failed; the others are done."""

    rows: Any = None
    """What the hook would return without failures; rows of records that failed are left out."""
    failed: Iterable[int | Record] | Mapping[int | Record, str | BaseException] = ()
    """Records, or their places in the batch (from 0); as a mapping with why: a text, or an exception (also ``Retry``,
    ``Discard``, ``Fatal``), which is then treated as if the record had raised it."""
