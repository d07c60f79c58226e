"""TCP in memory: order, ends, resets, and what a death does to connections."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from support.virtual_loop import VirtualLoop
from support.virtual_net import MemorySocket
from support.virtual_process import VirtualProcess


class Heard(asyncio.Protocol):
    """Notes what happens to it."""

    def __init__(self, *, keeps_open: bool = False) -> None:
        self.transport: Any = None
        self.data = b""
        self.pieces = 0
        self.events: list[str] = []
        self.keeps_open = keeps_open

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.pieces += 1

    def eof_received(self) -> bool:
        self.events.append("eof")
        return self.keeps_open

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append(type(exc).__name__ if exc else "closed")


def play(work: Coroutine[Any, Any, Any]) -> None:
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda: 0.01)) as runner:
        runner.run(work)


def connected(act: Callable[[Heard, Heard, VirtualProcess], Awaitable[None]], **options: bool) -> None:
    """Run ``act`` with a client's and a server's end, and the server's process."""

    async def work() -> None:
        loop: Any = asyncio.get_running_loop()
        process = VirtualProcess("server")
        with socket.create_server(("127.0.0.1", 0)) as listener, process.entered():
            accepting = loop.create_task(loop.sock_accept(listener))
            await asyncio.sleep(0)
            port = listener.getsockname()[1]
            _, client = await loop.create_connection(Heard, "127.0.0.1", port)
            sock, peer = await accepting
            assert peer[0] == "127.0.0.1"
            _, server = await loop.connect_accepted_socket(lambda: Heard(**options), sock)
            await act(client, server, process)

    play(work())


async def settle() -> None:
    await asyncio.sleep(1)


def test_bytes_keep_their_order_and_come_in_pieces() -> None:
    async def act(client: Heard, server: Heard, _process: VirtualProcess) -> None:
        client.transport.write(b"a" * 900)
        client.transport.writelines([b"b", b"c"])
        client.transport.write(b"")
        server.transport.write(b"hello")
        await settle()
        assert server.data == b"a" * 900 + b"bc"
        assert server.pieces > 2
        assert client.data == b"hello"
        assert client.transport.get_write_buffer_size() == 0
        client.transport.set_write_buffer_limits()
        client.transport.close()
        await settle()

    connected(act)


class Filled(asyncio.BufferedProtocol):
    """Receives into a small buffer of its own."""

    def __init__(self) -> None:
        self.buffer = bytearray(8)
        self.data = b""

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data += self.buffer[:nbytes]


def test_a_buffered_protocol_gets_its_bytes_in_its_buffer() -> None:
    async def act(client: Heard, server: Heard, _process: VirtualProcess) -> None:
        filled = Filled()
        server.transport.set_protocol(filled)
        client.transport.write(b"more than its buffer holds")
        await settle()
        assert filled.data == b"more than its buffer holds"

    connected(act)


def test_an_orderly_close_arrives_behind_the_bytes() -> None:
    async def act(client: Heard, server: Heard, _process: VirtualProcess) -> None:
        client.transport.write(b"last words")
        client.transport.close()
        client.transport.close()
        assert client.transport.is_closing()
        await settle()
        assert server.data == b"last words"
        assert server.events == ["eof", "closed"]
        assert client.events == ["closed"]

    connected(act)


def test_one_direction_may_end_before_the_other() -> None:
    async def act(client: Heard, server: Heard, _process: VirtualProcess) -> None:
        assert client.transport.can_write_eof()
        client.transport.write_eof()
        client.transport.write_eof()
        client.transport.write(b"too late")
        await settle()
        assert server.events == ["eof"]
        server.transport.write(b"still here")
        server.transport.close()
        await settle()
        assert client.data == b"still here"
        assert server.data == b""

    connected(act, keeps_open=True)


def test_writing_to_who_is_gone_brings_a_reset() -> None:
    async def act(client: Heard, server: Heard, _process: VirtualProcess) -> None:
        client.transport.abort()
        client.transport.abort()
        await settle()
        assert server.events == ["eof"]
        server.transport.write(b"is anybody there?")
        await settle()
        assert server.events == ["eof", "ConnectionResetError"]
        server.transport.write(b"no")
        server.transport.abort()

    connected(act, keeps_open=True)


def test_a_socket_that_does_not_linger_is_reset() -> None:
    async def act(client: Heard, server: Heard, _process: VirtualProcess) -> None:
        sock: MemorySocket = client.transport.get_extra_info("socket")
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        await settle()
        assert server.events == ["ConnectionResetError"]
        assert client.events == ["closed"]

    connected(act)


def test_reading_can_pause() -> None:
    async def act(client: Heard, server: Heard, _process: VirtualProcess) -> None:
        server.transport.pause_reading()
        assert not server.transport.is_reading()
        client.transport.write(b"later")
        await settle()
        assert server.data == b""
        server.transport.resume_reading()
        await settle()
        assert server.transport.is_reading()
        assert server.data == b"later"
        client.transport.abort()
        await settle()

    connected(act)


def test_the_peers_of_a_process_that_dies_are_reset_and_it_hears_nothing() -> None:
    async def act(client: Heard, server: Heard, process: VirtualProcess) -> None:
        process.kill()
        process.kill()
        client.transport.write(b"hello?")
        await settle()
        assert client.events == ["ConnectionResetError"]
        assert server.events == []
        assert server.data == b""

    connected(act)


def test_a_connection_may_change_hands() -> None:
    async def act(client: Heard, server: Heard, _process: VirtualProcess) -> None:
        heir = Heard()
        assert server.transport.get_protocol() is server
        server.transport.set_protocol(heir)
        client.transport.write(b"for the heir")
        await settle()
        assert (server.data, heir.data) == (b"", b"for the heir")
        client.transport.abort()
        await settle()

    connected(act)


def test_where_nobody_listens_connections_are_refused() -> None:
    async def work() -> None:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", 9)

    play(work())


def test_a_listener_that_is_closed_refuses_and_a_new_one_accepts() -> None:
    async def work() -> None:
        loop: Any = asyncio.get_running_loop()
        process = VirtualProcess("server")
        with process.entered():
            listener = socket.create_server(("127.0.0.1", 0))
            accepting = loop.create_task(loop.sock_accept(listener))
            await asyncio.sleep(0)
            port = listener.getsockname()[1]
            process.kill()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            accepting.cancel()

    play(work())
