"""One worker thread, on which all synchronous user code of a pipeline runs: never on the event loop, never two at once.

A thread cannot be killed. So it is a daemon thread: a handler that hangs for ever holds up its own pipeline, which is
told in the log, but neither the event loop nor the end of the process.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WorkerThread"]

_T = TypeVar("_T")
_Job = tuple["Callable[[], Any]", asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class WorkerThread:
    """Runs functions one after the other on a thread of its own."""

    def __init__(self, name: str) -> None:
        """Prepare; the thread starts with ``start``."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
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
        self._jobs.put((partial(contextvars.copy_context().run, function), loop, future))
        return await future

    def finish(self) -> asyncio.Future[None]:
        """Take nothing more; the future is done when all that is queued has run, and the thread ends."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._jobs.put((lambda: None, loop, future))
        self._jobs.put(None)
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
                await self.run(lambda: None)
        except TimeoutError:
            return False
        finally:
            self._jobs.put(None)
        return True

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, loop, future = job
            if future.cancelled():
                continue
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001  # handed to the caller, whatever it is
                _hand_over(loop, partial(_fail, future, error))
            else:
                _hand_over(loop, partial(_succeed, future, result))
            # Nothing of a finished job is kept alive while the thread waits for the next.
            del job, function, future


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
    if not future.done():
        # A future refuses StopIteration, which would end the awaiting coroutine instead of failing it.
        future.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)
