"""Keyed state between the ledger's files and the handler's process: snapshots, compaction, and the deletion of old files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import structlog

from mldserver.base.clock import Clock
from mldserver.base.kill_points import kill_point
from mldserver.coordinator.core import state_files
from mldserver.coordinator.core.flush import Buffer, BufferedBatch
from mldserver.coordinator.core.ledger_view import LedgerView
from mldserver.coordinator.core.lineage import Lineage
from mldserver.coordinator.core.sessions import Session, Sessions
from mldserver.errors import LedgerError
from mldserver.ledger.contract import LedgerState, StateFile, StoreState
from mldserver.ledger.operations import Ledger
from mldserver.output.layout import state_path
from mldserver.stores import ALL_KEYS, StateSnapshot

if TYPE_CHECKING:
    from mldserver.output.store import Garbage, OutputStore

log = structlog.get_logger("mldserver")

_DAY_MS = 24 * 3600 * 1000
_FORGOTTEN = 500
"""How many old files are deleted in a cycle."""


class _Moment(NamedTuple):
    """What a snapshot of a store is made of, at one moment."""

    store: StoreState
    files: list[StateFile]
    """Those that the store needs."""
    batches: list[BufferedBatch]
    """Accepted batches that no file has yet, in their order."""
    accepted: int
    siblings: dict[str, int]
    clock_ms: int | None
    """As in ``StateSnapshot``."""
    expired_ms: int | None
    """Entries that expire at or before it have expired for all shards of the store; None: none has."""


@dataclass(kw_only=True, eq=False, slots=True)
class StateFiles:
    """Reads and compacts the state files of this server's stores. The coordinator's cycle calls all but ``snapshot``."""

    ledger: Ledger
    view: LedgerView
    store: OutputStore
    garbage: Garbage
    buffer: Buffer
    sessions: Sessions
    lineage: Lineage
    clock: Clock
    unique: Callable[[], str]
    retention_ms: int
    snapshots: int = field(init=False, default=0)
    snapshot_ms: int = field(init=False, default=0)
    """How long all snapshots took."""
    compactions: int = field(init=False, default=0)
    _doubtful: StateFile | None = field(init=False, default=None)
    """A compaction's file of which it is not known whether the ledger names it."""

    async def snapshot(self, session: Session) -> StateSnapshot:
        """Return the state of a session's store as it is now. Raises LedgerError, also when a file cannot be read."""
        began_ms = self.clock.steady_ms()
        while True:
            removals = self.buffer.removals
            state = await self.ledger.peek()
            if removals != self.buffer.removals:
                continue  # batches left the buffer for a file that this state may not name
            moment = self._gather(session, state)
            kill_point("state.loading")
            try:
                entries, due_ms = await asyncio.to_thread(self._entries, moment)
            except (OSError, pa.ArrowException) as error:
                now = (await self.ledger.peek()).state_files
                if any(now.get(file.path) != file for file in moment.files):
                    continue  # a compaction has replaced it, and where nothing is retained it is deleted at once
                raise _unreadable(moment.store.store_id, session.shard_id, error) from error
            kill_point("state.loaded")
            break
        self.sessions.loaded(moment.store.store_id, due_ms, moment.store.next_due_ms)
        self.snapshots += 1
        self.snapshot_ms += (spent_ms := self.clock.steady_ms() - began_ms)
        store = moment.store
        log.info(
            "state.loaded",
            shard=session.shard_id,
            store=store.store_id,
            keys=len(entries),
            files=len(moment.files),
            seconds=spent_ms / 1000,
        )
        return StateSnapshot(
            store.store_id, store.key_range, moment.accepted, moment.clock_ms, entries, moment.siblings
        )

    def _gather(self, session: Session, state: LedgerState) -> _Moment:
        """Return what a snapshot is made of. It may not await: all must belong to the moment of this state of the ledger."""
        opened = session.store
        assert opened is not None, "only sessions of handlers that keep state are asked"
        store = state.stores.get(opened.store_id, opened)
        clock_ms = self.lineage.nodes[session.shard_id].effective_ms
        return _Moment(
            store,
            files=[file for file in state.state_files.values() if store.store_id in file.needed],
            batches=self.buffer.of_store(store.store_id),
            accepted=session.outcomes,
            siblings={
                other.shard_id: other.outcomes
                for other in self.sessions.of_store(store.store_id)
                if other.alive and other is not session
            },
            clock_ms=self.lineage.floor_ms(session.shard_id) if clock_ms is None else clock_ms,
            expired_ms=all_expired_ms(state).get(store.store_id),
        )

    def _entries(self, moment: _Moment) -> tuple[pa.Table, int | None]:
        """Return the entries of a store, and when the first timer among them is due."""
        store = moment.store
        newest_first = [
            (store.store_id, blob)
            for batch in reversed(moment.batches)
            for blob in reversed(batch.effects.state)
        ]
        buffered = state_files.changes(newest_first, {store.store_id: state_files.BUFFERED})
        tables = self.store.for_each(self._read, moment.files)
        entries = state_files.entries(
            zip(tables, moment.files, strict=True), store, buffered=buffered, expired_ms=moment.expired_ms
        )
        return entries, state_files.first_due_ms(entries)

    def _read(self, file: StateFile) -> pa.Table:
        with self.store.parquet(file.path) as content:
            return content.read()

    async def compact(self) -> None:
        """Do one step of compaction, if one is worth it. Raises LedgerError."""
        state = self.view.state
        if (doubtful := self._doubtful) is not None:
            # The ledger was read since: it shows whether the file was registered.
            self.garbage.add([] if doubtful.path in state.state_files else [doubtful])
            self._doubtful = None
        if len(state.state_files) < state_files.FILES_AT_ONCE:
            return
        stores = {
            store_id: store
            for store_id in self.sessions.live_stores()
            if (store := state.stores.get(store_id)) is not None and not store.closed
        }
        step = await asyncio.to_thread(state_files.choose, tuple(state.state_files.values()), stores.keys())
        if step is None:
            return
        kill_point("state.compacting")
        path = state_path(state.clock, self.unique(), tag=self.view.tag)
        try:
            file = await asyncio.to_thread(self._compacted, step, stores, all_expired_ms(state), path)
        except (OSError, pa.ArrowException) as error:
            # The files stay as they are. A shard that is opened reports one that cannot be read, and a flush a failing disk.
            log.warning("state.compaction_failed", error=f"{type(error).__name__}: {error}")
            self.garbage.add_unfinished(path)
            return
        kill_point("state.compacted")
        self._doubtful = file
        named = await self.ledger.compact_state(file, {each.path: each.needed for each in step.files})
        self._doubtful = None
        if not named:
            await self.garbage.delete([file])
            return
        self.compactions += 1
        log.debug("state.compacted", files=len(step.files), rows=file.rows, bytes=file.bytes)

    def _compacted(
        self,
        step: state_files.StateCompaction,
        stores: Mapping[str, StoreState],
        expired_ms: Mapping[str, int],
        path: str,
    ) -> StateFile:
        rows = step.rows(self._read, stores, expired_ms)
        return StateFile(path, step.needed, len(rows), self.store.write(path, rows))

    async def drop(self) -> None:
        """Delete files that no store has needed for the time of retention, and then forget them. Raises LedgerError, OSError.

        Until then a ledger that is restored from a backup may need them.
        """
        before_ms = self.ledger.time_ms() - self.retention_ms
        gone = [
            file.path
            for file in self.view.state.state_files.values()
            if file.gone_ms is not None and file.gone_ms <= before_ms
        ][:_FORGOTTEN]
        if gone:
            await asyncio.to_thread(self._delete, gone)
            kill_point("state.dropped")
            await self.ledger.forget_state_files(tuple(gone))

    def _delete(self, paths: Iterable[str]) -> None:
        self.store.for_each(self.store.delete, paths)


def _unreadable(store_id: str, shard_id: str, error: Exception) -> LedgerError:
    return LedgerError(
        f"The state of store {store_id} cannot be read: {error}",
        did=f"Shard {shard_id} was not opened. The state stays as it is.",
        advice="Look at the storage of `out`. If a file of _mldserver/state is gone or damaged, restore it and the ledger "
        "from a backup, or forget the shard's state with `mldserver ledger reset --forget-state`.",
        shard=shard_id,
    )


def all_expired_ms(state: LedgerState) -> dict[str, int]:
    """Return for each store the time at or before which entries have expired for all of its shards.

    State expires by the time of records. So a shard that reads its records again finds what it found the first time. A store for
    all keys may get shards that are not open yet. Their records are at most a day older: DynamoDB Streams keep records for a day.
    """
    found: dict[str, int] = {}
    unknown = set()
    for shard in state.shards.values():
        if not shard.store or shard.ended:
            continue
        if shard.effective_ms is None:
            unknown.add(shard.store)
        else:
            found[shard.store] = min(found.get(shard.store, shard.effective_ms), shard.effective_ms)
    return {
        store: ms - (_DAY_MS if state.stores[store].key_range == ALL_KEYS else 0)
        for store, ms in found.items()
        if store not in unknown
    }
