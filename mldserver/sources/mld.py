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
"""Whoever has shown no certificate by then gives its slot back."""
_HANDSHAKE_PAUSE_SECONDS: Final = 0.01
"""Between two handshakes: each takes the loop about 2 ms before anybody is known, and a flood must leave it to batches."""
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

        ``tls``: None for clear text; on a Unix socket it always is. ``secret``: what each peer must show; None: nothing. ``allow_shards``: patterns of the shards that may be
        connected for; none: any. At ``connection_limit`` connections, peers wait in the kernel's queue; beyond ``read_bytes`` of unread lines,
        all connections but one wait with theirs. ``answer_deadline``: seconds after which a batch is answered though
        its records are still worked on; None: never. ``progress_seconds``: how often the log sums up a shard's batches.
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
        self._slots = asyncio.Semaphore(connection_limit)
        self._accepted = 0
        self._serving: dict[Link, Requests] = {}
        self._handshakes: set[asyncio.Task[Any]] = set()
        self._failed_handshakes = Folding(clock.steady_ms)
        self._refusals = Folding(clock.steady_ms)
        self._empty = asyncio.Event()
        self._empty.set()
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
        """An address, until connections are accepted there."""
        return "no address is listened on" if self._listening_on is None or self._stopped else None

    def status(self) -> SourceStatus:
        """Return what the listener knows of itself and its connections."""
        serving = self._serving.items()
        return SourceStatus(
            None if self._stopped else self._listening_on,
            self._accepted,
            Counter(str(link.core.state) for link, _ in serving),
            {shard_id: link.peer for link, each in serving if (shard_id := each.consumer.shard_id)},
            {each.consumer.shard_id: ms for _, each in serving if (ms := each.consumer.since_ms) is not None},
            self._counts,
            (self._budget.held, self._budget.limit),
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
                self._accepting = group.create_task(self._accept(listener, group))
                if self._stopped:
                    self._accepting.cancel()
                beside = [group.create_task(self._deadlines.run()), group.create_task(self._counts.run())]
                await asyncio.wait({self._accepting})
                listening.close()
                await self._empty.wait()
                for task in beside:
                    task.cancel()

    def stop_accepting(self) -> None:
        """Take no more connections; those that are there go on, but for those that are not proven yet."""
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
        await self._empty.wait()

    # Listening.

    async def _listen(self) -> socket.socket:
        try:
            if isinstance(self._address, UnixAddress):
                listener = listen_unix(self._address.path)
                shown = str(self._address)
            else:
                listener = await listen_tcp(*self._address)
                shown = str(TcpAddress(*listener.getsockname()[:2]))
        except (OSError, UnicodeError) as error:  # UnicodeError: a host that can be no name
            # A port that is taken, an address or a folder that is not there: all that may change.
            lasting = (
                isinstance(error, UnicodeError | PermissionError)
                or error.errno == errno.ENAMETOOLONG
                or error.errno is None  # the socket module itself refuses the address
            )
            raise (OperatorError if lasting else NotThereYet)(
                f"Cannot listen on {self._address}: {getattr(error, 'strerror', None) or error}.",
                advice="Give another address with --listen, or stop what uses this one.",
            ) from error
        self._listening_on = shown
        log.info("server.listening", address=shown)
        return listener

    async def _accept(self, listener: socket.socket, group: asyncio.TaskGroup) -> None:
        """Take a slot, then a connection; say so when a peer has to wait for one."""
        loop = asyncio.get_running_loop()

        def tell() -> None:
            loop.remove_reader(listener)
            log.warning("connection.refused", limit=self._connection_limit)

        while True:
            if self._slots.locked():
                loop.add_reader(listener, tell)
            try:
                await self._slots.acquire()
            finally:
                loop.remove_reader(listener)
            try:
                peer_socket, peer = await loop.sock_accept(listener)
            except OSError as error:
                self._slots.release()
                log.warning("connection.refused", what=f"accept failed: {error}")
                await self._clock.sleep(_ACCEPT_PAUSE_SECONDS)
            except asyncio.CancelledError:
                self._slots.release()
                raise
            else:
                group.create_task(self._serve(peer_socket, peer))
                if self._tls is not None:
                    await self._clock.sleep(_HANDSHAKE_PAUSE_SECONDS)

    # Serving.

    async def _serve(self, peer_socket: socket.socket, peer: object) -> None:
        if self._stopped:  # accepted in the very moment of the stop: too late to be drained
            peer_socket.close()
            self._slots.release()
            return
        self._accepted += 1
        name = f"c{self._accepted}"
        # The peer of a Unix socket has no name.
        shown = str(TcpAddress(*peer[:2])) if isinstance(peer, tuple) else "unix"
        link = Link(
            name,
            shown,
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
        self._empty.clear()
        try:
            if await self._connect(peer_socket, link):
                await requests.run()
                await link.wait_gone()
        except Exception:
            # Errors of requests end there: this one prevents the release of a shard.
            link.log.exception("connection.failed", peer=shown)
        finally:
            link.cut()
            del self._serving[link]
            if not self._serving:
                self._empty.set()
            self._slots.release()

    async def _connect(self, peer_socket: socket.socket, link: Link) -> bool:
        """Give the link its transport, behind a handshake where TLS is spoken; return whether it came about."""
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
            if isinstance(error, ConnectionResetError):  # somebody only looks whether there is a server
                link.log.debug("tls.failed", peer=link.peer, what="The peer went away in the handshake.")
            else:
                self._log_failed_handshake(link, handshake_failure(error))
            return False
        finally:
            self._handshakes.discard(task)
        return True

    def _log_failed_handshake(self, link: Link, why: str) -> None:
        """Log why a handshake failed; a daemon that tries again and again for the same reason fills one line a minute."""
        host = link.peer.rpartition(":")[0]
        if times := self._failed_handshakes.count(f"{host} {why}"):
            link.log.warning(
                "tls.failed", peer=link.peer, what=f"The handshake failed: {why}.", times=times, advice=PROVE
            )
