"""What amazon_kclpy's record processors are called with and checkpoint by, and what stands in for it where it is missing.

How far a processor has checkpointed, and the ``checkpointer`` that it holds, are a synchronous core. Their rules are those
of the KCL's checkpointer (KCL 3.1.3, ShardRecordProcessorCheckpointer): a checkpoint lies between
the last one and the last record delivered, else it is an IllegalArgumentException. Two things differ, since a call that
failed is made again here. A checkpoint that names no record covers the present call, not all that was ever delivered;
and one that names a record behind the present call (the processor remembers it from the call that failed) counts up
to the present call's end. So a checkpoint never covers failed records outside the present call.

What a processor's module takes from amazon_kclpy while it is imported are base classes, ``CheckpointError``, and names for
annotations. An installed amazon_kclpy is always preferred: its base classes are used as they are.
"""

from __future__ import annotations

import base64
import contextlib
import sys
from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from mldserver.records import RecordMethods, Sequence

PACKAGE = "amazon_kclpy"


_REMIND_MS = 10 * 60_000
_MAX_DIGITS = 129  # AWS limit


class CheckpointRefused(Exception):
    """A checkpoint that the KCL would refuse; its argument is the simple name of Java's exception."""


class ProcessorProgress:
    """Tracks which records a processor has received, and which of them it has checkpointed."""

    __slots__ = (
        *("_lowest", "_call_end", "_watched_position", "_since_ms", "_reminded_ms"),
        *("closed", "delivered", "end_checkpointed", "position"),
    )

    def __init__(self, start: str | None = None, start_sub: int = 0) -> None:
        """Begin where the daemon starts.

        A sequence number there is a lower bound for checkpoints; TRIM_HORIZON and the like are not.
        """
        self.delivered: Sequence | None = None
        """The last record that the processor was given."""
        self.position: Sequence | None = None
        """The last record checkpointed; None before the first checkpoint."""
        self.end_checkpointed = False
        """Whether a checkpoint covered everything delivered since ``ending``."""
        self.closed = False
        """Whether the lease or the connection is gone: nothing can be checkpointed any more."""
        self._lowest = Sequence(int(start), start_sub) if start is not None and start.isdigit() else None
        self._call_end: Sequence | None = None
        """The last record of the present call."""
        self._watched_position: Sequence | None = None
        """The checkpoint since which ``overdue_ms`` measures."""
        self._since_ms: int | None = None
        self._reminded_ms = 0

    def deliver(self, last: Sequence | None) -> None:
        """Begin a call with records up to ``last``, perhaps again; None: a call without records."""
        self._call_end = self.delivered if last is None else last
        if last is not None and (self.delivered is None or last > self.delivered):
            self.delivered = last

    def end_call(self) -> None:
        """End a batch, or begin a hook: everything delivered may be checkpointed."""
        self._call_end = self.delivered
        self.end_checkpointed = False

    def checkpoint(self, number: object = None, sub: object = None) -> None:
        """Note a checkpoint at a record's sequence number (text or integer), or, for None, at the last record of this call.

        Without ``sub`` it is the number's first user record. Raises CheckpointRefused where the KCL refuses (module docstring).
        """
        if self.closed:
            raise CheckpointRefused("ShutdownException")
        wanted = self._call_end
        if number is not None:
            wanted = _sequence(number, sub)
            lowest = self._lowest if self.position is None else self.position
            if wanted is None or (lowest is not None and wanted < lowest):
                raise CheckpointRefused("IllegalArgumentException")
            if wanted != lowest and (self.delivered is None or wanted > self.delivered):
                raise CheckpointRefused("IllegalArgumentException")
        self.end_checkpointed |= wanted == self.delivered
        if wanted is not None and self._call_end is not None:
            wanted = min(wanted, self._call_end)
            self.position = wanted if self.position is None else max(wanted, self.position)

    def overdue_ms(self, now_ms: int) -> int | None:
        """Return for how many milliseconds delivered records have waited for a checkpoint: once in ten minutes; else None."""
        if self.delivered == self.position or self.position != self._watched_position:
            self._watched_position, self._since_ms = self.position, None
        if self.delivered == self.position:
            return None
        if self._since_ms is None:
            self._since_ms = self._reminded_ms = now_ms
        if now_ms - self._reminded_ms < _REMIND_MS:
            return None
        self._reminded_ms = now_ms
        return now_ms - self._since_ms


def _sequence(number: object, sub: object) -> Sequence | None:
    """Return a processor's value as a sequence; None if it is not one."""
    text = str(number)
    if isinstance(number, bool) or not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        return None
    if sub is None:
        return Sequence(int(text))
    if isinstance(sub, bool) or not isinstance(sub, int) or sub < 0:
        return None
    return Sequence(int(text), sub)


class CheckpointError(Exception):
    """A checkpoint was refused; ``value`` is the simple name of Java's exception, e.g. ``ShutdownException``."""

    __module__ = "amazon_kclpy.checkpoint_error"

    def __init__(self, value: str) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(eq=False, repr=False)
class Checkpointer:
    """Notes how far a processor is done with its shard's records.

    A checkpoint is durable with the server's next flush, and reaches the daemon behind that; so it never waits, and
    never meets a throttled lease table.
    """

    _progress: ProcessorProgress
    _error: type[Exception]
    """What the processor catches: ``CheckpointError``, of amazon_kclpy or of the stand-in for it."""

    def checkpoint(
        self, sequence_number: str | int | None = None, sub_sequence_number: int | None = None
    ) -> None:
        """Note that every record up to a sequence is done; without one: every record delivered so far.

        Raises CheckpointError: ``IllegalArgumentException`` for what was not delivered, lies before the last checkpoint,
        or is not a sequence number; ``ShutdownException`` once the lease, or the connection, is gone.
        """
        try:
            self._progress.checkpoint(sequence_number, sub_sequence_number)
        except CheckpointRefused as refused:
            raise self._error(str(refused)) from None


class _Attributes:
    """The attributes of records of all versions."""

    _wire: RecordMethods

    def __init__(self, record: RecordMethods) -> None:
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

    __getitem__ = get


class DictRecord(dict[str, Any], _Attributes):
    """A record as processors of version 1 read it: a dict of the wire's fields, which has the attributes too."""

    def __init__(self, record: RecordMethods) -> None:
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
    """Another worker has the lease."""

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
    """Another worker will get the lease: the last chance to checkpoint."""

    checkpointer: Checkpointer
    action: str = "shutdownRequested"


class _Base:
    """The base class of all versions: hooks that amazon_kclpy demands and this server does not."""

    def shutdown_requested(self, *_: Any) -> None:
        """Do nothing."""


_BASES = {
    version: type("RecordProcessorBase", (_Base,), {"__module__": f"{PACKAGE}.{module}", "version": version})
    for version, module in enumerate(("kcl", "v2.processor", "v3.processor"), 1)
}


class _KCLProcess:
    """``amazon_kclpy.kcl.KCLProcess``: it starts no process, since the server runs the processor."""

    __module__ = f"{PACKAGE}.kcl"

    def __init__(self, record_processor: Any, *_: Any, **__: Any) -> None:
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
        "RecordProcessorBase": _BASES[1],
        "KCLProcess": _KCLProcess,
        "Checkpointer": Checkpointer,
        "CheckpointError": CheckpointError,
    },
    f"{PACKAGE}.v2": {},
    f"{PACKAGE}.v2.processor": {"RecordProcessorBase": _BASES[2]},
    f"{PACKAGE}.v3": {},
    f"{PACKAGE}.v3.processor": {"RecordProcessorBase": _BASES[3]},
}
_PACKAGES = frozenset({PACKAGE, f"{PACKAGE}.v2", f"{PACKAGE}.v3"})


class _StandIn(MetaPathFinder, Loader):
    """Finds the stand-in's modules behind everything that is installed, and fills them with their names."""

    def find_spec(
        self, fullname: str, _path: abc.Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a stand-in module; never of a part of an installed amazon_kclpy."""
        if fullname not in _MODULES or (fullname != PACKAGE and not _is_ours(sys.modules.get(PACKAGE))):
            return None
        return ModuleSpec(fullname, self, origin="mldserver", is_package=fullname in _PACKAGES)

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module."""
        vars(module).update(_MODULES[module.__name__])


_STAND_IN = _StandIn()


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Make imports of amazon_kclpy find this module's stand-in while the context lasts, if the package is not installed.

    If the stand-in was imported, import all its modules: the processor may need another module later, in a hook.
    """
    sys.meta_path.append(_STAND_IN)
    try:
        yield
        if _is_ours(sys.modules.get(PACKAGE)):
            for name in _MODULES:
                __import__(name)
    finally:
        sys.meta_path.remove(_STAND_IN)


def checkpoint_error() -> type[Exception]:
    """Return the ``CheckpointError`` class that processors catch: amazon_kclpy's if it was imported, else the stand-in's."""
    for name in (f"{PACKAGE}.checkpoint_error", f"{PACKAGE}.kcl"):
        error = getattr(sys.modules.get(name), "CheckpointError", None)
        if isinstance(error, type) and issubclass(error, Exception):
            return error
    return CheckpointError


def _is_ours(module: ModuleType | None) -> bool:
    return getattr(getattr(module, "__spec__", None), "loader", None) is _STAND_IN
