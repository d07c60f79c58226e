"""Blocking calls beside the event loop that may hang for ever, one by itself or a thread for each shard; the first of waits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from mldserver.base.threads import WorkerThread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_T = TypeVar("_T")


async def aside(function: Callable[[], _T], *, name: str) -> _T:
    """Return what ``function`` returns (or raise what it raises), called on a daemon thread of its own, called ``name``.

    Unlike a thread of the loop's executor, which the loop joins when it ends, one that hangs is left behind: when the
    caller is cancelled, the loop and the process can end. For calls that are made once, and whose effects may come late.
    """
    worker = WorkerThread(name)
    worker.start()
    try:
        return await worker.run(function)
    finally:
        await worker.close(0)


class ShardThreads:
    """A thread for each open shard, for handlers that were written to have a process for each.

    One that waits holds up no other. A shard's threads never overlap: the next one starts when the last has come to the
    end of what it was at, even if nobody waits for that any more.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._threads: dict[str, WorkerThread] = {}
        self._leaving: dict[str, asyncio.Future[None]] = {}

    async def take(self, shard_id: str) -> WorkerThread:
        """Return a running thread for a shard that has none, or has released it."""
        while (leaving := self._leaving.get(shard_id)) is not None:
            await asyncio.wait({leaving})
        thread = self._threads[shard_id] = WorkerThread(f"mldserver-{shard_id}")
        thread.start()
        return thread

    def release(self, shard_id: str) -> None:
        """Let the shard's thread end when it has done what it is at."""
        thread = self._threads.pop(shard_id, None)
        if thread is not None:
            leaving = self._leaving[shard_id] = thread.finish()
            leaving.add_done_callback(lambda _: self._leaving.pop(shard_id))

    async def close(self, seconds: float) -> None:
        """Stop all threads; those that hang are left behind after ``seconds``."""
        for shard_id in tuple(self._threads):
            self.release(shard_id)
        if self._leaving:
            await asyncio.wait(set(self._leaving.values()), timeout=seconds)


async def first_of(*waits: Awaitable[Any]) -> None:
    """Return when one of the waits is over; the others are cancelled, and have ended. Raises what one of them raises."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()
