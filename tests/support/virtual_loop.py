"""An event loop without real time, real threads or real sockets: the same seed gives the same run, step by step.

* Time stands still while anything is ready to run, and then jumps to the next timer.
* ``run_in_executor`` (and so ``asyncio.to_thread``) calls the function on the loop, after a latency that chance
  decides, and tells its result after another one: effects and answers interleave as they do with real threads.
* Connections over TCP are pairs of in-memory transports (``virtual_net.py``).
* Tasks and futures hash by the order in which they were made, so that sets of them have one order.

Callbacks that are ready together run in the order in which they became ready, as asyncio promises: code may rely on
that. What asyncio does not promise, the order of answers from outside, is what chance decides here.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import selectors
import socket
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack

from support.virtual_net import MemorySocket, VirtualNet
from support.virtual_process import VirtualProcess

__all__ = ["IdleLoop", "LoopClock", "Stuck", "VirtualLoop"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_PATIENCE_TURNS: Final = 200_000
"""Turns of the loop without any time passing: something spins."""


class Stuck(RuntimeError):
    """Nothing can ever happen any more, or something happens for ever without time passing."""


class _Future(asyncio.Future[Any]):
    """A future whose hash is its number, not its address."""

    __slots__ = ("_number",)
    _numbers: Final = itertools.count()

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._number = next(self._numbers)

    def __hash__(self) -> int:
        return self._number


class _Task(asyncio.Task[Any]):
    """A task whose hash is its number, not its address."""

    _numbers: Final = itertools.count()

    def __init__(self, work: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = next(self._numbers)
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self._number


class _Selector(selectors.SelectSelector):
    """Takes the place of waiting for the kernel: time passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("Everything waits for something that cannot come any more.")
        if timeout > 0:
            self.now += timeout
            self._turns = 0
        self._turns += 1
        if self._turns > _PATIENCE_TURNS:
            self._turns = 0  # whoever cleans up gets turns of their own
            raise Stuck(f"The loop turned {_PATIENCE_TURNS} times without any time passing.")
        return []


class _IdleSelector(selectors.DefaultSelector):
    """Looks at the kernel, and does not wait for it: where nothing is ready time passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0)
        if timeout is not None and not ready:
            self.now += timeout
        return ready


class IdleLoop(asyncio.SelectorEventLoop):
    """Time passes only while nobody has anything to do, for tasks that talk over Unix sockets among themselves.

    What one of them sends is there for the other at once. So nobody is ever late, however slow the machine is.
    """

    def __init__(self) -> None:
        self._idle = _IdleSelector()
        super().__init__(self._idle)

    def time(self) -> float:
        """Return seconds since the loop was made."""
        return self._idle.now


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module. ``latency`` returns seconds above zero; it is drawn from a seed."""

    def __init__(self, latency: Callable[[], float]) -> None:
        """Begin at time zero."""
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self.latency = latency
        self.net = VirtualNet(self, latency)
        self.set_task_factory(_make_task)

    def time(self) -> float:
        """Return seconds since the loop was made."""
        return self._virtual.now

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future whose place in a set does not depend on its address."""
        return _Future(loop=self)

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Call soon; there are no other threads."""
        return self.call_soon(callback, *args, context=context)

    def add_signal_handler(self, sig: int, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts) -> None:
        """Take no signals: they belong to whoever runs the simulation. The server copes with a refusal."""
        raise RuntimeError(f"a virtual loop takes no signals ({sig}, {callback}, {args})")

    # Threads.

    def run_in_executor(
        self, executor: Any, func: Callable[[Unpack[_Ts]], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        """Call ``func`` on the loop some time later, and return its result later still."""
        assert executor is None, "only the default executor is virtual"
        future: asyncio.Future[_T] = self.create_future()
        process = VirtualProcess.current()

        def begin() -> None:
            if not future.cancelled():
                outcome = process.attempt(func, *args)
                self.call_later(self.latency(), outcome.tell, future)

        self.call_at(max(self.time(), process.stalled_until) + self.latency(), begin)
        return future

    # Sockets.

    async def sock_accept(self, sock: socket.socket) -> tuple[Any, Any]:
        """Return the next in-memory connection to the listener's port."""
        return await self.net.accept(sock)

    async def connect_accepted_socket(  # type: ignore[override]  # in memory: none of the options of real sockets
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], sock: MemorySocket
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Join a protocol to an accepted in-memory connection."""
        return self.net.attach(protocol_factory, sock)

    async def create_connection(  # type: ignore[override]  # in memory: none of the options of real sockets
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect to a listener of this loop. Raises ConnectionRefusedError when there is none."""
        return await self.net.connect(protocol_factory, host, port)


def _make_task(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, _T] | Generator[Any, None, _T],
    **options: Any,
) -> asyncio.Task[_T]:
    return _Task(work, loop=loop, **options)  # type: ignore[arg-type]  # generators are coroutines of old


class LoopClock:
    """``mldserver.base.clock.Clock`` over a loop's time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start_ms: int = 1_800_000_000_000) -> None:
        """The loop's time zero is ``start_ms`` milliseconds since the Unix epoch."""
        self._loop = loop
        self._wall_ms = start_ms

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch."""
        return self._wall_ms + self.steady_ms()

    def steady_ms(self) -> int:
        """Return milliseconds of the loop."""
        return int(self._loop.time() * 1000)

    def step(self, seconds: float) -> None:
        """Set the time of day forward, or back when negative; nobody sleeps shorter or longer for it."""
        self._wall_ms += round(seconds * 1000)

    async def sleep(self, seconds: float) -> None:
        """Sleep on the loop."""
        await asyncio.sleep(seconds)
