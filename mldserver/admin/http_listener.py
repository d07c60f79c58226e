"""Accepts HTTP clients on one socket, within bounds that keep slow, hostile and numerous clients from the server's event loop.

Each connection is a task and carries one request, so the bounds on connections also limit requests. At a bound, further
clients wait in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import socket
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import structlog
from aiohttp import web

from mldserver.base.backoff import TokenBucket
from mldserver.base.tls import ServerTLS
from mldserver.config.kinds import TcpAddress, is_loopback

log = structlog.get_logger("mldserver")

MOST_CONNECTIONS: Final = 64
"""Of one listener."""
_PER_SECOND: Final = 50
"""New connections on average, and at once after a pause. A request takes about 0.5 ms of the event loop, a TLS handshake 2 ms."""
_REQUEST_BYTES: Final = 16_384
"""Of a connection: request line, headers and body."""
_REQUEST_SECONDS: Final = 5.0
"""From the accept until the request is complete, TLS handshake included."""
ANSWER_SECONDS: Final = 30.0
"""From the request until the client has received the response."""

_silent: Final = logging.getLogger("mldserver.admin.http")
_silent.disabled = True  # malformed requests are normal; the routes log their own failures


class Access(enum.Enum):
    """What the clients of a listener may request."""

    STEER = enum.auto()
    """Everything. For a Unix socket, whose clients are the server's own user and root."""
    READ = enum.auto()
    METRICS = enum.auto()
    """Metrics and health."""


class Connection(web.RequestHandler):
    """A client from the accept to the end, with its deadline."""

    def __init__(self, listener: HttpListener, peer: socket.socket, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=_silent,
            logger=_silent,
            lingering_time=0,
            auto_decompress=False,  # a request within its bound would become a thousand times larger
        )
        self.listener = listener
        self.deadline = asyncio.timeout(_REQUEST_SECONDS)
        self.lost = asyncio.Event()
        self.uid: int | None = None
        """The user's id of a Unix socket's client, from the kernel."""
        self._received = 0
        if peer.family == socket.AF_UNIX:
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, self.uid, _ = struct.unpack("3i", credentials)
            self.peer = f"user {self.uid}, process {pid}"
        else:
            host, port = peer.getpeername()[:2]
            self.peer = f"{host} port {port}"

    @property
    def is_permitted(self) -> bool:
        """Whether the client may request anything at all."""
        if self.listener.access is Access.STEER:
            return self.uid in {0, os.getuid()}
        tls = self.listener.tls
        proof = None if self.transport is None else self.transport.get_extra_info("ssl_object")
        return tls is None or tls.refusal(proof) is None

    def extend(self, seconds: float | None) -> None:
        """Set the deadline from now on; None removes it."""
        self.deadline.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)

    def data_received(self, data: bytes) -> None:
        """Receive a part of the request. Closes the connection beyond its bound, before anything is parsed."""
        self._received += len(data)
        if self._received > _REQUEST_BYTES:
            self.force_close()
        else:
            super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the connection's task."""
        super().connection_lost(exc)
        self.lost.set()


@dataclass(frozen=True, eq=False)
class HttpListener:
    """A listening socket and its clients' permissions. ``run`` accepts them."""

    sock: socket.socket
    access: Access
    tls: ServerTLS | None = None

    @property
    def address(self) -> str:
        """A TCP listener's address, with the real port."""
        return str(TcpAddress(*self.sock.getsockname()[:2]))

    @cached_property
    def is_on_loopback(self) -> bool:
        """Whether only this host's TCP clients reach it."""
        return self.sock.family != socket.AF_UNIX and is_loopback(self.sock.getsockname()[0])

    async def run(self, server: web.Server) -> None:
        """Serve clients until cancelled."""
        loop = asyncio.get_running_loop()
        slots, bucket = asyncio.Semaphore(MOST_CONNECTIONS), TokenBucket(_PER_SECOND, burst=_PER_SECOND)
        async with asyncio.TaskGroup() as group:
            while True:
                await slots.acquire()
                await asyncio.sleep(bucket.reserve(round(loop.time() * 1000)))
                try:
                    peer, _ = await loop.sock_accept(self.sock)
                except OSError as error:  # for example, the process is out of file descriptors
                    log.warning("admin.refused", what=f"A connection cannot be accepted: {error}.")
                    slots.release()
                    await asyncio.sleep(1.0)
                else:
                    serving = group.create_task(self._serve(peer, server))
                    serving.add_done_callback(lambda _: slots.release())

    async def _serve(self, peer: socket.socket, server: web.Server) -> None:
        """Serve a client until it closes the connection or exceeds its deadline. A failure does not affect others."""
        transport: asyncio.Transport | None = None
        try:
            connection = Connection(self, peer, server)
            async with connection.deadline:
                transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: connection,
                    peer,
                    ssl=None if self.tls is None else self.tls.context,
                    ssl_handshake_timeout=None if self.tls is None else _REQUEST_SECONDS,
                )
                await connection.lost.wait()
        except OSError:  # ssl.SSLError and TimeoutError are OSErrors
            pass
        except Exception:  # one connection must not end the server
            log.exception("admin.failed", did="One connection is closed; nothing else is affected.")
        finally:
            if transport is not None:
                transport.abort()
            peer.close()
