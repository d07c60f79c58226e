"""One worker thread, on which all synchronous user code of a pipeline runs: never on the event loop, never two at once.

A thread cannot be killed. So it is a daemon thread: a handler that hangs for ever holds up its own pipeline, which is
told in the log, but neither the event loop nor the end of the process.

But an exception can be thrown into it from outside (``PyThreadState_SetAsyncExc``), as libraries do that put time-outs on
synchronous calls. It may come late, anywhere, and most likely when the thread is about to take its next job: it waits for
one inside C, and what a call returns is lost when the exception comes with it. So a job stays in the queue until it is
done with.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
import traceback
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


class _Job:
    """A function that waits for its turn, and who waits for it."""

    __slots__ = ("begun", "function", "future", "loop")

    def __init__(
        self, function: Callable[[], Any], loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]
    ) -> None:
        self.begun = False
        self.function = function
        self.loop = loop
        self.future = future

    def run(self) -> None:
        """Call the function, and hand over what it returned or raised."""
        self.begun = True
        try:
            result = self.function()
        except BaseException as error:  # noqa: BLE001  # handed to the caller, whatever it is
            self.fail(error)
        else:
            _hand_over(self.loop, partial(_succeed, self.future, result))

    def fail(self, error: BaseException) -> None:
        """Hand over an error, unless there is a result already."""
        _hand_over(self.loop, partial(_fail, self.future, error))


class WorkerThread:
    """Runs functions one after the other on a thread of its own."""

    def __init__(self, name: str) -> None:
        """Prepare; the thread starts with ``start``."""
        self._jobs: deque[_Job | None] = deque()
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
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        self._put(_Job(partial(contextvars.copy_context().run, function), loop, future))
        return await future

    def finish(self) -> asyncio.Future[None]:
        """Take nothing more; the future is done when all that is queued has run, and the thread ends."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._put(_Job(lambda: None, loop, future))
        self._put(None)
        self._finished = future
        return future

    async def settled(self) -> None:
        """Return when all that is queued now has run, also once it is to ``finish``."""
        if self._finished is None:
            await self.run(lambda: None)
        else:
            await asyncio.wait({self._finished})

    async def close(self, seconds: float) -> bool:
        """Stop the thread after what is queued; return whether it has stopped within ``seconds``."""
        if not self._thread.is_alive():
            return True
        try:
            async with asyncio.timeout(seconds):
                # Not a job of its own: once it is to ``finish`` the thread may be at its end, and take none.
                await self.settled()
        except TimeoutError:
            return False
        finally:
            self._put(None)
        return True

    def _put(self, job: _Job | None) -> None:
        self._jobs.append(job)
        self._come.put(None)

    def _work(self) -> None:
        ended = False
        while not ended:
            try:
                ended = self._next()
            except BaseException:  # noqa: BLE001, S112  # thrown in from outside, meant for a call; see the module
                continue

    def _next(self) -> bool:
        """Wait for a job, or do the first one; return whether the end has come."""
        if not self._jobs:
            self._come.get()
            return False
        job = self._jobs[0]
        if job is None:
            return True
        if job.begun:
            job.fail(RuntimeError("an exception was thrown into the thread beside the call"))
        elif not job.future.cancelled():
            job.run()
        self._jobs.popleft()
        return False


def _hand_over(loop: asyncio.AbstractEventLoop, settle: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        # The loop was closed while a hanging function ran: nobody waits for the result any more.
        return


def _succeed(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration | SystemExit | GeneratorExit | asyncio.CancelledError):
        # A future refuses the first; each would do something else to the awaiting task, or its loop, than fail it.
        error = RuntimeError("".join(traceback.format_exception_only(error)).strip())
    future.set_exception(error)
