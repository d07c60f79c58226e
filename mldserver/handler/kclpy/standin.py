"""What record processors are called with, as amazon_kclpy documents it; and what stands in for it where it is not installed.

What a processor's module takes from amazon_kclpy while it is imported are base classes, ``CheckpointError``, and names for annotations. An installed
amazon_kclpy is always preferred: its base classes are used as they are.
"""

from __future__ import annotations

import base64
import contextlib
import sys
from dataclasses import dataclass
from datetime import datetime
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

from mldserver.handler.kclpy.progress import Checkpointer, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    from mldserver.records import RecordMethods

PACKAGE = "amazon_kclpy"


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


class _Base:
    """What all versions share: hooks that a processor must have, and this one may leave out."""

    def shutdown_requested(self, *_: Any) -> None:
        """Do nothing."""


def _record_processor(module: str, version: int) -> type:
    return type("RecordProcessorBase", (_Base,), {"__module__": f"{PACKAGE}.{module}", "version": version})


class _KCLProcess:
    """``amazon_kclpy.kcl.KCLProcess``: there is no such process here, the server runs the processor."""

    __module__ = f"{PACKAGE}.kcl"

    def __init__(self, record_processor: Any, *_: Any, **__: Any) -> None:
        """Take what amazon_kclpy's takes."""
        self.record_processor = record_processor

    def run(self) -> None:
        """Refuse to run: it would read the server's standard input."""
        raise RuntimeError(
            "KCLProcess.run() is called while the module is imported; put it under if __name__ == '__main__'"
        )


_MODULES: dict[str, dict[str, Any]] = {
    PACKAGE: {},
    f"{PACKAGE}.checkpoint_error": {"CheckpointError": CheckpointError},
    f"{PACKAGE}.messages": {
        kind.__name__: kind
        for kind in (
            *(CheckpointError, DictRecord, InitializeInput, LeaseLostInput, ProcessRecordsInput, Record),
            *(ShardEndedInput, ShutdownInput, ShutdownRequestedInput),
        )
    },
    f"{PACKAGE}.kcl": {
        "RecordProcessorBase": _record_processor("kcl", 1),
        "KCLProcess": _KCLProcess,
        "Checkpointer": Checkpointer,
        "CheckpointError": CheckpointError,
    },
    f"{PACKAGE}.v2": {},
    f"{PACKAGE}.v2.processor": {"RecordProcessorBase": _record_processor("v2.processor", 2)},
    f"{PACKAGE}.v3": {},
    f"{PACKAGE}.v3.processor": {"RecordProcessorBase": _record_processor("v3.processor", 3)},
}
_PACKAGES = frozenset({PACKAGE, f"{PACKAGE}.v2", f"{PACKAGE}.v3"})


class _Finder(MetaPathFinder):
    """Finds the stand-in's modules behind everything that is installed."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a module's spec when it is ours to give: never a part of an installed amazon_kclpy."""
        if fullname not in _MODULES or (fullname != PACKAGE and not _is_ours(sys.modules.get(PACKAGE))):
            return None
        return ModuleSpec(fullname, _FILLER, origin="mldserver", is_package=fullname in _PACKAGES)


class _Filler(Loader):
    """Fills a module with its names."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module."""
        vars(module).update(_MODULES[module.__name__])


_FILLER = _Filler()


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Import what amazon_kclpy lacks from here meanwhile; what was imported stays.

    A processor that imports more of it later, in one of its hooks, finds all of it: the modules come together.
    """
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
        if _is_ours(sys.modules.get(PACKAGE)):
            for name in _MODULES:
                __import__(name)
    finally:
        sys.meta_path.remove(finder)


def checkpoint_error() -> type[Exception]:
    """Return the ``CheckpointError`` that an imported processor knows: amazon_kclpy's, where it was imported."""
    for name in (f"{PACKAGE}.checkpoint_error", f"{PACKAGE}.kcl"):
        error = getattr(sys.modules.get(name), "CheckpointError", None)
        if isinstance(error, type) and issubclass(error, Exception):
            return error
    return CheckpointError


def _is_ours(module: ModuleType | None) -> bool:
    return getattr(getattr(module, "__spec__", None), "loader", None) is _FILLER
