"""The ledger on SQLite for the event loop: each call runs on one thread that belongs to the ledger.

The thread takes calls in the order they were made, so that one transaction never overlaps another and the loop
never waits for the disk.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from mldserver.errors import InternalError
from mldserver.state.store import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from mldserver.base.clock import Clock
    from mldserver.records import DeadLetter, Sequence
    from mldserver.state.ledger import (
        Commit,
        Decision,
        Flush,
        FlushResult,
        LedgerState,
        Segment,
        ServerState,
        ShardState,
        WindowEntry,
    )
    from mldserver.state.letters import StoredLetter
    from mldserver.state.shapes import ShapeChange

__all__ = ["SqliteLedger"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class SqliteLedger:
    """The ``Ledger`` of one server, in a file that other servers of the same host may share.

    A cancelled call is withdrawn when its turn has not come; otherwise the cancellation waits for its transaction
    (milliseconds, at most the busy time-out), so that when a call ends, nothing of it is still going on.
    """

    def __init__(
        self,
        path: Path,
        *,
        pipeline: str,
        server_id: str,
        clock: Clock,
        rename_from: str | None = None,
        busy_timeout_ms: int = 5000,
    ) -> None:
        """Name the file, the pipeline and this server; ``open`` touches them.

        ``rename_from``: the name that the pipeline may have still. ``busy_timeout_ms``: how long a call waits for
        another server's transaction.
        """
        self._store = SqliteStore(
            path,
            pipeline=pipeline,
            server_id=server_id,
            rename_from=rename_from,
            busy_timeout_ms=busy_timeout_ms,
        )
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mldserver-ledger")
        self._closed = False

    @property
    def server_id(self) -> str:
        """The id under which this server is known."""
        return self._store.server_id

    async def open(self) -> LedgerState:
        """Create or open the ledger; see ``SqliteStore.open`` for its errors. After one it is closed."""
        opened = False
        try:
            state = await self._call(self._store.open, now_ms=self._clock.now_ms())
            opened = True
        finally:
            if not opened:
                await self.close()
        return state

    async def peek(self) -> LedgerState:
        """Return what the ledger holds without registering; close it afterwards, also after an error."""
        return await self._call(self._store.peek)

    async def sync(self, told: ServerState, since: int = 0) -> LedgerState:
        """Beat, and return what the ledger holds now, of windows the news since a version."""
        return await self._call(self._store.sync, told, since)

    async def find(self, window_ids: tuple[str, ...]) -> tuple[WindowEntry, ...]:
        """Return windows as they are; unknown ones are left out."""
        return await self._call(self._store.find, window_ids)

    async def bury(self, seen: Mapping[str, int]) -> frozenset[str]:
        """Remove servers whose beat is still the one that was seen; return those that are gone."""
        return await self._call(self._store.bury, seen)

    async def claim(self, folder: str, *, instead_of: str | None = None) -> LedgerState:
        """Be the ledger of an output folder, unless it is another's; return what it holds then."""
        return await self._call(self._store.claim, folder, instead_of=instead_of)

    async def leave(self) -> None:
        """Take this server's row out."""
        await self._call(self._store.leave)

    async def declare(self, change: ShapeChange, *, version: int) -> bool:
        """Note this server's shape, unless it is another than the pipeline's and somebody wrote since a version."""
        return await self._call(self._store.declare, change, version=version, now_ms=self._clock.now_ms())

    async def drain(self) -> None:
        """Ask all servers to drain."""
        await self._call(self._store.drain)

    async def open_shard(self, shard_id: str, parents: tuple[str, ...] = ()) -> ShardState:
        """Raise the shard's epoch, own it, and return its state."""
        return await self._call(self._store.open_shard, shard_id, parents)

    async def release_shard(self, shard_id: str, epoch: int) -> None:
        """Give up owning a shard."""
        await self._call(self._store.release_shard, shard_id, epoch)

    async def know_shards(self, parents_by_shard: dict[str, tuple[str, ...]]) -> None:
        """Note shards and their parents."""
        await self._call(self._store.know_shards, dict(parents_by_shard))

    async def end_shards(self, shard_ids: frozenset[str]) -> None:
        """Mark shards as ended."""
        await self._call(self._store.end_shards, shard_ids, now_ms=self._clock.now_ms())

    async def register(self, flush: Flush) -> FlushResult:
        """Register a flush as a whole, or refuse it as a whole."""
        return await self._call(self._store.register, flush, now_ms=self._clock.now_ms())

    async def cut(self, window_ids: tuple[str, ...]) -> tuple[WindowEntry, ...]:
        """Fix the segments of windows and own them."""
        return await self._call(self._store.cut, window_ids)

    async def adopt(self) -> tuple[WindowEntry, ...]:
        """Own every cut or committed window without an owner."""
        return await self._call(self._store.adopt)

    async def begin_attempts(self, window_ids: tuple[str, ...]) -> dict[str, int]:
        """Count an attempt at each window that is ours and cut; return their numbers."""
        return await self._call(self._store.begin_attempts, window_ids)

    async def commit(self, commits: tuple[Commit, ...]) -> frozenset[str]:
        """Make attempts' outputs count, together."""
        return await self._call(self._store.commit, commits)

    async def published(self, attempts: Mapping[str, int], *, retain: bool = True) -> tuple[Segment, ...]:
        """Note that outputs are visible; return the segments that are free to delete."""
        return await self._call(
            self._store.published, dict(attempts), retain=retain, now_ms=self._clock.now_ms()
        )

    async def expire(
        self, *, published_before_ms: int, keep_bytes: int, limit: int = 1000
    ) -> tuple[Segment, ...]:
        """Stop retaining windows by age, then by size; return the segments to delete."""
        return await self._call(
            self._store.expire, published_before_ms=published_before_ms, keep_bytes=keep_bytes, limit=limit
        )

    async def late_published(self, paths: tuple[str, ...]) -> None:
        """Note that files of the late dataset are visible."""
        await self._call(self._store.late_published, paths)

    async def set_aside(self, window_id: str, error: str) -> None:
        """Put a cut window aside with its segments."""
        await self._call(self._store.set_aside, window_id, error)

    async def halt(self, window_id: str, error: str, *, first: bool) -> bool:
        """Keep why a window of this server is halted."""
        return await self._call(self._store.halt, window_id, error, first=first)

    async def decide(self, window_id: str, decision: Decision) -> bool:
        """Do what an operator decides about a window that is halted or set aside."""
        return await self._call(self._store.decide, window_id, decision, now_ms=self._clock.now_ms())

    async def accept_gap(self, shard_id: str) -> bool:
        """Let the next opening of a shard start beyond its position."""
        return await self._call(self._store.accept_gap, shard_id)

    async def reset(self, shard_ids: frozenset[str]) -> frozenset[str]:
        """Forget where shards without an owner stand; return those."""
        return await self._call(self._store.reset, shard_ids)

    async def prune(
        self,
        *,
        windows_before_ms: int,
        shards_before_ms: int,
        keep_shards: frozenset[str] = frozenset(),
        limit: int = 10_000,
    ) -> int:
        """Forget windows published and not retained, and shards ended, before those times (ms)."""
        return await self._call(
            self._store.prune,
            windows_before_ms=windows_before_ms,
            shards_before_ms=shards_before_ms,
            keep_shards=keep_shards,
            limit=limit,
        )

    async def dead_letters(self, limit: int = 100) -> tuple[DeadLetter, ...]:
        """Return stored dead letters, oldest first."""
        return await self._call(self._store.dead_letters, limit)

    async def letters(
        self, *, after: str | None = None, limit: int = 100, wanted: bool = False
    ) -> tuple[StoredLetter, ...]:
        """Return a page of letters in order of storage."""
        return await self._call(self._store.letters, after=after, limit=limit, wanted=wanted)

    async def redrive(self, ids: tuple[str, ...], *, wanted: bool = True) -> frozenset[str]:
        """Mark letters to be redriven, or not."""
        return await self._call(self._store.redrive, ids, wanted=wanted)

    async def purge(self, ids: tuple[str, ...]) -> frozenset[str]:
        """Delete letters."""
        return await self._call(self._store.purge, ids)

    async def add_letters(self, letters: tuple[DeadLetter, ...], *, wanted: bool = False) -> None:
        """Store letters that come from elsewhere."""
        await self._call(self._store.add_letters, letters, wanted=wanted)

    async def parked_keys(self, shard_id: str) -> dict[str, Sequence]:
        """Return the keys of a shard's dead letters, each with the sequence of the first."""
        return await self._call(self._store.parked_keys, shard_id)

    async def close(self) -> None:
        """Run what was asked for, close the file, end the thread. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._outcome(self._thread.submit(self._store.close), withdraw=False)
        finally:
            # Idle by now: the close was the last call.
            self._thread.shutdown()

    async def _call(self, method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if self._closed:
            raise InternalError("The ledger is closed.")
        return await self._outcome(self._thread.submit(method, *args, **kwargs), withdraw=True)

    @staticmethod
    async def _outcome(job: Future[_T], *, withdraw: bool) -> _T:
        waiter = asyncio.wrap_future(job)
        try:
            await asyncio.wait([waiter])
        except asyncio.CancelledError:
            if withdraw:
                job.cancel()
            await _settled(waiter)
            raise
        return waiter.result()


async def _settled(waiter: asyncio.Future[_T]) -> None:
    """Wait until a call is over, however often the waiting is cancelled; its outcome is nobody's any more."""
    while not waiter.done():
        try:
            await asyncio.wait([waiter])
        except asyncio.CancelledError:
            continue  # The cancellation that led here is raised again by the caller.
    if not waiter.cancelled():
        waiter.exception()
