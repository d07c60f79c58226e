"""TCP in memory: connections whose bytes come late, in pieces, and stop where a process dies.

Each direction keeps its order. What was written before an orderly end arrives before it; a reset is seen as one.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from support.virtual_process import VirtualProcess

__all__ = ["MemorySocket", "MemoryTransport", "VirtualNet"]

_GAP_SECONDS: Final = 1e-6
"""Timers that are due together fire in no promised order; bytes must not."""
_PIECE_BYTES: Final = 700
"""Longer writes arrive in two pieces."""


class MemorySocket:
    """What code asks of a socket beside its bytes."""

    family = socket.AF_INET

    def __init__(self) -> None:
        """Stand for an open socket."""
        self.lingers = True
        self.transport: MemoryTransport | None = None

    def setblocking(self, flag: bool) -> None:  # as in the standard library
        """Do nothing: nothing blocks."""

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Note that the socket shall be reset instead of closed; other options mean nothing here."""
        if level == socket.SOL_SOCKET and option == socket.SO_LINGER and isinstance(value, bytes):
            self.lingers = False

    def close(self) -> None:
        """Close without a transport."""
        if self.transport is not None:
            self.transport.abort()


class MemoryTransport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop, latency: Callable[[], float]) -> None:
        """Begin without a protocol: what arrives waits for it."""
        self.sock = MemorySocket()
        self.sock.transport = self
        super().__init__({"socket": self.sock, "peername": ("127.0.0.1", 1)})
        self.peer: MemoryTransport
        self._loop = loop
        self._latency = latency
        self._protocol: asyncio.Protocol | asyncio.BufferedProtocol | None = None
        self._inbox: deque[bytes | None] = deque()
        self._paused = False
        self._closing = False
        self._lost = False
        self._out_ended = False
        self._due = 0.0

    def join(self, protocol: asyncio.Protocol | asyncio.BufferedProtocol) -> None:
        """Give the connection to a protocol."""
        self._protocol = protocol
        protocol.connection_made(self)
        self._deliver()

    # What a protocol asks.

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol."""
        assert self._protocol is not None
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand the connection over."""
        assert isinstance(protocol, asyncio.Protocol | asyncio.BufferedProtocol)
        self._protocol = protocol

    def is_closing(self) -> bool:
        """Whether it is closed, or will be."""
        return self._closing

    def write(self, data: Any) -> None:
        """Send bytes."""
        if self._lost or self._out_ended or not data:
            return
        whole = bytes(data)
        cut = len(whole) // 3 if len(whole) > _PIECE_BYTES else len(whole)
        for piece in (whole[:cut], whole[cut:]):
            if piece:
                self._send(self.peer._arrive, piece)  # its other end

    def can_write_eof(self) -> bool:
        """It can."""
        return True

    def write_eof(self) -> None:
        """End this direction."""
        if not self._out_ended:
            self._out_ended = True
            self._send(self.peer._arrive, None)  # its other end

    def close(self) -> None:
        """Close in order: what was written still arrives."""
        if not self._closing:
            self._closing = True
            self.write_eof()
            self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        """Close at once, with a reset when the socket was told not to linger."""
        if self._lost:
            return
        self._closing = True
        if self.sock.lingers:
            self.write_eof()
        else:
            self._out_ended = True
            self._send(self.peer._reset)  # its other end
        self._loop.call_soon(self._lose, None)

    def pause_reading(self) -> None:
        """Keep what arrives."""
        self._paused = True

    def resume_reading(self) -> None:
        """Hand over what was kept."""
        self._paused = False
        self._loop.call_soon(self._deliver)

    def is_reading(self) -> bool:
        """Whether what arrives is handed over."""
        return not (self._paused or self._closing)

    def get_write_buffer_size(self) -> int:
        """Nothing waits: the network takes all."""
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: the network takes all."""

    # What happens to it.

    def vanish(self) -> None:
        """Its process died: the other end is reset, this one hears nothing any more."""
        if not self._lost:
            self._lost = self._closing = self._out_ended = True
            self._send(self.peer._reset)  # its other end
            self._protocol = None

    def _send(self, act: Callable[..., None], *args: object) -> None:
        self._due = max(self._due + _GAP_SECONDS, self._loop.time() + self._latency())
        self._loop.call_at(self._due, act, *args)

    def _arrive(self, piece: bytes | None) -> None:
        if self._lost:
            if piece is not None:  # nobody reads it: the kernel answers with a reset
                self._send(self.peer._reset)  # its other end
            return
        self._inbox.append(piece)
        self._deliver()

    def _deliver(self) -> None:
        while self._inbox and self._protocol is not None and not (self._paused or self._closing):
            piece = self._inbox.popleft()
            if piece is not None:
                _hand_over(self._protocol, piece)
            elif not self._protocol.eof_received():
                self.close()

    def _reset(self) -> None:
        self._closing = self._out_ended = True
        self._lose(ConnectionResetError("reset by peer"))

    def _lose(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        self._inbox.clear()
        if self._protocol is not None:
            self._protocol.connection_lost(error)


def _hand_over(protocol: asyncio.Protocol | asyncio.BufferedProtocol, piece: bytes) -> None:
    """Give received bytes to a protocol of either kind."""
    if isinstance(protocol, asyncio.Protocol):
        protocol.data_received(piece)
        return
    while piece:
        with memoryview(protocol.get_buffer(len(piece))) as buffer:
            size = min(len(buffer), len(piece))
            buffer[:size] = piece[:size]
        piece = piece[size:]
        protocol.buffer_updated(size)


@dataclass(slots=True)
class _Port:
    listener: socket.socket
    queue: deque[MemoryTransport] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None


class VirtualNet:
    """The listeners of a loop, by port. Their sockets are real ones that nobody connects to."""

    def __init__(self, loop: asyncio.AbstractEventLoop, latency: Callable[[], float]) -> None:
        """Begin without any."""
        self._loop = loop
        self._latency = latency
        self._ports: dict[int, _Port] = {}

    async def accept(self, listener: socket.socket) -> tuple[MemorySocket, tuple[str, int]]:
        """Return the next connection to a listener."""
        number = listener.getsockname()[1]
        port = self._ports.get(number)
        if port is None or port.listener is not listener:
            port = self._ports[number] = _Port(listener)
            VirtualProcess.current().listeners.append(listener)
        while not port.queue:
            port.waiter = self._loop.create_future()
            await port.waiter
        return port.queue.popleft().sock, ("127.0.0.1", 1)

    def attach(
        self, factory: Callable[[], asyncio.BaseProtocol], sock: MemorySocket
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Join a protocol to an accepted connection."""
        transport = sock.transport
        assert transport is not None
        process = VirtualProcess.current()
        process.transports = [each for each in process.transports if not each.is_closing()]
        process.transports.append(transport)
        return _join(factory, transport)

    async def connect(
        self, factory: Callable[[], asyncio.BaseProtocol], host: str, number: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect to a port. Raises ConnectionRefusedError when nobody listens there."""
        await asyncio.sleep(self._latency())
        port = self._ports.get(number)
        if port is None or port.listener.fileno() < 0:
            raise ConnectionRefusedError(f"nobody listens on {host}:{number}")
        here, there = (MemoryTransport(self._loop, self._latency) for _ in range(2))
        here.peer, there.peer = there, here
        port.queue.append(there)
        if port.waiter is not None and not port.waiter.done():
            port.waiter.set_result(None)
        return _join(factory, here)


def _join(
    factory: Callable[[], asyncio.BaseProtocol], transport: MemoryTransport
) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
    protocol = factory()
    assert isinstance(protocol, asyncio.Protocol | asyncio.BufferedProtocol)
    transport.join(protocol)
    return transport, protocol
