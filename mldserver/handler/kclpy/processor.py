"""One record processor behind the server's own hooks: which classes are processors, what each version is called with.

An instance of ``Processor`` looks like any other handler class's: ``initialize(shard)``, ``process_records(batch)``,
``lease_lost(shard)`` … What the processor raises passes through to the pipeline's failure policy; what it returns is ignored.
"""

from __future__ import annotations

import inspect
import sys
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Final

from mldserver.handler.kclpy.amazon_kclpy import (
    PACKAGE,
    Checkpointer,
    DictRecord,
    InitializeInput,
    LeaseLostInput,
    ProcessorProgress,
    ProcessRecordsInput,
    Record,
    ShardEndedInput,
    ShutdownInput,
    ShutdownRequestedInput,
)
from mldserver.handler.signatures import accepts
from mldserver.records import Batch, Shard

HOOKS: Final = ("initialize", "process_records", "lease_lost", "shard_ended", "shutdown_requested")
"""The hooks of ``Processor``, which are the server's own."""
_METHODS: Final = {
    1: {"initialize": 1, "process_records": 2, "shutdown": 2, "shutdown_requested": 1},
    2: {"initialize": 1, "process_records": 1, "shutdown": 1, "shutdown_requested": 1},
    3: {"initialize": 1, "process_records": 1, "lease_lost": 1, "shard_ended": 1, "shutdown_requested": 1},
}
"""For each version its methods, and their numbers of arguments without the instance."""
_BEFORE_V3: Final = {"lease_lost": "shutdown", "shard_ended": "shutdown"}


@dataclass(frozen=True, slots=True)
class ProcessorClass:
    """A class of record processors, and how to make one for a shard."""

    cls: type
    version: int
    """Which generation of amazon_kclpy's interface it has: 1, 2 or 3."""
    error: type[Exception]
    """The ``CheckpointError`` that it knows."""

    def __call__(self) -> Processor:
        """Make the processor of one shard; raises what its ``__init__`` raises."""
        return Processor(self.cls(), self.version, self.error)


class Processor:
    """A shard's record processor and what it has checkpointed."""

    def __init__(self, delegate: Any, version: int, error: type[Exception]) -> None:
        self.progress = ProcessorProgress()
        self._delegate = delegate
        self._version = version
        self._error = error
        self._checkpointer = Checkpointer(self.progress, error)

    def initialize(self, shard: Shard) -> None:
        """Call ``initialize`` with the shard."""
        self.progress = ProcessorProgress(shard.start, shard.start_sub)
        self._checkpointer = Checkpointer(self.progress, self._error)
        is_v1 = self._version == 1
        start = InitializeInput(shard.id, shard.start, shard.start_sub)
        self._delegate.initialize(shard.id if is_v1 else start)

    def process_records(self, batch: Batch) -> None:
        """Call ``process_records`` with the records, also if there are none.

        If a call is repeated, records that the processor had checkpointed before it failed are left out.
        """
        position, last = self.progress.position, batch[-1].sequence if batch else None
        if last is not None and position is not None and batch[0].sequence <= position:
            if last <= position:
                return
            batch = batch[bisect_right(batch, position, key=lambda record: record.sequence) :]
        self.progress.deliver(last)
        if self._version == 1:
            self._delegate.process_records([DictRecord(record) for record in batch], self._checkpointer)
            return
        records = [Record(record) for record in batch]
        self._delegate.process_records(
            ProcessRecordsInput(records, batch.millis_behind_latest, self._checkpointer)
        )

    def lease_lost(self, _shard: Shard) -> None:
        """Call the processor's hook for a lost lease: it cannot checkpoint any more."""
        self.progress.closed = True
        self._end("lease_lost", LeaseLostInput(), "ZOMBIE")

    def shard_ended(self, _shard: Shard) -> None:
        """Call the processor's hook for the end of its shard."""
        self.progress.end_call()
        self._end("shard_ended", ShardEndedInput(self._checkpointer), "TERMINATE")

    def shutdown_requested(self, _shard: Shard) -> None:
        """Call ``shutdown_requested``: the last chance to checkpoint before another worker gets the lease."""
        self.progress.end_call()
        checkpointer = self._checkpointer
        is_v1 = self._version == 1
        self._delegate.shutdown_requested(checkpointer if is_v1 else ShutdownRequestedInput(checkpointer))

    def _end(self, hook: str, message: LeaseLostInput | ShardEndedInput, reason: str) -> None:
        """Call the hook for an end. Before version 3 one hook served both ends."""
        if self._version == 1:
            self._delegate.shutdown(self._checkpointer, reason)
        elif self._version == 2:  # noqa: PLR2004  # the versions are numbers in amazon_kclpy too
            self._delegate.shutdown(ShutdownInput(reason, self._checkpointer))
        else:
            getattr(self._delegate, hook)(message)


def recognised(target: object) -> int | None:
    """Return the version (1, 2 or 3) of amazon_kclpy's interface that a class has; None if it is not a record processor.

    A record processor has a ``version``, and derives from a class of amazon_kclpy or is defined in a module that uses it.
    """
    if not isinstance(target, type):
        return None
    version = getattr(target, "version", None)
    if type(version) is not int or version not in _METHODS:
        return None
    if _is_of_kclpy(target):
        return None
    module = sys.modules.get(target.__module__)
    used = (*target.__mro__[1:], *(list(vars(module).values()) if module else ()))
    return version if any(map(_is_of_kclpy, used)) else None


def _is_of_kclpy(value: object) -> bool:
    name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
    return isinstance(name, str) and (name == PACKAGE or name.startswith(f"{PACKAGE}."))


def written(cls: type, version: int) -> tuple[str, ...]:
    """Return the ``HOOKS`` that the class implements; the methods of the base classes are placeholders."""
    names = {hook: hook if version >= 3 else _BEFORE_V3.get(hook, hook) for hook in HOOKS}  # noqa: PLR2004  # see METHODS
    return tuple(hook for hook, name in names.items() if _own(cls, name) is not None)


def _own(cls: type, name: str) -> Any:
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    return None if owner is None or _is_of_kclpy(owner) else getattr(cls, name)


def problems(cls: type, version: int) -> list[tuple[str, str, bool]]:
    """Return what is wrong with a processor: (sentence, the method concerned, whether the processor cannot run)."""
    problems = []
    for name, count in _METHODS[version].items():
        method = _own(cls, name)
        if method is None:
            if name == "process_records":
                problems.append((f"it has no {name}", "", True))
            elif name != "shutdown_requested":
                problems.append((f"it has no {name}: nothing is called then", "", False))
        elif inspect.iscoroutinefunction(method):
            problems.append((f"{name} is async, which amazon_kclpy never awaits", name, True))
        elif not accepts(
            method, count + (not isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod))
        ):
            called = f"{name} is called with {count} argument{'s' * (count > 1)} by version {version} of amazon_kclpy"
            problems.append((f"{called}, but is {name}{inspect.signature(method)}", name, True))
    return problems
