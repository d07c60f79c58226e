"""A process that can die between any two calls: what it still tries afterwards has no effect.

Blocking calls (files, ledger, handler) are where a server touches the world, so they are where it can fail or die.
The virtual threads here run them one by one on a ``VirtualLoop``, in the place of real ones.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar, cast

__all__ = [
    "Call",
    "Observer",
    "ProcessDied",
    "VirtualExecutor",
    "VirtualProcess",
    "VirtualWorker",
    "stand_ins",
]

_T = TypeVar("_T")
_GAP_SECONDS: Final = 1e-6
"""Timers that are due together fire in no promised order; calls of one thread must not."""


class Connection(Protocol):
    """One end of a connection that dies with its process."""

    def vanish(self) -> None:
        """Lose it without a word."""
        ...

    def is_closing(self) -> bool:
        """Whether it is closed, or about to be."""
        ...


class VirtualTime(Protocol):
    """What is needed of a ``VirtualLoop``."""

    def time(self) -> float:
        """Return its time, in seconds."""
        ...

    def latency(self) -> float:
        """Return how long the next thing takes."""
        ...

    def call_at(self, when: float, callback: Callable[..., object], /, *args: Any) -> object:
        """Call back at a time."""
        ...


class ProcessDied(Exception):
    """The process is dead; whatever it tries comes to nothing."""


@dataclass(frozen=True, slots=True)
class Call:
    """A blocking call: the object whose method it is (None for functions), its name, its arguments."""

    target: object
    name: str
    args: tuple[Any, ...]

    @property
    def owner(self) -> str:
        """The class of the object."""
        return type(self.target).__name__

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...]) -> Call:
        """Look through ``functools.partial`` and ``Context.run`` at what is really called."""
        called: Any = function
        while True:
            if isinstance(called, functools.partial):
                called, args = called.func, (*called.args, *args)
            elif isinstance(getattr(called, "__self__", None), contextvars.Context):
                called, args = args[0], args[1:]
            else:
                break
        target = getattr(called, "__self__", None)
        return cls(target, getattr(called, "__name__", type(called).__name__), args)


class Observer(Protocol):
    """Sees every blocking call of a process, and may raise in its place."""

    def before(self, process: VirtualProcess, call: Call) -> None:
        """Raise what the call shall fail with, before it has any effect."""
        ...

    def after(self, process: VirtualProcess, call: Call, result: object) -> None:
        """Raise what the call shall fail with although it took effect."""
        ...


@dataclass(slots=True)
class Outcome:
    """What a call came to, on its way to whoever waits for it."""

    result: Any = None
    error: BaseException | None = None

    def tell(self, future: asyncio.Future[Any] | concurrent.futures.Future[Any]) -> None:
        """Settle a future, unless it was given up."""
        if future.done():
            return
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(self.result)


_current: contextvars.ContextVar[VirtualProcess] = contextvars.ContextVar("process")


@dataclass(slots=True, eq=False)
class VirtualProcess:
    """One life of one program. Tasks created inside ``entered()`` belong to it."""

    name: str = ""
    observer: Observer | None = None
    died: asyncio.Event = field(default_factory=asyncio.Event)
    stalled_until: float = 0.0
    """No blocking call begins before this time of the loop: a disk that hangs, a host that swaps."""
    transports: list[Connection] = field(default_factory=list)
    listeners: list[socket.socket] = field(default_factory=list)

    @property
    def dead(self) -> bool:
        """Whether it was killed."""
        return self.died.is_set()

    @staticmethod
    def current() -> VirtualProcess:
        """Return the process of the running code; code outside of any has an immortal one of its own."""
        return _current.get(_OUTSIDE)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make tasks for this process."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def attempt(self, function: Callable[..., Any], *args: Any) -> Outcome:
        """Make a blocking call now and return what it came to."""
        call = Call.of(function, args)
        try:
            # A dead process holds nothing: its files are closed, its locks are free.
            if self.dead and call.name != "close":
                raise ProcessDied(call.name)  # noqa: TRY301  # the outcome of every call is told in one way
            if self.observer is not None:
                self.observer.before(self, call)
            result = function(*args)
            if self.observer is not None:
                self.observer.after(self, call, result)
        except BaseException as error:  # noqa: BLE001  # told to the caller, whatever it is
            return Outcome(error=error)
        return Outcome(result)

    def kill(self) -> None:
        """Let it die where it stands: nothing that it does from now on has an effect, its connections are reset."""
        self.died.set()
        for listener in self.listeners:
            listener.close()
        for transport in self.transports:
            transport.vanish()
        self.transports.clear()


_OUTSIDE: Final = VirtualProcess("outside")


class _Line:
    """Calls that are made one after the other, as by a thread of their own."""

    def __init__(self) -> None:
        self._free = 0.0

    def run(self, begin: Callable[[], Outcome | None], settle: Callable[[Outcome], None]) -> None:
        loop = cast("VirtualTime", asyncio.get_running_loop())
        free = max(self._free + _GAP_SECONDS, VirtualProcess.current().stalled_until)
        at = max(loop.time(), free) + loop.latency()
        done = self._free = at + loop.latency()

        def work() -> None:
            outcome = begin()
            if outcome is not None:
                loop.call_at(done, settle, outcome)

        loop.call_at(at, work)


class VirtualExecutor(concurrent.futures.Executor):
    """Takes the place of a ``ThreadPoolExecutor`` with one thread."""

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "") -> None:
        """Take what the real one takes; raises ValueError for more than one thread."""
        if max_workers != 1:
            raise ValueError(f"{thread_name_prefix}: a virtual executor has one thread")
        self._line = _Line()

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[_T]:
        """Queue a call."""
        job: concurrent.futures.Future[_T] = concurrent.futures.Future()
        process = VirtualProcess.current()

        def begin() -> Outcome | None:
            if not job.set_running_or_notify_cancel():
                return None
            return process.attempt(functools.partial(fn, **kwargs) if kwargs else fn, *args)

        self._line.run(begin, lambda outcome: outcome.tell(job))
        return job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # as in the base class
        """There is no thread to be ended."""


class VirtualWorker:
    """Takes the place of ``mldserver.base.threads.WorkerThread``."""

    def __init__(self, name: str) -> None:
        """Take what the real one takes."""
        self.name = name
        self._line = _Line()

    def start(self) -> None:
        """There is no thread to be started."""

    async def run(self, function: Callable[[], _T]) -> _T:
        """Return what ``function`` returns, or raise what it raises, after the calls before it."""
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        job = functools.partial(contextvars.copy_context().run, function)
        process = VirtualProcess.current()
        self._line.run(
            lambda: None if future.cancelled() else process.attempt(job), lambda outcome: outcome.tell(future)
        )
        return await future

    async def close(self, seconds: float) -> bool:
        """Return at once: what is queued may end by itself within any ``seconds``."""
        return seconds >= 0


@contextlib.contextmanager
def stand_ins(replaced: Mapping[object, object], package: str = "mldserver") -> Iterator[None]:
    """Let other objects stand in for classes, under every name that a loaded module of ``package`` has for them."""
    changed: list[tuple[Any, str, object]] = []
    try:
        for module_name, module in sorted(sys.modules.items()):
            if module_name.split(".")[0] != package or module_name.startswith(f"{package}.testing"):
                continue
            for name, value in list(vars(module).items()):
                if not isinstance(value, type) or value not in replaced:
                    continue
                changed.append((module, name, value))
                setattr(module, name, replaced[value])
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)
