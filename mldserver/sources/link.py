"""One connection on the event loop: the protocol core's bytes, timers and events; nothing is decided here.

Batches go to ``on_batch`` at once, other requests wait for ``request``. Once the connection is closed, methods that would send do
nothing: the peer may vanish at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final, cast

import structlog

from mldserver.base.clock import Flag
from mldserver.base.folding import Folding
from mldserver.base.secret import SecretGate
from mldserver.base.tls import ServerTLS, names_of
from mldserver.consumer.upstream import CheckpointOutcome
from mldserver.errors import DecodeError, InternalError, MldserverError, PeerError, ProtocolViolation
from mldserver.protocol import events as ev
from mldserver.protocol.connection import ConnectionLimits, MLDConnection
from mldserver.protocol.events import CloseReason, ConnectionTimer
from mldserver.protocol.messages import Initialize, Line, ProcessRecords, RequestMessage
from mldserver.protocol.states import State
from mldserver.records import Sequence
from mldserver.sources.unread import ReadBudget

log = structlog.get_logger("mldserver")


class Link(asyncio.BufferedProtocol):
    """The shell around one MLDConnection."""

    debugging = False
    """Whether the log takes everything. Of all connections at once: an operator may change it."""

    def __init__(
        self,
        name: str,
        peer: str,
        *,
        limits: ConnectionLimits,
        random: Callable[[], float],
        budget: ReadBudget,
        buffer: bytearray,
        refusals: Folding,
        tls: ServerTLS | None = None,
        secret: bytes | None = None,
    ) -> None:
        """``name`` and ``peer`` are for the log; must be made on the loop that it will live on.

        ``buffer``: received bytes are written here first; all connections of a loop may share it. ``budget``: the limit on
        unread bytes of all connections. ``tls``: which peers may stay after the handshake. ``secret``: what the peer must
        send first. ``refusals``: counts how often a host was refused for the same reason, by certificate or by secret.
        """
        self.peer = peer
        self.log = log.bind(connection=name)
        self.close_reason: CloseReason | None = None
        self.core = MLDConnection(limits, random=random)
        self._close_seconds = limits.close_timeout_seconds
        self._partial_seconds = limits.partial_line_timeout_seconds
        self.budget = budget
        self._buffer = buffer
        self._buffer_view = memoryview(buffer)
        """TLS cuts off what it has filled: of a bytearray that would be a copy."""
        self._tls = tls
        self._secret_check: SecretGate | None = SecretGate(secret)
        """Checks the secret that the peer must send before its first line; None: the peer may send lines."""
        self._refusals = refusals
        self._host = peer.rpartition(":")[0]
        self._refusal_reason = ""
        """Why the peer was refused (certificate or secret); empty: it was not."""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timers: dict[ConnectionTimer, asyncio.TimerHandle] = {}
        self._requests: list[RequestMessage | None] = []
        """Requests that ``request`` has not returned yet; a None at the end: no more will come."""
        self._request_queued = Flag()
        self.on_batch: Callable[[Line], None] = lambda _: None
        """Is called with each batch."""
        self.on_partial: Callable[[bool], None] = lambda _: None
        """Is called with True when the first part of a line has come, and with False when the line is complete."""
        Link.debugging = self.log.is_enabled_for(logging.DEBUG)
        self._checkpoint_outcome: asyncio.Future[CheckpointOutcome] | None = None
        self._initialized = False
        self._incomplete_bytes = 0
        """Bytes of the incomplete line."""
        self._bytes_in_progress = 0
        """Bytes of the batches that are being processed."""
        self._state_before: State | None = None
        self._asked_at = 0.0
        self.over = Flag()
        """Set when the protocol is over and its end is logged."""
        self._socket_closed = Flag()

    @property
    def closed(self) -> bool:
        """Whether the protocol is over."""
        return self.core.state is State.CLOSED

    # The loop's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the deadline for the peer's first message; close at once if its TLS certificate is not allowed."""
        self._transport = cast("asyncio.Transport", transport)
        certificate = transport.get_extra_info("ssl_object")
        self.peer += "".join(f" ({name})" for name in names_of(certificate)[:1])
        self.log.debug("connection.opened", peer=self.peer)
        self._write_and_dispatch()  # starts the protocol's first timer
        if self._tls is not None and (refusal := self._tls.refusal(certificate)) is not None:
            self._refuse(refusal, PROVE)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  # the loop's wish; all of it is offered
        """Return the buffer that all connections share: the loop fills it and calls ``buffer_updated`` before any other."""
        return self._buffer_view

    def buffer_updated(self, nbytes: int) -> None:
        """Pass the first ``nbytes`` bytes of the buffer to the core, without the secret, and count those of an incomplete line."""
        data: bytes | bytearray = self._buffer
        if self._secret_check is not None:
            data = self._bytes_after_secret(bytes(self._buffer_view[:nbytes]))
            nbytes = len(data)
            if not nbytes:
                return
        incomplete_bytes = self.core.receive_data(data, nbytes)
        self._write_and_dispatch()
        if incomplete_bytes or self._incomplete_bytes:
            line_began_or_ended = bool(incomplete_bytes) is not bool(self._incomplete_bytes)
            if line_began_or_ended:
                self.on_partial(bool(incomplete_bytes))
            self._incomplete_bytes = incomplete_bytes
            self.budget.set_partial(self, incomplete_bytes)

    def _bytes_after_secret(self, data: bytes) -> bytes:
        """Return the bytes that follow the secret; ``b""`` while it is incomplete. Close if the peer sends a wrong secret."""
        secret_check = self._secret_check
        if secret_check is None or self.closed:
            return b""
        rest = secret_check.feed(data)
        if secret_check.refused:
            self._refuse(secret_check.refused, SHOW)
        elif rest is not None:
            self._secret_check = None
        return rest or b""

    def _refuse(self, why: str, advice: str) -> None:
        """Close the connection of a peer without a valid certificate or secret."""
        self._refusal_reason = why
        self.close(PeerError(why, did=_CLOSED, advice=advice))

    def eof_received(self) -> bool:
        """Pass EOF on to the core, which closes. Return True so that the transport stays open until all output is written.

        With TLS return False: a TLS transport cannot stay half open, and writes its output by itself.
        """
        self.core.receive_eof()
        self._write_and_dispatch()
        return self._tls is None

    def pause_writing(self) -> None:
        """Close: the output buffer fills up only if the peer sends requests and does not read the answers."""
        error = ProtocolViolation("The peer sends requests and does not read the answers.", did=_CLOSED)
        # Later, since the loop calls this in the middle of a write.
        self._loop.call_soon(self.close, error)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # a reset is an EOF to the protocol
        """Note that nothing can be read or written any more."""
        self.core.receive_eof()
        self._write_and_dispatch()
        self.budget.forget(self, self._bytes_in_progress)
        self._socket_closed.set()

    # The budget's side.

    def pause(self) -> None:
        """Stop reading; the deadline of the line waits too, as it is not the peer who is slow."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            if (timer := self._timers.pop(ConnectionTimer.PARTIAL_LINE, None)) is not None:
                timer.cancel()

    def resume(self) -> None:
        """Read on, with a fresh deadline for the line."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            self._start_timer(ConnectionTimer.PARTIAL_LINE, self._partial_seconds)

    # The requests' and the consumer's side.

    async def request(self) -> RequestMessage | None:
        """Return the daemon's next request that is not a batch; None when no more will come."""
        while not self._requests:
            self._request_queued.clear()
            await self._request_queued.wait()
        return self._requests.pop(0)

    def checkpoint(self, position: Sequence | None) -> asyncio.Future[CheckpointOutcome]:
        """Ask the daemon for a checkpoint; the future gets its outcome, after all retries. None: at everything delivered."""
        self._checkpoint_outcome = self._loop.create_future()
        if self.closed:
            self._checkpoint_outcome.set_result(CheckpointOutcome.CLOSED)
            return self._checkpoint_outcome
        self._asked_at = self._loop.time()
        self.core.checkpoint(position)
        self._write_and_dispatch()
        return self._checkpoint_outcome

    def acknowledge(self) -> None:
        """Send the status for the outstanding request."""
        if self.core.state is not State.CLOSED:
            self.core.answer()
            self._write_and_dispatch()

    def close(self, error: MldserverError | None = None) -> None:
        """Close the connection, if it is open. ``error``: the error of this server that is the reason; None: there is none."""
        if not self.closed:
            if error is None:
                self.core.close()
            else:
                self.core.abort(error)
            self._write_and_dispatch()

    async def wait_gone(self) -> None:
        """Return when all output is written and the socket is closed. Cut the connection if the peer does not read in time."""
        try:
            async with asyncio.timeout(self._close_seconds):
                await self._socket_closed.wait()
        except TimeoutError:
            self.cut()
            await self._socket_closed.wait()

    def cut(self) -> None:
        """Close the socket at once, and drop unwritten output."""
        if not self.closed and self._transport is not None:
            # Close and log here: to the protocol, the lost socket would look as if the daemon had closed it.
            self.close()
            self.log.warning("connection.failed", reason=str(self.close_reason), peer=self.peer, what=_CUT)
        if self._transport is not None:
            self._transport.abort()

    # Between core and loop.

    def _write_and_dispatch(self) -> None:
        """Write the core's output, then deliver its requests and carry out its other events. Call it after each call of the core."""
        events = self.core.events_received()
        if self._transport is not None and not self._transport.is_closing():
            for data in self.core.data_to_send():
                self._transport.write(data)
        for event in events:
            if type(event) is ev.Request:
                if type(event.message) is not ProcessRecords:
                    self._deliver(event.message)
                elif not self.closed:  # bytes after the batch may have ended the connection
                    self.on_batch(event.message.line)
            elif type(event) is not ev.StateChanged:
                self._carry_out(event)
            else:
                self._state_before = event.from_state
                if self.debugging:
                    self.log.debug(
                        "connection.state", from_state=event.from_state, to_state=event.to_state, on=event.on
                    )

    def _carry_out(self, event: ev.Event) -> None:  # noqa: C901  # one case for each kind of event
        """Carry out an event that is neither a request nor a change of state: log it, resolve a checkpoint, set a timer."""
        match event:
            case ev.CheckpointStored(position):
                seconds = self._loop.time() - self._asked_at
                self.log.debug("checkpoint.done", sequence=str(position or _ALL), seconds=seconds)
                self._resolve(CheckpointOutcome.STORED)
            case ev.CheckpointRetrying(position, error, attempt, delay):
                self.log.warning(
                    "checkpoint.retried",
                    sequence=str(position or _ALL),
                    attempt=attempt,
                    delay_seconds=delay,
                    error=error,
                )
            case ev.CheckpointFailed(position, error, attempts):
                self.log.error(
                    "checkpoint.failed", sequence=str(position or _ALL), attempts=attempts, error=error
                )
                self._resolve(CheckpointOutcome.FAILED)
            case ev.CheckpointsStopped(position):
                self.log.warning("checkpoint.stopped", sequence=str(position or _ALL))
                self._resolve(CheckpointOutcome.STOPPED)
            case ev.ConnectionFailed(error):
                self._log_failed(error)
            case ev.OutputEnded():
                self._end_output()
            case ev.Closed(reason, cut_off):
                self._end(reason, cut_off)
            case ev.StartTimer(name, seconds):
                self._start_timer(name, seconds)
            case ev.CancelTimer(name):
                if (timer := self._timers.pop(name, None)) is not None:
                    timer.cancel()

    def _deliver(self, message: RequestMessage) -> None:
        """Queue a request that is not a batch. From ``initialize`` on, log lines name the shard."""
        if isinstance(message, Initialize):
            self._initialized = True
            self.log = self.log.bind(shard=message.shard_id)
        self._enqueue(message)

    def _enqueue(self, message: RequestMessage | None) -> None:
        """Queue a message for ``request``; None: no more will come."""
        self._requests.append(message)
        self._request_queued.set()

    @property
    def has_room(self) -> bool:
        """Whether there is memory for more unread lines."""
        return self.budget.has_room

    def hold(self, change: int) -> None:
        """Add ``change`` bytes (may be negative) to the size of the batches that are being processed."""
        self._bytes_in_progress += change
        if not self._socket_closed.up:
            self.budget.hold(change)

    def _resolve(self, outcome: CheckpointOutcome) -> None:
        if self._checkpoint_outcome is not None and not self._checkpoint_outcome.done():
            self._checkpoint_outcome.set_result(outcome)

    def _log_failed(self, error: MldserverError) -> None:
        """Log why the connection failed. Refusals of one host for the same reason are logged once a minute, with their number."""
        times = self._refusals.count((self._host, self._refusal_reason)) if self._refusal_reason else 1
        if not times:
            return
        # A warning for a peer's error before initialize: no shard is affected.
        level = "error" if self._initialized or not isinstance(error, PeerError) else "warning"
        trace = error if isinstance(error, InternalError) else None
        # The error's own fields win. By default, ``did`` says that the connection was closed.
        fields = {
            "state": str(self._state_before or self.core.state),
            "peer": self.peer,
            "did": _CLOSED,
            **({"times": times} if times > 1 else {}),
        } | error.told(_FLAT_FIELDS)
        if not self._initialized and isinstance(error, DecodeError):
            fields.setdefault("advice", _STRANGER)
        getattr(self.log, level)("connection.failed", exc_info=trace, **fields)

    def _end_output(self) -> None:
        """Half-close the connection after all written output: the daemon's bridge process exits when it reads this end."""
        if self._transport is not None and not self._transport.is_closing():
            if self._tls is not None:  # writes the remaining output first, then closes
                self._transport.close()
                return
            # OSError: the peer has reset the connection, and the loop will report that.
            with contextlib.suppress(OSError):
                self._transport.write_eof()

    def _end(self, reason: CloseReason, cut_off: int) -> None:
        """Wake all waiting tasks, and close the transport: the protocol is over. ``cut_off``: bytes of an incomplete last line."""
        self.close_reason = reason
        if reason is CloseReason.EOF_IN_REQUEST:
            self.log.warning("connection.failed", reason=str(reason), peer=self.peer, what=_MID_REQUEST)
        elif cut_off and reason in _BY_PEER:
            what = f"The peer closed inside a line; its {cut_off} bytes were dropped."
            self.log.warning("connection.failed", reason=str(reason), peer=self.peer, what=what)
        self.over.set()
        self._resolve(CheckpointOutcome.CLOSED)
        self._enqueue(None)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._transport is not None:
            self._transport.close()

    def _start_timer(self, name: ConnectionTimer, seconds: float) -> None:
        """Start a timer; one of the same name that runs is replaced."""
        if (running := self._timers.pop(name, None)) is not None:
            running.cancel()
        self._timers[name] = self._loop.call_later(seconds, self._fire, name)

    def _fire(self, name: ConnectionTimer) -> None:
        self._timers.pop(name, None)
        # While other readers wait for memory (``budget.paused``), an incomplete line gets no more time, even if bytes arrive.
        self.core.timer_fired(name, patient=not self.budget.paused)
        self._write_and_dispatch()


_BY_PEER: Final = frozenset({CloseReason.EOF, CloseReason.FINISHED})
"""The peer closed. For any other reason, a line may be incomplete only because this side stopped reading."""
_FLAT_FIELDS: Final = frozenset(
    {"error", "what", "did", "advice", "pipeline", "shard", "excerpt", "state"}
    | {"handler", "hook", "sequence", "attempts", "traceback"}
)
"""Error fields that ``connection.failed`` has as separate fields; the others are in ``where``."""
_ALL: Final = "everything delivered"
_CLOSED: Final = "The connection was closed."
_MID_REQUEST: Final = "The daemon closed while a request was being worked on; it will be delivered again."
SHOW: Final = (
    "If it is a daemon of yours, give its mldserver kcl the same --listen-secret, or its bridge the file behind the address. "
    "Its JVM exits now and starts again."
)
PROVE: Final = (
    "Find out who connects there. A daemon shows its certificate with --tls-certificate and --tls-ca."
)
_CUT: Final = "The server stops and cut the connection; what was not checkpointed will be delivered again."
_STRANGER: Final = "Find out who connects to this port: it does not speak as a MultiLangDaemon does."
