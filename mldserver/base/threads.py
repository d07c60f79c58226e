"""Daemon threads outside the event loop, for calls that may hang for ever: one for each call, or for each shard.

All synchronous user code of a pipeline runs on such a thread: never on the event loop, never two calls at once.

A thread cannot be killed. So it is a daemon thread: a handler that hangs for ever blocks its own pipeline, which the
server logs, but neither the event loop nor the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

_T = TypeVar("_T")


class _QueuedCall:
    """A function that waits for its turn, and the future of its caller."""

    __slots__ = ("function", "future", "loop")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def run(self) -> None:
        """Call the function, and set its future."""
        result, error = None, None
        try:
            result = self.function()
        except BaseException as raised:  # noqa: BLE001  # it is raised in the caller, whatever it is
            error = raised
        if isinstance(error, StopIteration | SystemExit | GeneratorExit | asyncio.CancelledError):
            # A future refuses the first; each would do something else to the awaiting task, or its loop, than fail it.
            error = RuntimeError("".join(traceback.format_exception_only(error)).strip())
        # If the loop was closed while a hanging function ran, no caller waits for the result.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._set_future, result, error)

    def _set_future(self, result: object, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class WorkerThread:
    """Runs functions one after the other on one thread."""

    def __init__(self, name: str) -> None:
        """Prepare; the thread starts with ``start``."""
        self._calls: queue.SimpleQueue[_QueuedCall | None] = queue.SimpleQueue()
        """None ends the thread."""
        self._finished: asyncio.Future[None] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def run(self, function: Callable[[], _T]) -> _T:
        """Return what ``function`` returns (or raise what it raises), called on the thread in this context.

        If the caller is cancelled, a function that has begun runs to its end, and one that waits is never called.
        """
        call = _QueuedCall(partial(contextvars.copy_context().run, function))
        self._calls.put(call)
        result: _T = await call.future
        return result

    def finish(self) -> asyncio.Future[None]:
        """Accept no more calls; the future is done when all queued calls have run, and the thread ends."""
        if self._finished is None:
            last = _QueuedCall(lambda: None)
            self._finished = last.future
            self._calls.put(last)
            self._calls.put(None)
        return self._finished

    async def settled(self) -> None:
        """Return when all functions queued now have run, also after ``finish``."""
        if self._finished is None:
            await self.run(lambda: None)
        else:
            await asyncio.wait({self._finished})

    async def close(self, seconds: float) -> bool:
        """Stop the thread after the queued calls; return whether it has stopped within ``seconds``."""
        if not self._thread.is_alive():
            return True
        done, _ = await asyncio.wait({self.finish()}, timeout=seconds)
        return bool(done)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not call.future.cancelled():
                call.run()


async def run_in_daemon_thread(function: Callable[[], _T], *, name: str) -> _T:
    """Call ``function`` on a new daemon thread called ``name``; return what it returns, or raise what it raises.

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

    A waiting thread does not block the others. A shard's threads never overlap: the next one starts when the last has
    finished its call, even if that call's caller was cancelled.
    """

    def __init__(self) -> None:
        self._threads: dict[str, WorkerThread] = {}
        self._leaving: dict[str, asyncio.Future[None]] = {}

    async def start(self, shard_id: str) -> WorkerThread:
        """Return a running thread for a shard that has none, or has released it."""
        while (leaving := self._leaving.get(shard_id)) is not None:
            await asyncio.wait({leaving})
        thread = self._threads[shard_id] = WorkerThread(f"mldserver-{shard_id}")
        thread.start()
        return thread

    def release(self, shard_id: str) -> None:
        """End the shard's thread after its queued calls."""
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
