"""What record processors are called with, under the names and with the attributes that amazon_kclpy documents."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mldserver.handler.kclpy.progress import Checkpointer
    from mldserver.records import RecordMethods

__all__ = [
    "DictRecord",
    "InitializeInput",
    "LeaseLostInput",
    "ProcessRecordsInput",
    "Record",
    "ShardEndedInput",
    "ShutdownInput",
    "ShutdownRequestedInput",
]


class _Attributes:
    """What every record has, of whatever version."""

    _wire: RecordMethods

    def __init__(self, record: RecordMethods) -> None:
        """Wrap a record of the server."""
        self._wire = record

    @property
    def binary_data(self) -> bytes:
        """The payload. Raises ValueError when the daemon's base64 is damaged."""
        data: bytes = self._wire.data
        return data

    @property
    def data(self) -> str | None:
        """The payload in base64; None when the daemon sent null."""
        raw = self._wire.raw_data
        return base64.b64encode(raw).decode() if isinstance(raw, bytes) else raw

    @property
    def sequence_number(self) -> str:
        """The sequence number in decimal digits."""
        return self._wire.sequence_text

    @property
    def sub_sequence_number(self) -> int:
        """The place inside a KPL aggregate; 0 for plain records."""
        return self._wire.sub_sequence_number

    @property
    def partition_key(self) -> str | None:
        """The partition key."""
        return self._wire.partition_key

    @property
    def timestamp_millis(self) -> int | None:
        """Approximate arrival time in milliseconds since the epoch; None when the daemon does not say."""
        return self._wire.arrival_ms

    @property
    def approximate_arrival_timestamp(self) -> datetime | None:
        """The same as a datetime in local time without a zone, as amazon_kclpy gives it."""
        ms = self._wire.arrival_ms
        return None if ms is None else datetime.fromtimestamp(ms / 1000)  # noqa: DTZ006  # what processors were written for


class Record(_Attributes):
    """A record as processors of version 2 and 3 read it: by attribute, or by the wire's field names."""

    def get(self, field: str) -> Any:
        """Return a field by its name on the wire, such as ``partitionKey``. Raises KeyError for others."""
        return _fields(self)[field]

    def __getitem__(self, field: str) -> Any:
        return self.get(field)


class DictRecord(dict[str, Any], _Attributes):
    """A record as processors of version 1 read it: a dict of the wire's fields, which has the attributes too."""

    def __init__(self, record: RecordMethods) -> None:
        """Wrap a record of the server."""
        _Attributes.__init__(self, record)
        super().__init__(_fields(self))


def _fields(record: _Attributes) -> dict[str, Any]:
    """Return a record's fields under their names on the wire."""
    return {
        "data": record.data,
        "partitionKey": record.partition_key,
        "sequenceNumber": record.sequence_number,
        "subSequenceNumber": record.sub_sequence_number,
        "approximateArrivalTimestamp": record.timestamp_millis,
        "action": "record",
    }


@dataclass(frozen=True, slots=True)
class InitializeInput:
    """Where a processor starts."""

    shard_id: str
    sequence_number: str | None
    sub_sequence_number: int = 0
    action: str = "initialize"


@dataclass(frozen=True, slots=True)
class ProcessRecordsInput:
    """Records to be processed."""

    records: list[Record]
    millis_behind_latest: int | None
    checkpointer: Checkpointer
    action: str = "processRecords"


@dataclass(frozen=True, slots=True)
class LeaseLostInput:
    """The lease went elsewhere."""

    action: str = "leaseLost"


@dataclass(frozen=True, slots=True)
class ShardEndedInput:
    """The shard is read to its end."""

    checkpointer: Checkpointer
    action: str = "shardEnded"


@dataclass(frozen=True, slots=True)
class ShutdownInput:
    """The end of a processor of version 2: ``TERMINATE`` (the shard has ended) or ``ZOMBIE`` (the lease is lost)."""

    reason: str
    checkpointer: Checkpointer
    action: str = "shutdown"


@dataclass(frozen=True, slots=True)
class ShutdownRequestedInput:
    """The lease is about to go elsewhere: the last chance to checkpoint."""

    checkpointer: Checkpointer
    action: str = "shutdownRequested"
