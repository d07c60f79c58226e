"""One record processor behind the server's own hooks: what each version is called with.

An instance of ``Processor`` looks like any other handler class's: ``initialize(shard)``, ``process_records(batch)``,
``lease_lost(shard)`` … What the processor raises passes through, so that the pipeline's failure policy sees it; what it
returns is nobody's.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mldserver.handler.kclpy.checkpointer import Checkpointer
from mldserver.handler.kclpy.inputs import (
    DictRecord,
    InitializeInput,
    LeaseLostInput,
    ProcessRecordsInput,
    Record,
    ShardEndedInput,
    ShutdownInput,
    ShutdownRequestedInput,
)
from mldserver.handler.kclpy.progress import Overdue, Progress

if TYPE_CHECKING:
    from mldserver.records import Batch, Sequence, Shard

__all__ = ["Processor", "ProcessorClass"]


@dataclass(frozen=True, slots=True)
class ProcessorClass:
    """A class of record processors, and how to make one for a shard."""

    cls: type
    version: int
    """Which generation of amazon_kclpy's interface it has: 1, 2 or 3."""
    error: type[Exception]
    """The ``CheckpointError`` that it knows."""

    def __call__(self) -> Processor:
        """Make the processor of one shard; raises whatever its ``__init__`` raises."""
        return Processor(self.cls(), self.version, self.error)


class Processor:
    """A shard's record processor and what it has checkpointed."""

    def __init__(self, delegate: Any, version: int, error: type[Exception]) -> None:
        """Wrap an instance of the user's class."""
        self.progress = Progress()
        self.overdue = Overdue()
        self._delegate = delegate
        self._version = version
        self._error = error
        self._checkpointer = Checkpointer(self.progress, error)

    @property
    def position(self) -> Sequence | None:
        """How far it has checkpointed; None before its first checkpoint."""
        return self.progress.position

    def close(self) -> None:
        """Refuse all further checkpoints."""
        self.progress.closed = True

    def initialize(self, shard: Shard) -> None:
        """Tell it its shard."""
        self.progress = Progress(shard.start, shard.start_sub)
        self._checkpointer = Checkpointer(self.progress, self._error)
        first = self._version == 1
        told = InitializeInput(shard.id, shard.start, shard.start_sub)
        self._delegate.initialize(shard.id if first else told)

    def process_records(self, batch: Batch) -> None:
        """Give it records, or none where the daemon sent none.

        When a call is made again, the processor is done with what it had checkpointed before it failed.
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
        """Tell it that the lease went elsewhere: it cannot checkpoint any more."""
        self.close()
        self._end("lease_lost", LeaseLostInput(), "ZOMBIE")

    def shard_ended(self, _shard: Shard) -> None:
        """Tell it that there are no more records."""
        self.progress.settle()
        self._end("shard_ended", ShardEndedInput(self._checkpointer), "TERMINATE")

    def shutdown_requested(self, _shard: Shard) -> None:
        """Give it the last chance to checkpoint before the lease goes elsewhere."""
        self.progress.settle()
        checkpointer = self._checkpointer
        first = self._version == 1
        self._delegate.shutdown_requested(checkpointer if first else ShutdownRequestedInput(checkpointer))

    def _end(self, hook: str, told: LeaseLostInput | ShardEndedInput, reason: str) -> None:
        """Call the end that the version has: before version 3 there was one hook for both."""
        if self._version == 1:
            self._delegate.shutdown(self._checkpointer, reason)
        elif self._version == 2:  # noqa: PLR2004  # the versions are numbers in amazon_kclpy too
            self._delegate.shutdown(ShutdownInput(reason, self._checkpointer))
        else:
            getattr(self._delegate, hook)(told)
