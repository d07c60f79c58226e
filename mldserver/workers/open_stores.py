"""The stores of keyed state that open shards use, and the copies of them that processes begin with.

A process holds a copy of each store whose shards are open in it. The server sends it with each opening of a shard: it replaces the
process's copy of the whole store. The server reads it for each opening, because only the ledger and the accepted batches count: what
a dead process had is gone, and what a live one has may contain a batch that the server did not accept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mldserver.effects import Effects
from mldserver.records import Sequence, Shard
from mldserver.runtime.interface import BatchOutcome
from mldserver.stores import SnapshotSource, StateSnapshot
from mldserver.workers import wire
from mldserver.workers.shared_memory import rows_file
from mldserver.workers.worker_process import WorkerProcess

if TYPE_CHECKING:
    import pyarrow as pa


class OpenStores:
    """The stores of a runtime's open shards. A shard of a handler without keyed state counts as a separate store."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}
        self._sources: dict[str, SnapshotSource] = {}
        self._first: dict[str, StateSnapshot] = {}
        """The snapshots by which ``add`` learned the stores of shards that no process has opened yet."""
        self._parts: dict[str, list[BatchOutcome]] = {}
        """The outcomes that ``searching`` has named, by shard."""

    async def add(self, shard_id: str, source: SnapshotSource | None) -> None:
        """Learn the store of a shard, which ``source`` reads; None: it has none. Raises as ``source`` does: nothing has changed then."""
        snapshot = None if source is None else await source()
        self.remove(shard_id)
        if source is not None and snapshot is not None:
            self._of[shard_id], self._sources[shard_id] = snapshot.store_id, source
            # Until a process opens the shard, no batch changes the store, unless it has other shards.
            self._first[shard_id] = snapshot
            for each in self._of if self.is_shared(shard_id) else ():
                if self._of[each] == snapshot.store_id:
                    self._first.pop(each, None)

    def remove(self, shard_id: str) -> None:
        """Forget a shard, if it is known."""
        for known in (self._of, self._sources, self._first):
            known.pop(shard_id, None)

    def of(self, shard_id: str) -> str:
        """Return the id of the shard's store; without keyed state, the shard's own."""
        return self._of.get(shard_id, shard_id)

    def is_shared(self, shard_id: str) -> bool:
        """Return whether another open shard uses the same store."""
        store = self._of.get(shard_id)
        return store is not None and list(self._of.values()).count(store) > 1

    @contextlib.contextmanager
    def searching(self, shard_id: str, parts: list[BatchOutcome]) -> Iterator[None]:
        """During the block, send the changes of ``parts`` too: outcomes of parts of a batch, which are not accepted yet."""
        self._parts[shard_id] = parts
        try:
            yield
        finally:
            del self._parts[shard_id]

    async def open_in(
        self, process: WorkerProcess, shard: Shard, parked: Mapping[str, Sequence] | None
    ) -> None:
        """Open a shard in a process, with its store as it is now. Raises WorkerGone, HandlerHalted, and as the source does."""
        await process.open(shard, parked, *await self._sent(shard.id))

    async def _sent(self, shard_id: str) -> tuple[()] | tuple[wire.SentStore, int]:
        """Return what a process is sent of the shard's store, and a file: here only the file keeps the entries."""
        if (source := self._sources.get(shard_id)) is None:
            return ()
        snapshot = self._first.pop(shard_id, None) or await source()
        # Of any shard of the store: opening one of them replaces what the process has of all.
        searched = [parts for each, parts in self._parts.items() if self.of(each) == snapshot.store_id]
        changes = Effects.without_rows([part.effects for parts in searched for part in parts]).state
        file, size = await _file_of(snapshot.entries)
        return wire.sent_of(snapshot, size, changes), file


async def _file_of(entries: pa.Table) -> tuple[int, int]:
    """Return a file in memory with the entries, and its size. A thread writes it: 100 MB take 50 ms."""
    writing = asyncio.get_running_loop().run_in_executor(None, rows_file, entries)
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        writing.add_done_callback(_drop_file)  # the thread goes on
        raise


def _drop_file(written: asyncio.Future[tuple[int, int]]) -> None:
    if not written.cancelled() and written.exception() is None:
        os.close(written.result()[0])
