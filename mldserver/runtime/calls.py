"""Calls into the user's code: asynchronous hooks on the event loop, synchronous ones there too or on a separate thread.

Whatever a hook raises comes back as a value, so nothing of the user's can travel through the server as an exception:
``SystemExit``, ``StopIteration``, ``GeneratorExit`` and a ``CancelledError`` that the hook made itself are failures
like any other. So is ``KeyboardInterrupt``: the server handles the operator's Ctrl-C as a signal. Only the cancellation
of the calling task passes through, even when the hook swallows it.

Asynchronous calls run in a task of their own, one for all calls of a batch (or lane). Only so can it be known who
cancels: libraries with time-outs cancel the task that they are in, and older ones do not take that back
(``Task.uncancel``). What comes neither from the calling task nor from the deadline is the hook's own, and its failure.

One task watches all calls of a runtime that are running (``Deadlines``), and sleeps through those that are done in time: a
task for each call costs more than a small batch does. It logs or cancels calls beyond their deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import structlog

from mldserver.base.clock import Clock
from mldserver.base.threads import WorkerThread
from mldserver.handler.failure import Failure, bad_row, describe
from mldserver.runtime.keyed_state import CallContext
from mldserver.runtime.rows import BadRow
from mldserver.runtime.timer_table import DueTimer
from mldserver.runtime.values import materialized

log = structlog.get_logger("mldserver")

_T = TypeVar("_T")

_TURN_MS: Final = 10
"""After so many milliseconds of calls, the event loop runs once before the next call."""
_PLAIN: Final[frozenset[type]] = frozenset({type(None), tuple, dict, list})
_TIMEOUT = ("builtins.TimeoutError", "builtins.OSError", "builtins.Exception", "builtins.BaseException")


@dataclass(frozen=True, slots=True)
class BoundHook:
    """A hook of one module or instance, ready to be called with one argument, or with a record and its context."""

    name: str
    function: Callable[..., Any]
    is_async: bool
    plainly: bool = False
    """Whether one run of calls usually completes a batch, so that the values are its rows."""
    plain: frozenset[type] = _PLAIN
    """Types of values that ``convert`` returns unchanged; it is not called for them."""
    convert: Callable[[Any], Any] = materialized
    """Converts the returned value, as part of the call. Raises for a value that the server refuses."""
    context: CallContext | None = None
    """The context of the calls, if the hook takes one. Its arguments are then pairs: a record, and its effective time (ms)."""
    unchecked: BoundHook | None = None
    """The same hook, whose rows are checked together after the last call: for the first attempt at a batch with a context."""


TIMER_HOOK: Final = "timer"
"""The name of the hook that calls the callbacks of timers."""


def timer_hook(
    callbacks: Mapping[str, Callable[..., Any]], *, is_async: bool, steady_ms: Callable[[], int]
) -> BoundHook:
    """Return a hook that calls, for each ``DueTimer`` with its context, the timer's callback.

    It returns None for a timer that is not called after all (see ``TimerTable.take``).
    """

    def fire(due: DueTimer, context: CallContext) -> Any:
        return callbacks[due.callback](due.value(), context) if context.take(due, steady_ms()) else None

    async def fire_async(due: DueTimer, context: CallContext) -> Any:
        return await callbacks[due.callback](due.value(), context) if context.take(due, steady_ms()) else None

    return BoundHook(TIMER_HOOK, fire_async if is_async else fire, is_async, plainly=True)


class Returned(msgspec.Struct):
    """The values of a run of calls, up to the first that failed."""

    values: list[Any] = msgspec.field(default_factory=list)
    failure: Failure | None = None
    """Why the call after ``values`` failed; None if all calls succeeded."""


class CallWatch(msgspec.Struct, eq=False):
    """Shared by caller and watcher: when the present call began, and whether it was abandoned or cancelled."""

    hook: str = ""
    shard: str = ""
    task: asyncio.Task[None] | None = None
    """The task of asynchronous calls, which can be cancelled; a synchronous one cannot be stopped."""
    started_ms: int | None = None
    abandoned: bool = False
    expired_ms: int | None = None
    """When its deadline cancelled an asynchronous call."""
    told_ms: int | None = None
    """When its delay was last logged."""


class Deadlines:
    """Watches the calls of one runtime that run, or wait for their thread."""

    def __init__(self, *, handler: str, clock: Clock, seconds: float | None) -> None:
        """A call of ``handler`` (its dotted path, for the log) may take ``seconds``; None: any time."""
        self._handler = handler
        self._clock = clock
        self.seconds = seconds
        self.limit_ms = math.inf if seconds is None else seconds * 1000
        self._watches: set[CallWatch] = set()
        self._come = asyncio.Event()
        self.here: CallWatch | None = None
        """The watch of the call that runs on the event loop now."""

    def begin(self, watch: CallWatch) -> None:
        """Watch calls from now on."""
        self._watches.add(watch)
        self._come.set()

    def end(self, watch: CallWatch) -> None:
        """Stop watching calls that were abandoned. A call that still runs on its thread is watched to its end."""
        watch.abandoned = True
        if watch.task is not None or watch.started_ms is None:
            self._watches.discard(watch)
        else:
            self._watches -= {each for each in self._watches if each.abandoned and each.started_ms is None}

    def log_slow_call(self) -> None:
        """Log once, during or after it, a call that blocks the event loop for longer than the limit."""
        here = self.here
        started_ms = None if here is None else here.started_ms  # once: another thread may end it meanwhile
        if here is None or started_ms is None or here.told_ms is not None:
            return
        took_ms = self._clock.steady_ms() - started_ms
        if took_ms >= self.limit_ms:
            here.told_ms = started_ms + took_ms
            log.warning(
                "handler.slow",
                shard=here.shard,
                handler=self._handler,
                hook=here.hook,
                seconds=took_ms / 1000,
                did="The call holds up every shard of its process.",
                advice="Give the handler's own calls time-outs, or write blocking = True in it.",
            )

    def running_ms(self) -> int:
        """Return how long the longest call that cannot be stopped has run; from any thread.

        An asynchronous call counts from its cancellation at the deadline. Abandoned calls count too: no other call
        can begin on their thread.
        """
        now_ms = self._clock.steady_ms()
        watches = tuple(self._watches)
        since = [watch.started_ms if watch.task is None else watch.expired_ms for watch in watches]
        here = self.here
        since.append(None if here is None else here.started_ms)
        return max((now_ms - each for each in since if each is not None), default=0)

    async def run(self) -> None:
        """Enforce deadlines until cancelled; return at once if there is none.

        When it ends, it also cancels asynchronous calls that survived the cancellation of their batch: nothing else
        would cancel them later.
        """
        if self.seconds is None:
            return
        try:
            while True:
                self._watches -= {
                    each for each in self._watches if each.abandoned and each.started_ms is None
                }
                if self._watches:
                    # Calls that begin meanwhile are due later than the first of those that run.
                    await self._clock.sleep(self._check_overdue() / 1000)
                else:
                    self._come.clear()
                    await self._come.wait()
        finally:
            now_ms = self._clock.steady_ms()
            for watch in self._watches:
                _expire(watch, now_ms)

    def _check_overdue(self) -> float:
        """Cancel or log overdue calls; return the milliseconds until the next one is due."""
        now_ms, next_ms = self._clock.steady_ms(), math.inf
        for watch in self._watches:
            started_ms = watch.started_ms  # once: its thread may end it meanwhile
            began_ms = now_ms if started_ms is None else started_ms
            since_ms = began_ms if watch.told_ms is None else max(began_ms, watch.told_ms)
            if now_ms - since_ms >= self.limit_ms:
                watch.told_ms = since_ms = now_ms
                if not _expire(watch, now_ms):
                    # It cannot be stopped, or does not let itself be cancelled.
                    log.warning(
                        "handler.slow",
                        shard=watch.shard,
                        handler=self._handler,
                        hook=watch.hook,
                        seconds=(now_ms - began_ms) / 1000,
                        did="The call cannot be stopped; it is waited for.",
                        advice="Give the handler's own calls time-outs.",
                    )
            next_ms = min(next_ms, since_ms + self.limit_ms)
        return next_ms - now_ms


def _expire(watch: CallWatch, now_ms: int) -> bool:
    """Cancel an asynchronous call, once."""
    if watch.task is None or watch.expired_ms is not None:
        return False
    watch.expired_ms = now_ms
    # In the loop's next turn: one that comes together with the cancellation of the batch would be one with it.
    asyncio.get_running_loop().call_soon(watch.task.cancel)
    return True


class Caller:
    """Calls hooks, one argument after the other, under a deadline for each call."""

    def __init__(
        self,
        *,
        thread: WorkerThread | None,
        deadlines: Deadlines,
        clock: Clock,
        watched: bool = False,
        mark: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Call on ``thread`` what is synchronous; None: where it is asked for, on the event loop.

        ``deadlines`` are looked after while they are run.

        ``watched``: whether another thread looks at calls on the event loop, too.
        ``mark`` is given 1 when a run of calls begins, on the thread where it does, and -1 when it ends.
        """
        self._mark = mark
        self.watched = watched
        self._pid = os.getpid()
        self.thread = thread
        self.deadlines = deadlines
        self._clock = clock

    async def run(self, hook: BoundHook, arguments: Iterable[Any], *, shard: str) -> Returned:
        """Call ``hook`` with each argument in turn; stop at the first failure.

        An asynchronous call beyond its deadline is cancelled and has failed. A synchronous one cannot be stopped: the
        server logs it (``handler.slow``) for as long as it runs.
        """
        if not hook.is_async:

            def call(watch: CallWatch) -> Returned:
                with self.in_hand(watch):
                    return self.call_sync(hook, arguments, watch)

            return await self.on_thread(call, hook, shard=shard)
        caller = asyncio.current_task()
        assert caller is not None, "coroutines of the runtime run in tasks"
        before = caller.cancelling()

        def given_up() -> bool:
            return caller.cancelling() > before

        returned, watch = Returned(), CallWatch(hook.name, shard)
        watch.task = asyncio.create_task(self._call_each(hook, arguments, watch, returned, given_up))
        self.deadlines.begin(watch)
        self._mark(1)
        try:
            # A cancellation of the caller cancels that task, and waits for its end.
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

    async def on_thread(
        self,
        function: Callable[[CallWatch], _T],
        hook: BoundHook,
        *,
        shard: str,
        thread: WorkerThread | None = None,
    ) -> _T:
        """Run ``function`` on a worker thread and return its result; it may call the synchronous ``hook`` there.

        Moving to the thread costs more than a small batch: do all work in one call.
        """
        thread = thread or self.thread
        if thread is None:
            return self.here(function, hook, shard=shard)
        watch = CallWatch(hook.name, shard)
        self.deadlines.begin(watch)
        try:
            return await thread.run(lambda: function(watch))
        finally:
            self.deadlines.end(watch)

    def here(self, function: Callable[[CallWatch], _T], hook: BoundHook, *, shard: str) -> _T:
        """Call ``function`` on the event loop and return its result; it may call the synchronous ``hook``.

        Nothing else runs on the event loop meanwhile, so a slow call is logged when it is over.
        """
        deadlines = self.deadlines
        deadlines.log_slow_call()
        watch = deadlines.here = CallWatch(hook.name, shard, started_ms=self._clock.steady_ms())
        try:
            return function(watch)
        finally:
            deadlines.here = None

    def call_sync(self, hook: BoundHook, arguments: Iterable[Any], watch: CallWatch | None) -> Returned:
        """Call a synchronous hook on the present thread, as ``run`` does; the caller holds ``in_hand``.

        ``watch`` is None where no other thread could read it: on the server's own event loop.
        """
        returned, function, now_ms = Returned(), hook.function, self._clock.steady_ms
        values, plain, convert = returned.values, hook.plain, hook.convert
        # On the event loop too a synchronous hook may run a loop of its own (asyncio.run), as on a thread.
        loop = asyncio._get_running_loop()  # noqa: SLF001  # exported for implementations of loops
        asyncio._set_running_loop(None)  # noqa: SLF001  # see above
        try:
            if hook.context is not None:
                self._call_keyed(hook, hook.context, arguments, watch, values)
                arguments = ()
            for argument in arguments:
                if watch is not None:
                    # In this order: a caller that abandons the call writes ``abandoned`` before it reads
                    # ``started_ms``.
                    watch.started_ms = now_ms()
                    if watch.abandoned:
                        break
                value = function(argument)
                values.append(value if type(value) in plain else convert(value))
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything; see the module
            if os.getpid() != self._pid:
                os._exit(1)  # the hook has forked: its child may not go on as another of this process
            returned.failure = bad_row(str(error)) if type(error) is BadRow else describe(error)
        finally:
            if hook.context is not None:
                hook.context.close_streams()
            asyncio._set_running_loop(loop)  # noqa: SLF001  # see above
        return returned

    def _call_keyed(
        self,
        hook: BoundHook,
        context: CallContext,
        arguments: Iterable[Any],
        watch: CallWatch | None,
        values: list[Any],
    ) -> None:
        """Call a hook that takes a context with each record. A call changes state only if it and its row are good."""
        function, plain, convert, now_ms = hook.function, hook.plain, hook.convert, self._clock.steady_ms
        write = context.store.write
        for record, at_ms in arguments:
            if watch is not None:
                watch.started_ms = now_ms()  # see call_sync
                if watch.abandoned:
                    break
            context.record, context.at_ms, context.live, context.pending = record, at_ms, None, None
            value = function(record, context)
            value = value if type(value) in plain else convert(value)
            if context.streams:
                context.close_streams()
            if context.pending is not None:
                context.join()
            elif context.live is not None:
                write(record.partition_key, context.live, at_ms)
            values.append(value)

    @contextlib.contextmanager
    def in_hand(self, watch: CallWatch) -> Iterator[None]:
        """Mark that the handler's code runs on this thread while the block runs."""
        self._mark(1)
        try:
            yield
        finally:
            self._mark(-1)
            if watch is self.deadlines.here:
                self.deadlines.log_slow_call()
            watch.started_ms = None

    async def _call_each(
        self,
        hook: BoundHook,
        arguments: Iterable[Any],
        watch: CallWatch,
        returned: Returned,
        given_up: Callable[[], bool],
    ) -> None:
        """Make the calls. If this task is cancelled, ``given_up`` returns whether the caller was cancelled."""
        task, now_ms, context = asyncio.current_task(), self._clock.steady_ms, hook.context
        assert task is not None, "see run"
        cancelling, plain, turned_ms = task.cancelling, hook.plain, now_ms()
        function = hook.function if context is None else partial(_with_context, hook.function, context)
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
                value = await function(argument)
                value = value if type(value) in plain else hook.convert(value)
            except BaseException as error:  # noqa: BLE001  # the user's code may raise anything; see the module
                failure, value = bad_row(str(error)) if type(error) is BadRow else describe(error), None
            if cancelling():
                late = await _take_back(task)
                if given_up():
                    raise asyncio.CancelledError
                failure = describe(late) if failure is None and late is not None else failure
            if watch.expired_ms is not None:
                # Perhaps it swallowed the cancellation at its deadline, and came to an end after all.
                text, seconds = "" if failure is None else failure.traceback, self.deadlines.seconds
                said = f"TimeoutError: it took longer than {seconds} s"
                failure = Failure(said, text, _TIMEOUT, quotes_nothing=True)
            if failure is None and context is not None:
                failure = _join(context)  # only now is it known that the call counts
            if failure is not None:
                returned.failure = failure
                return
            returned.values.append(value)


async def _with_context(function: Callable[..., Any], context: CallContext, argument: tuple[Any, int]) -> Any:
    try:
        return await function(context.begin(*argument), context)
    finally:
        context.close_streams()


def _join(context: CallContext) -> Failure | None:
    """Keep what a call has changed of the state. Return why it cannot be kept: then the call has failed."""
    try:
        context.join()
    except Exception as error:  # noqa: BLE001  # what the state holds may have code of its own
        return describe(error)
    return None


async def _take_back(task: asyncio.Task[Any]) -> asyncio.CancelledError | None:
    """Yield to the loop once, and undo the cancellations of this task; return a cancellation that came during the yield.

    The caller must find out who requested it.
    """
    late = None
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError as error:
        late = error
    while task.uncancel():
        pass
    return late
