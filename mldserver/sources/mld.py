"""The MultiLangDaemon listener: TCP or a Unix socket, one connection for each shard.

    accept loop ── a slot first, then accept ── TLS ──▶ Link (bytes, timers) ──▶ Consumer (batches) ◀── Requests (others)

One task group owns the accept loop and every connection, so nothing outlives ``run``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random as _random
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from mldserver.base.folding import Folding
from mldserver.base.listening import listen_tcp, listen_unix
from mldserver.base.tls import ServerTLS, handshake_failure, handshake_failures
from mldserver.config.kinds import Address, TcpAddress, UnixAddress
from mldserver.consumer.deadlines import AnswerDeadlines
from mldserver.consumer.progress_log import ProgressLog
from mldserver.consumer.shard import ConsumerParts
from mldserver.errors import NotThereYet, OperatorError
from mldserver.protocol.connection import ConnectionLimits
from mldserver.sources.link import PROVE, Link
from mldserver.sources.requests import Requests
from mldserver.sources.source import SourceStatus
from mldserver.sources.unread import ReadBudget

log = structlog.get_logger("mldserver")

DEFAULT_READ_BYTES: Final = 512 * 1024 * 1024
"""Unread lines of all connections together."""

_RECEIVE_BYTES: Final = 256 * 1024
"""Of the one buffer that all connections receive into: larger gains nothing, smaller costs system calls."""
_ACCEPT_PAUSE_SECONDS: Final = 0.5
"""After a failed accept, e.g. when the process is out of file descriptors."""
_HANDSHAKE_SECONDS: Final = 10.0
"""A peer that has not finished its TLS handshake by then is disconnected."""
_HANDSHAKE_PAUSE_SECONDS: Final = 0.01
"""Between two handshakes: each costs the event loop about 2 ms, and a flood of unknown peers must not delay batches."""
_NOTICE_SILENCE: Final = tuple(
    (getattr(socket, name), value)
    for name, value in {
        "TCP_KEEPIDLE": 30,  # seconds of silence before the first probe
        "TCP_KEEPINTVL": 10,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 60_000,  # milliseconds that an answer may be unacknowledged
    }.items()
    if hasattr(socket, name)
)
"""A host that vanished without a word is noticed within a minute, idle or not; some platforms lack some of these.

The kernel's own values are two hours for an idle connection, and a quarter of an hour for an answer.
"""


class MLDListener:
    """Accepts daemons' children and serves them until it is stopped."""

    def __init__(
        self,
        address: Address,
        parts: ConsumerParts,
        *,
        limits: ConnectionLimits,
        tls: ServerTLS | None = None,
        secret: bytes | None = None,
        allow_shards: Sequence[str] = (),
        connection_limit: int = 1024,
        read_bytes: int = DEFAULT_READ_BYTES,
        answer_deadline: float | None = None,
        progress_seconds: float = 1.0,
        random: Callable[[], float] = _random.random,
    ) -> None:
        """Listen at ``address`` once ``run`` is called.

        ``tls``: None for clear text; ignored on a Unix socket. ``secret``: what each peer must send first; None: nothing.
        ``allow_shards``: patterns of the shard ids that a peer may name; empty: any. At ``connection_limit`` connections,
        new peers wait in the kernel's queue. ``read_bytes``: see ``ReadBudget``. ``answer_deadline``: seconds after which a
        batch is acknowledged although its records are still being processed; None: never. ``progress_seconds``: how often
        the log sums up a shard's batches.
        """
        self._address = address
        self.parts, clock = parts, parts.clock
        """What each shard's consumer is made of."""
        self._clock = clock
        self._limits = limits
        self._tls = tls if isinstance(address, TcpAddress) else None
        self._secret = secret
        self._allow_shards = allow_shards
        self._connection_limit = connection_limit
        self._deadlines = AnswerDeadlines(clock=clock, seconds=answer_deadline)
        self._counts = ProgressLog(clock=clock, seconds=progress_seconds)
        self._random = random
        self._budget = ReadBudget(read_bytes)
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._free_connections = asyncio.Semaphore(connection_limit)
        self._accepted = 0
        self._serving: dict[Link, Requests] = {}
        self._handshakes: set[asyncio.Task[Any]] = set()
        self._failed_handshakes = Folding(clock.steady_ms)
        self._refusals = Folding(clock.steady_ms)
        self._no_connections = asyncio.Event()
        self._no_connections.set()
        self._accepting: asyncio.Task[None] | None = None
        self._stopped = False
        self._started = asyncio.Event()
        self._listening_on: str | None = None

    @property
    def connections(self) -> int:
        """How many connections there are."""
        return len(self._serving)

    @property
    def waits_for(self) -> str | None:
        """Why no shard can come now, as a clause for ``server.unready``: nothing is listened on. Else None."""
        return "no address is listened on" if self._listening_on is None or self._stopped else None

    def status(self) -> SourceStatus:
        """Return the address, the counts, and each connection's state, for the status page and metrics."""
        consumers = [(link.peer, requests.consumer) for link, requests in self._serving.items()]
        return SourceStatus(
            address=None if self._stopped else self._listening_on,
            accepted=self._accepted,
            connections=Counter(str(link.core.state) for link in self._serving),
            peers={consumer.shard_id: peer for peer, consumer in consumers if consumer.shard_id},
            since_ms={one.shard_id: ms for _, one in consumers if (ms := one.since_ms) is not None},
            counts=self._counts,
            lines=(self._budget.held, self._budget.limit),
        )

    async def listening(self) -> str:
        """Return the address once connections are accepted: ``host:port`` with the real port, or ``unix:/path``.

        Raises OperatorError when the address cannot be listened on.
        """
        await self._started.wait()
        if self._listening_on is None:
            raise OperatorError(f"Nothing listens on {self._address}.")
        return self._listening_on

    async def run(self) -> None:
        """Accept and serve until ``stop_accepting``, and then until the last connection is gone.

        Raises OperatorError when the address cannot be listened on. Cancelled, it cuts every connection.
        """
        try:
            listener = await self._listen()
        finally:
            self._started.set()
        with contextlib.ExitStack() as listening:
            if isinstance(self._address, UnixAddress):
                listening.callback(self._address.path.unlink, missing_ok=True)
            listening.callback(listener.close)
            async with asyncio.TaskGroup() as group:
                self._accepting = group.create_task(self._accept_connections(listener, group))
                if self._stopped:
                    self._accepting.cancel()
                background = [group.create_task(self._deadlines.run()), group.create_task(self._counts.run())]
                await asyncio.wait({self._accepting})
                listening.close()
                await self._no_connections.wait()
                for task in background:
                    task.cancel()

    def stop_accepting(self) -> None:
        """Accept no more connections, and close those in a TLS handshake. Connections that are served continue."""
        self._stopped = True
        for handshake in self._handshakes:
            handshake.cancel()
        if self._accepting is not None:
            self._accepting.cancel()

    async def drain(self) -> None:
        """Let each connection finish its request, then close them all; return when they are gone.

        All are closed together, at the end: the first close makes the daemon's JVM exit, which would cut off the
        requests of its other shards. Cancel it to give up waiting: connections are then closed as they are.
        """
        self.stop_accepting()
        try:
            async with asyncio.TaskGroup() as group:
                for requests in tuple(self._serving.values()):
                    group.create_task(requests.finish())
        finally:
            for link in tuple(self._serving):
                link.close()
        await self._no_connections.wait()

    # Listening.

    async def _listen(self) -> socket.socket:
        """Return a socket that listens at the address. Raises OperatorError, and NotThereYet if a retry may succeed."""
        try:
            if isinstance(self._address, UnixAddress):
                listener = listen_unix(self._address.path)
                actual_address = str(self._address)
            else:
                listener = await listen_tcp(*self._address)
                actual_address = str(TcpAddress(*listener.getsockname()[:2]))  # the port may have been 0
        except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
            # All other errors may pass: the port is in use, or the address or the folder does not exist yet.
            is_permanent = (
                isinstance(error, UnicodeError | PermissionError)
                or error.errno == errno.ENAMETOOLONG
                or error.errno is None  # the socket module itself refuses the address
            )
            raise (OperatorError if is_permanent else NotThereYet)(
                f"Cannot listen on {self._address}: {getattr(error, 'strerror', None) or error}.",
                advice="Give another address with --listen, or stop what uses this one.",
            ) from error
        self._listening_on = actual_address
        log.info("server.listening", address=actual_address)
        return listener

    async def _accept_connections(self, listener: socket.socket, group: asyncio.TaskGroup) -> None:
        """Accept connections until cancelled; serve each in a task. At the limit, new peers wait in the kernel's queue: logged."""
        loop = asyncio.get_running_loop()

        def log_waiting_peer() -> None:
            loop.remove_reader(listener)
            log.warning("connection.refused", limit=self._connection_limit)

        while True:
            if self._free_connections.locked():
                loop.add_reader(listener, log_waiting_peer)
            try:
                await self._free_connections.acquire()
            finally:
                loop.remove_reader(listener)
            try:
                peer_socket, peer = await loop.sock_accept(listener)
            except OSError as error:
                self._free_connections.release()
                log.warning("connection.refused", what=f"accept failed: {error}")
                await self._clock.sleep(_ACCEPT_PAUSE_SECONDS)
            except asyncio.CancelledError:
                self._free_connections.release()
                raise
            else:
                group.create_task(self._serve_connection(peer_socket, peer))
                if self._tls is not None:
                    await self._clock.sleep(_HANDSHAKE_PAUSE_SECONDS)

    # Serving.

    async def _serve_connection(self, peer_socket: socket.socket, peer: object) -> None:
        """Serve an accepted connection to its end, then free its place under the limit. ``peer``: its address."""
        if self._stopped:  # accepted at the moment of the stop: too late to be drained
            peer_socket.close()
            self._free_connections.release()
            return
        self._accepted += 1
        # The peer of a Unix socket has no address.
        peer_name = str(TcpAddress(*peer[:2])) if isinstance(peer, tuple) else "unix"
        link = Link(
            f"c{self._accepted}",
            peer_name,
            limits=self._limits,
            random=self._random,
            budget=self._budget,
            buffer=self._buffer,
            refusals=self._refusals,
            tls=self._tls,
            secret=self._secret,
        )
        requests = Requests(
            link,
            parts=self.parts,
            deadlines=self._deadlines,
            counts=self._counts,
            allow_shards=self._allow_shards,
        )
        self._serving[link] = requests
        self._no_connections.clear()
        try:
            if await self._connect(peer_socket, link):
                await requests.run()
                await link.wait_gone()
        except Exception:
            # Errors of requests were handled before: this error prevents the release of a shard.
            link.log.exception("connection.failed", peer=peer_name)
        finally:
            link.cut()
            del self._serving[link]
            if not self._serving:
                self._no_connections.set()
            self._free_connections.release()

    async def _connect(self, peer_socket: socket.socket, link: Link) -> bool:
        """Connect the link to its socket, after a handshake if TLS is used; return False if the handshake failed."""
        peer_socket.setblocking(False)
        if peer_socket.family != socket.AF_UNIX:
            peer_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _NOTICE_SILENCE:
                peer_socket.setsockopt(socket.IPPROTO_TCP, option, value)
        loop = asyncio.get_running_loop()
        if self._tls is None:
            await loop.connect_accepted_socket(lambda: link, peer_socket)
            return True
        task = asyncio.current_task()
        assert task is not None
        self._handshakes.add(task)
        failures = handshake_failures()
        try:
            await loop.connect_accepted_socket(
                lambda: link,
                peer_socket,
                ssl=self._tls.context,
                ssl_handshake_timeout=min(_HANDSHAKE_SECONDS, self._limits.initialize_timeout_seconds),
                ssl_shutdown_timeout=self._limits.close_timeout_seconds,
            )
        except OSError as error:  # ssl.SSLError is one
            error = failures[0] if failures else error
            if isinstance(error, ConnectionResetError):  # a port scan, or a health check
                link.log.debug("tls.failed", peer=link.peer, what="The peer went away in the handshake.")
            else:
                self._log_failed_handshake(link, handshake_failure(error))
            return False
        finally:
            self._handshakes.discard(task)
        return True

    def _log_failed_handshake(self, link: Link, why: str) -> None:
        """Log why a handshake failed: of a host that fails repeatedly for the same reason, one line a minute."""
        host = link.peer.rpartition(":")[0]
        if times := self._failed_handshakes.count(f"{host} {why}"):
            link.log.warning(
                "tls.failed", peer=link.peer, what=f"The handshake failed: {why}.", times=times, advice=PROVE
            )
