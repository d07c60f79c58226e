"""Daemon threads outside the event loop, for calls that may hang for ever: one for each call, or for each shard.

All synchronous user code of a pipeline runs on such a thread: never on the event loop, never two at once.

A thread cannot be killed. So it is a daemon thread: a handler that hangs for ever blocks its own pipeline, which the
server logs, but neither the event loop nor the end of the process.

But an exception can be thrown into it from outside (``PyThreadState_SetAsyncExc``), as libraries do that put time-outs on
synchronous calls. It may come late, anywhere, and most likely when the thread is about to take its next job: it waits for
one inside C, and what a call returns is lost when the exception comes with it. So a job stays in the queue until it is
done with.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

_T = TypeVar("_T")


class _QueuedCall:
    """A function that waits for its turn, and the future of its caller."""

    __slots__ = ("begun", "function", "future", "loop")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.begun = False
        self.function = function
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def run(self) -> None:
        """Call the function, and hand over what it returned or raised."""
        self.begun = True
        try:
            result = self.function()
        except BaseException as error:  # noqa: BLE001  # handed to the caller, whatever it is
            self.hand_over(None, error)
        else:
            self.hand_over(result)

    def hand_over(self, result: object, error: BaseException | None = None) -> None:
        """Hand over a result or an error, unless there is one already."""
        if isinstance(error, StopIteration | SystemExit | GeneratorExit | asyncio.CancelledError):
            # A future refuses the first; each would do something else to the awaiting task, or its loop, than fail it.
            error = RuntimeError("".join(traceback.format_exception_only(error)).strip())

        def settle() -> None:
            if self.future.done():
                return
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)

        # If the loop was closed while a hanging function ran, no caller waits for the result.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(settle)


class WorkerThread:
    """Runs functions one after the other on one thread."""

    def __init__(self, name: str) -> None:
        """Prepare; the thread starts with ``start``."""
        self._jobs: deque[_QueuedCall | None] = deque()
        """The first one is in hand; None is the end."""
        self._come: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._finished: asyncio.Future[None] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def run(self, function: Callable[[], _T]) -> _T:
        """Return what ``function`` returns (or raise what it raises), called on the thread in this context.

        When the caller is cancelled, a function that has begun runs on to its end; one that waits is not begun.
        """
        job = _QueuedCall(partial(contextvars.copy_context().run, function))
        self._put(job)
        result: _T = await job.future
        return result

    def finish(self) -> asyncio.Future[None]:
        """Take nothing more; the future is done when all that is queued has run, and the thread ends."""
        if self._finished is None:
            job = _QueuedCall(lambda: None)
            self._finished = job.future
            self._put(job)
            self._put(None)
        return self._finished

    async def settled(self) -> None:
        """Return when all functions queued now have run, also after ``finish``."""
        if self._finished is None:
            await self.run(lambda: None)
        else:
            await asyncio.wait({self._finished})

    async def close(self, seconds: float) -> bool:
        """Stop the thread after what is queued; return whether it has stopped within ``seconds``."""
        if not self._thread.is_alive():
            return True
        done, _ = await asyncio.wait({self.finish()}, timeout=seconds)
        return bool(done)

    def _put(self, job: _QueuedCall | None) -> None:
        self._jobs.append(job)
        self._come.put(None)

    def _work(self) -> None:
        while True:
            try:
                if not self._jobs:
                    self._come.get()
                    continue
                job = self._jobs[0]
                if job is None:
                    return
                if job.begun:
                    job.hand_over(
                        None, RuntimeError("an exception was thrown into the thread outside the call")
                    )
                elif not job.future.cancelled():
                    job.run()
                self._jobs.popleft()
            except BaseException:  # noqa: BLE001, S112  # thrown in from outside, meant for a call; see the module
                continue


async def aside(function: Callable[[], _T], *, name: str) -> _T:
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

    async def take(self, shard_id: str) -> WorkerThread:
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
