"""Calls into the user's code: asynchronous hooks on the event loop, synchronous ones there too or on a thread of theirs.

Whatever a hook raises comes back as a value, so nothing of the user's can travel through the server as an exception:
``SystemExit``, ``StopIteration``, ``GeneratorExit`` and a ``CancelledError`` that the hook made itself are failures
like any other. Two things are not the hook's and pass through: the cancellation of the calling task, even when the
hook swallows it, and a ``KeyboardInterrupt`` on the thread of the server's own event loop, which is the operator's.

Asynchronous calls run in a task of their own, one for all calls of a batch (or lane). Only so can it be known who
cancels: libraries with time-outs cancel the task that they are in, and older ones do not take that back
(``Task.uncancel``). What comes neither from the calling task nor from the deadline is the hook's own, and its failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from mldserver.handler.failure import Failure, bad_row, describe
from mldserver.runtime.deadlines import Watch
from mldserver.runtime.rows import BadRow
from mldserver.runtime.values import settled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mldserver.base.clock import Clock
    from mldserver.base.threads import WorkerThread
    from mldserver.runtime.deadlines import Deadlines

_T = TypeVar("_T")

_TURN_MS: Final = 10
"""Calls that take longer together let the event loop turn before the next."""
_PLAIN: Final[frozenset[type]] = frozenset({type(None), tuple, dict, list})
_TIMEOUT = ("builtins.TimeoutError", "builtins.OSError", "builtins.Exception", "builtins.BaseException")


@dataclass(frozen=True, slots=True)
class BoundHook:
    """A hook of one module or instance, ready to be called with one argument."""

    name: str
    function: Callable[[Any], Any]
    is_async: bool
    plainly: bool = False
    """Whether a batch is nearly always one run of its calls, whose values are the rows."""
    plain: frozenset[type] = _PLAIN
    """Types of returned values that ``take`` would not change: it is not called for them."""
    take: Callable[[Any], Any] = settled
    """Makes of what was returned, at once and as part of the call, what is kept of it. Raises what is wrong with it."""


class Returned(msgspec.Struct):
    """What a run of calls returned, up to the first that failed."""

    values: list[Any] = msgspec.field(default_factory=list)
    failure: Failure | None = None
    """Why the call after ``values`` failed; None when all arguments were worked on."""


class Caller:
    """Calls hooks, one argument after the other, under a deadline for each call."""

    def __init__(
        self,
        *,
        thread: WorkerThread | None,
        deadlines: Deadlines,
        clock: Clock,
        interrupts: bool = True,
        watched: bool = False,
        mark: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Call on ``thread`` what is synchronous; None: where it is asked for, on the event loop.

        ``deadlines`` are looked after while they are run.

        ``interrupts``: whether a KeyboardInterrupt on the event loop's thread is the operator's, and passes through.
        ``watched``: whether another thread looks at calls on the event loop, too.
        ``mark`` is given 1 when a run of calls begins, on the thread where it does, and -1 when it ends.
        """
        self._interrupts = interrupts
        self._mark = mark
        self.watched = watched
        self._pid = os.getpid()
        self._thread = thread
        self.deadlines = deadlines
        self._clock = clock

    def on(self, thread: WorkerThread) -> Caller:
        """Return one that calls on another thread."""
        other = copy.copy(self)
        other._thread = thread  # noqa: SLF001  # its own class
        return other

    async def run(self, hook: BoundHook, arguments: Iterable[Any], *, shard: str) -> Returned:
        """Call ``hook`` with each argument in turn; stop at the first failure.

        An asynchronous call beyond its deadline is cancelled and has failed. A synchronous one cannot be stopped:
        it is told in the log (``handler.slow``) for as long as it runs.
        """
        if hook.is_async:
            return await self._run_async(hook, arguments, shard)

        def call(watch: Watch) -> Returned:
            with self.in_hand(watch):
                return self.call_sync(hook, arguments, watch)

        return await self.on_thread(call, hook, shard=shard)

    async def on_thread(
        self,
        function: Callable[[Watch], _T],
        hook: BoundHook,
        *,
        shard: str,
        thread: WorkerThread | None = None,
    ) -> _T:
        """Return what ``function`` returns, run on a worker thread; it may call the synchronous ``hook`` there.

        One hop to the thread costs more than a small batch does: whoever has more to do there does it in one.
        """
        thread = thread or self._thread
        if thread is None:
            return self.here(function, hook, shard=shard)
        watch = Watch(hook.name, shard)
        self.deadlines.begin(watch)
        try:
            return await thread.run(lambda: function(watch))
        finally:
            self.deadlines.end(watch)

    def here(self, function: Callable[[Watch], _T], hook: BoundHook, *, shard: str) -> _T:
        """Return what ``function`` returns, called at once; it may call the synchronous ``hook``.

        Nothing else runs on the event loop meanwhile: what was slow is told when it is over.
        """
        deadlines = self.deadlines
        deadlines.tell_here()
        watch = deadlines.here = Watch(hook.name, shard, started_ms=self._clock.steady_ms())
        try:
            return function(watch)
        finally:
            deadlines.here = None

    def call_sync(self, hook: BoundHook, arguments: Iterable[Any], watch: Watch | None) -> Returned:
        """Do as ``run`` does, for a synchronous hook, on the thread where this is called; ``in_hand``.

        ``watch`` is None where no other thread could look at it: on the server's own event loop.
        """
        returned, function, now_ms = Returned(), hook.function, self._clock.steady_ms
        values, plain, take = returned.values, hook.plain, hook.take
        # On the event loop too a synchronous hook may run a loop of its own (asyncio.run), as on a thread.
        loop = asyncio._get_running_loop()  # noqa: SLF001  # for whoever runs loops: exported for that
        asyncio._set_running_loop(None)  # noqa: SLF001  # see above
        try:
            for argument in arguments:
                if watch is not None:
                    # In this order: whoever gives the call up looks whether it has begun only when that is written.
                    watch.started_ms = now_ms()
                    if watch.abandoned:
                        break
                value = function(argument)
                values.append(value if type(value) in plain else take(value))
        except BaseException as error:  # the user's code may raise anything; see the module
            if os.getpid() != self._pid:
                os._exit(1)  # the hook has forked: its child may not go on as another of this process
            if self.is_operators(error):
                raise
            returned.failure = _failure(error)
        finally:
            asyncio._set_running_loop(loop)  # noqa: SLF001  # see above
        return returned

    @contextlib.contextmanager
    def in_hand(self, watch: Watch) -> Iterator[None]:
        """The handler's code runs in the block, in calls or because of what they returned, and on this thread."""
        self._mark(1)
        try:
            yield
        finally:
            self._mark(-1)
            if watch is self.deadlines.here:
                self.deadlines.tell_here()
            watch.started_ms = None

    def begun(self, watch: Watch) -> None:
        """Let the handler's code be running from now on."""
        watch.started_ms = self._clock.steady_ms()

    def is_operators(self, error: BaseException) -> bool:
        """Whether an error is none of the handler's, but Ctrl-C: that comes on the main thread alone."""
        return (
            self._interrupts
            and isinstance(error, KeyboardInterrupt)
            and threading.current_thread() is threading.main_thread()
        )

    async def _run_async(self, hook: BoundHook, arguments: Iterable[Any], shard: str) -> Returned:
        caller = asyncio.current_task()
        assert caller is not None, "coroutines of the runtime run in tasks"
        before = caller.cancelling()

        def given_up() -> bool:
            return caller.cancelling() > before

        returned, watch = Returned(), Watch(hook.name, shard)
        watch.task = asyncio.create_task(self._call_each(hook, arguments, watch, returned, given_up))
        self.deadlines.begin(watch)
        self._mark(1)
        try:
            # Whoever cancels the caller cancels that task, and waits for its end.
            await watch.task
        except asyncio.CancelledError as error:
            if not given_up():
                returned.failure = describe(error)
        finally:
            self._mark(-1)
            self.deadlines.end(watch)
        if given_up():
            raise asyncio.CancelledError
        return returned

    async def _call_each(
        self,
        hook: BoundHook,
        arguments: Iterable[Any],
        watch: Watch,
        returned: Returned,
        given_up: Callable[[], bool],
    ) -> None:
        """Make the calls; ``given_up``: whether nobody wants them any more, once this task is cancelled."""
        task, now_ms = asyncio.current_task(), self._clock.steady_ms
        assert task is not None, "see _run_async"
        cancelling, plain, turned_ms = task.cancelling, hook.plain, now_ms()
        for argument in arguments:
            started_ms = now_ms()
            if started_ms - turned_ms >= _TURN_MS:
                # Hooks that never wait for anything would keep the loop to themselves for as long as the batch takes.
                watch.started_ms = None
                await _take_back(task)
                if watch.expired_ms is not None or given_up():
                    raise asyncio.CancelledError
                started_ms = turned_ms = now_ms()
            watch.started_ms = started_ms
            failure = None
            try:
                value = await hook.function(argument)
                value = value if type(value) in plain else hook.take(value)
            except BaseException as error:  # the user's code may raise anything; see the module
                if self.is_operators(error):
                    raise
                failure, value = _failure(error), None
            if cancelling():
                late = await _take_back(task)
                if given_up():
                    raise asyncio.CancelledError
                failure = describe(late) if failure is None and late is not None else failure
            if watch.expired_ms is not None:
                # Perhaps it swallowed the cancellation at its deadline, and came to an end after all.
                failure = self._too_slow(failure)
            if failure is not None:
                returned.failure = failure
                return
            returned.values.append(value)

    def _too_slow(self, failure: Failure | None) -> Failure:
        text = "" if failure is None else failure.traceback
        return Failure(f"TimeoutError: it took longer than {self.deadlines.seconds} s", text, _TIMEOUT)


async def _take_back(task: asyncio.Task[Any]) -> asyncio.CancelledError | None:
    """Let the loop turn once, and take back what cancels this task; return the cancellation if it came only now.

    The caller has to look who wanted it.
    """
    late = None
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError as error:
        late = error
    while task.uncancel():
        pass
    return late


def _failure(error: BaseException) -> Failure:
    return bad_row(str(error)) if type(error) is BadRow else describe(error)
