"""The vocabulary: sequences, shards, records and batches.

Everything else in the package may import this module; it imports nothing of the package.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import orjson

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Batch", "Record", "Sequence", "Shard"]

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


class Record:
    """One record of a shard. Made lazily: data, times and numbers are decoded when they are first read."""

    __slots__ = ("_arrival_ms", "_data", "_number", "partition_key", "shard_id", "sub_sequence_number")

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
        self.shard_id = shard_id
        self._number = sequence_number
        self.sub_sequence_number = sub_sequence_number
        self._data = data
        self.partition_key = partition_key
        self._arrival_ms = arrival_ms

    @property
    def data(self) -> bytes:
        """The payload; empty when the daemon sent null.

        Raises ValueError when the daemon's base64 is damaged.
        """
        data = self._data
        if type(data) is str:
            try:
                data = base64.b64decode(data, validate=True)
            except binascii.Error as error:
                raise ValueError(f"record {self.sequence}: data is not base64: {error}") from error
            self._data = data
        return data or b""  # type: ignore[return-value]  # str was replaced above

    @property
    def raw_data(self) -> str | bytes | None:
        """The payload as it came, or as it was decoded since: what is left to keep of damaged base64."""
        return self._data

    def text(self, encoding: str = "utf-8") -> str:
        """Return the payload as text."""
        return self.data.decode(encoding)

    def json(self) -> Any:
        """Return the payload as parsed JSON. Raises ValueError (orjson's) when it is none."""
        return orjson.loads(self.data)

    @property
    def sequence_number(self) -> int:
        """The sequence number as an integer."""
        return int(self._number)

    @property
    def sequence(self) -> Sequence:
        """Sequence number and sub-sequence number, comparable inside one shard."""
        return Sequence(int(self._number), self.sub_sequence_number)

    @property
    def sequence_text(self) -> str:
        """The sequence number in the digits of the wire."""
        return self._number

    @property
    def arrival_ms(self) -> int | None:
        """Approximate arrival time in milliseconds since the epoch; None when the daemon does not say (V1)."""
        return self._arrival_ms

    @property
    def approximate_arrival_timestamp(self) -> datetime | None:
        """Approximate arrival time as an aware UTC datetime; None when the daemon does not say (V1)."""
        ms = self._arrival_ms
        return None if ms is None else _EPOCH + timedelta(milliseconds=ms)

    def __repr__(self) -> str:
        """Name the record without its payload."""
        return f"<Record {self.shard_id} {self.sequence} key={self.partition_key!r}>"


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
