"""One connection of the daemon, without I/O: bytes and commands in, bytes and events out.

The shell feeds ``receive_data``, ``receive_eof`` and ``timer_fired``, gives commands, and after each of them takes
``data_to_send`` and ``events_received``. What may happen when stands in ``states.TABLE``; this file only carries it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

from mldserver.base.backoff import backoff
from mldserver.errors import InternalError, MldserverError, PeerError, PeerTimeout, ProtocolViolation
from mldserver.protocol import events as ev
from mldserver.protocol.codec import LineFramer, decode, encode, encode_status, excerpt
from mldserver.protocol.events import CloseReason, ConnectionTimer
from mldserver.protocol.messages import (
    CheckpointReply,
    CheckpointRequest,
    Initialize,
    LeaseLost,
    Line,
    PeerMessage,
    ProcessRecords,
    RequestMessage,
    ShardEnded,
    Shutdown,
    ShutdownReason,
    ShutdownRequested,
    Version,
)
from mldserver.protocol.states import TABLE, WORKING, Action, Input, State
from mldserver.records import Sequence

_CLOSED_IT: Final = "The connection was closed."
_DAEMON_MAY_SEND_REQUEST: Final = frozenset({State.AWAITING_INITIALIZE, State.IDLE, State.DRAINED})


CHECKPOINT_ERRORS: Final = {
    "ShutdownException": Input.GONE,
    "ThrottlingException": Input.BUSY,
    "KinesisClientLibDependencyException": Input.BUSY,
}
"""What the simple class name of the Java exception means; any other name is REFUSED."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with jitter: attempt n fails, then a pause of half to all of ``base * 2**(n-1)``."""

    attempts: int
    """In all, the first one included."""
    base_seconds: float
    cap_seconds: float

    def delay(self, failed: int, chance: float) -> float:
        """Return the pause in seconds after ``failed`` attempts; ``chance`` is from 0 to 1."""
        return backoff(failed, self.base_seconds, self.cap_seconds, chance)


BATCH_RETRIES: Final = RetryPolicy(attempts=6, base_seconds=0.25, cap_seconds=8.0)
"""Under a batch, which waits meanwhile: up to about eight seconds; the next batch is the next chance."""
END_RETRIES: Final = RetryPolicy(attempts=20, base_seconds=0.25, cap_seconds=10.0)
"""At a shard's end, where there is one chance: up to about two and a half minutes."""


CLOSE_SECONDS: Final = 5.0
"""How long a daemon may leave an ended connection open. It closes its end within milliseconds."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of one connection: bytes, seconds, attempts."""

    line_limit: int
    initialize_timeout_seconds: float
    partial_line_timeout_seconds: float = 60.0
    """A message that stops arriving for this long closes its connection. The daemon writes a message at once, so a
    pause of a minute means that its host or the network is gone."""
    close_timeout_seconds: float = CLOSE_SECONDS
    retries: RetryPolicy = BATCH_RETRIES
    end_retries: RetryPolicy = END_RETRIES


_REQUESTS: Final[dict[type[PeerMessage], tuple[Input, str]]] = {
    Initialize: (Input.INITIALIZE, "initialize"),
    ProcessRecords: (Input.PROCESS_RECORDS, "processRecords"),
    ShutdownRequested: (Input.SHUTDOWN_REQUESTED, "shutdownRequested"),
    ShardEnded: (Input.SHARD_ENDED, "shardEnded"),
    LeaseLost: (Input.LEASE_LOST, "leaseLost"),
}
_SHUTDOWNS: Final = {
    ShutdownReason.TERMINATE: Input.SHARD_ENDED,
    ShutdownReason.ZOMBIE: Input.LEASE_LOST,
    ShutdownReason.REQUESTED: Input.SHUTDOWN_REQUESTED,
}

_REASONS: Final = {
    Input.EOF: CloseReason.EOF,
    Input.CLOSE: CloseReason.CLOSED,
    Input.CLOSE_TIMEOUT: CloseReason.CLOSE_TIMEOUT,
}


class MLDConnection:
    """The child's side of the MultiLangDaemon protocol."""

    def __init__(self, limits: ConnectionLimits, *, random: Callable[[], float]) -> None:
        """Begin as just connected; ``random`` gives floats from 0 to 1, for the jitter of repeated checkpoints."""
        self._limits = limits
        self._random = random
        self._framer = LineFramer(limits.line_limit)
        self.state = State.AWAITING_INITIALIZE
        """Where the connection is; read only."""
        self._version = Version.V2
        self._request: RequestMessage | None = None
        self._response_for = ""
        self._position: Sequence | None = None
        self._attempts = 0
        self._error_name = ""
        self.checkpoints_stopped = False
        """Whether the daemon said that the lease is gone; read only."""
        self._line_bytes_at_timer_start = 0
        """Bytes of the incomplete line when its timer was started last."""
        self._timers: set[ConnectionTimer] = set()
        self._out: list[bytes] = []
        self._events: list[ev.Event] = []
        self._start(ConnectionTimer.INITIALIZE, limits.initialize_timeout_seconds)

    def data_to_send(self) -> list[bytes]:
        """Return what must be written, in order, and forget it."""
        data, self._out = self._out, []
        return data

    def events_received(self) -> list[ev.Event]:
        """Return what happened since the last call, in order."""
        happened, self._events = self._events, []
        return happened

    def receive_data(self, data: bytes | bytearray, size: int | None = None) -> int:
        """Take the first ``size`` bytes (default: all) of ``data`` from the peer; ``data`` may be used again afterwards.

        Returns how many bytes of an incomplete line are held now. Never raises: what is wrong with them ends this
        connection, with ConnectionFailed.
        """
        framer = self._framer
        lines = [] if self.state is State.CLOSED else framer.feed(data, size)
        if lines and self._timers:
            self._cancel(ConnectionTimer.PARTIAL_LINE)
        for line in lines:
            self._receive_line(line)
        # The remaining bytes are an incomplete line, or one that is too long already.
        pending = len(framer.partial)
        if self.state is State.CLOSED:
            return pending
        if framer.error is not None:
            self._apply(Input.FAULT, framer.error)
        elif pending == 0:
            if self._timers:
                self._cancel(ConnectionTimer.PARTIAL_LINE)
        elif self.state in WORKING and not framer.pending_blank:
            # The daemon must not send while its request is unanswered: nothing of an early message is buffered.
            early = f"A message began while {self._response_for} was not answered yet."
            error = ProtocolViolation(early, did=_CLOSED_IT, excerpt=excerpt(framer.partial))
            self._apply(Input.FAULT, error)
        elif ConnectionTimer.PARTIAL_LINE not in self._timers:
            self._start_line_timer()
        return pending

    def receive_eof(self) -> None:
        """Take the end of the peer's data. A line without its end is reported and dropped."""
        if self.state is not State.CLOSED:
            self._apply(Input.EOF)

    def timer_fired(self, name: ConnectionTimer, *, patient: bool = True) -> None:
        """Handle a time-out. Ignore a cancelled timer: it may have fired before the cancellation.

        An incomplete line that received bytes since its timer was started gets the time again, unless ``patient`` is
        false. So a stalled line is noticed after once to twice that time, without a timer for each piece. A peer that
        sends a byte each time may continue for long, but occupies at most ``line_limit``; the shell bounds the total
        of all peers, and passes ``patient=False`` beyond it.
        """
        if name not in self._timers:
            return
        self._timers.discard(name)
        if name == ConnectionTimer.CHECKPOINT_RETRY:
            self._apply(Input.RETRY_DUE)
        elif name == ConnectionTimer.CLOSE:
            self._apply(Input.CLOSE_TIMEOUT)
        elif name == ConnectionTimer.INITIALIZE:
            seconds = self._limits.initialize_timeout_seconds
            error = PeerTimeout(f"No initialize came within {seconds:g} seconds.", did=_CLOSED_IT)
            self._apply(Input.INITIALIZE_TIMEOUT, error)
        elif patient and len(self._framer.partial) > self._line_bytes_at_timer_start:
            self._start_line_timer()
        else:
            seconds = self._limits.partial_line_timeout_seconds
            what = f"A line was not complete, and nothing more of it came for {seconds:g} seconds."
            if len(self._framer.partial) > self._line_bytes_at_timer_start:
                what = f"A line was not complete within {seconds:g} seconds, while others waited for room in memory."
            error = PeerTimeout(what, did=_CLOSED_IT, excerpt=excerpt(self._framer.partial))
            self._apply(Input.PARTIAL_LINE_TIMEOUT, error)

    def answer(self) -> None:
        """Send the one status for the outstanding request.

        Raises InternalError when none is outstanding, or a checkpoint is, or a shard's end is not checkpointed.
        """
        self._apply(Input.ANSWER_GONE if self.checkpoints_stopped else Input.ANSWER)

    def checkpoint(self, position: Sequence | None) -> None:
        """Ask for a checkpoint at ``position``; None: at everything delivered, which at a shard's end is SHARD_END.

        After ShutdownException (the lease is lost) it sends nothing, and reports CheckpointsStopped again. V1 has no
        sub-sequences: there the caller must not ask for a position inside an aggregate. Raises InternalError in a state
        in which the daemon would refuse a checkpoint, and for a position at a shard's end.
        """
        if self.state is State.ENDING and position is not None:
            raise InternalError(f"A shard's end is checkpointed as a whole, not at {position}.")
        command = Input.CHECKPOINT_GONE if self.checkpoints_stopped else Input.CHECKPOINT
        if command in TABLE[self.state]:
            self._position, self._attempts = position, 0
        self._apply(command)

    def abort(self, error: MldserverError) -> None:
        """Close on purpose, because of an error of our own side. Raises InternalError when already closed."""
        self._apply(Input.ABORT, error)

    def close(self) -> None:
        """Close on purpose, without an error. Raises InternalError when already closed."""
        self._apply(Input.CLOSE)

    def _receive_line(self, line: Line) -> None:
        """Decode a line and apply it as an input of the state machine. An invalid line, or one out of turn, is a FAULT."""
        if self.state is State.CLOSED:  # an earlier line of the same bytes closed the connection
            return
        try:
            message = decode(line)
        except PeerError as error:
            self._apply(Input.FAULT, error)
            return
        action = ""
        if (request := _REQUESTS.get(type(message))) is not None:
            cause, action = request
        elif isinstance(message, CheckpointReply):
            cause = self._input_of_reply(message)
        else:
            cause, action = _SHUTDOWNS[cast("Shutdown", message).reason], "shutdown"
        if cause not in TABLE[self.state]:
            what = f"{cause} came while {self._response_for} was not answered yet."
            if self.state in _DAEMON_MAY_SEND_REQUEST:  # a request may come, but not this one
                what = f"{cause} came in state {self.state}, where it is not allowed."
            self._apply(Input.FAULT, ProtocolViolation(what, did=_CLOSED_IT, excerpt=excerpt(line)))
            return
        if not isinstance(message, CheckpointReply):
            self._request, self._response_for = message, action
        self._apply(cause)

    def _input_of_reply(self, reply: CheckpointReply) -> Input:
        """Return what a checkpoint's reply is to the state machine: EXHAUSTED in place of an error without attempts left."""
        if reply.error is None:
            return Input.STORED
        self._error_name = reply.error
        outcome = CHECKPOINT_ERRORS.get(reply.error, Input.REFUSED)
        row = TABLE[self.state].get(outcome)
        would_retry = row is not None and Action.RETRY_LATER in row.actions
        if would_retry and self._attempts >= self._retry_policy(self.state).attempts:
            return Input.EXHAUSTED
        return outcome

    def _retry_policy(self, state: State) -> RetryPolicy:
        """Return the retries of a checkpoint that was sent in ``state``: more at a shard's end, which has one chance."""
        return self._limits.end_retries if state is State.ENDING_CHECKPOINT else self._limits.retries

    def _start_line_timer(self) -> None:
        self._line_bytes_at_timer_start = len(self._framer.partial)
        self._start(ConnectionTimer.PARTIAL_LINE, self._limits.partial_line_timeout_seconds)

    def _apply(self, cause: Input, error: MldserverError | None = None) -> None:
        """Change the state as the table says for this input, and carry out the row's actions. Raises InternalError without a row."""
        before = self.state
        row = TABLE[before].get(cause)
        if row is None:
            raise InternalError(f"{cause} is not possible in state {before}.", state=str(before))
        self.state = row.to
        if row.to is not before:
            self._events.append(ev.StateChanged(before, row.to, cause))
        for action in row.actions:
            self._carry_out(action, before, cause, error)

    def _carry_out(self, action: Action, before: State, cause: Input, error: MldserverError | None) -> None:
        """Carry out one action of a transition. ``before``: the state that it left; ``cause``: the input that it had."""
        match action:
            case Action.DELIVER:
                message, self._request = self._request, None  # frees a batch's line, which may be large
                assert message is not None, "only a request is delivered"
                if isinstance(message, Initialize):
                    self._version = message.version
                    self._cancel(ConnectionTimer.INITIALIZE)
                self._events.append(ev.Request(message))
            case Action.SEND_STATUS:
                self._out.append(encode_status(self._response_for))
            case Action.SEND_CHECKPOINT:
                self._attempts += 1
                number = None if self._position is None else str(self._position.number)
                sub = None if self._position is None else self._position.sub
                self._out.append(encode(CheckpointRequest(number, sub, self._version)))
            case Action.END_OUTPUT:
                self._events.append(ev.OutputEnded())
                self._start(ConnectionTimer.CLOSE, self._limits.close_timeout_seconds)
            case Action.CLOSE:
                for timer in sorted(self._timers):
                    self._cancel(timer)
                reason = _REASONS.get(cause, CloseReason.FAILED)
                if reason is CloseReason.EOF and before is State.FINAL:
                    reason = CloseReason.FINISHED
                elif reason is CloseReason.EOF and before not in _DAEMON_MAY_SEND_REQUEST:
                    reason = CloseReason.EOF_IN_REQUEST
                self._events.append(ev.Closed(reason, self._framer.feed_eof()))
            case _:
                self._report_outcome(action, before, error)

    def _report_outcome(self, action: Action, before: State, error: MldserverError | None) -> None:
        """Add the event that says how a checkpoint went, or why the connection fails. ``before``: as in ``_carry_out``."""
        report = self._events.append
        match action:
            case Action.TELL_STORED:
                report(ev.CheckpointStored(self._position, self._attempts))
            case Action.TELL_STOPPED:
                self.checkpoints_stopped = True
                report(ev.CheckpointsStopped(self._position))
            case Action.TELL_FAILED:
                report(ev.CheckpointFailed(self._position, self._error_name, self._attempts))
            case Action.RETRY_LATER:
                delay = self._retry_policy(before).delay(self._attempts, self._random())
                report(ev.CheckpointRetrying(self._position, self._error_name, self._attempts, delay))
                self._start(ConnectionTimer.CHECKPOINT_RETRY, delay)
            case Action.FAIL_END:
                failed = PeerError(
                    f"The daemon could not checkpoint the shard's end: {self._error_name}, {self._attempts} times.",
                    did="The connection was closed instead of answering: a status without a checkpoint would block the "
                    "shard's children until the JVM restarts.",
                    advice="The JVM exits now; its supervisor must restart it. Look for the cause in its log.",
                )
                report(ev.ConnectionFailed(failed))
            case _:
                assert error is not None, "what fails has an error"
                report(ev.ConnectionFailed(error))

    def _start(self, name: ConnectionTimer, seconds: float) -> None:
        self._timers.add(name)
        self._events.append(ev.StartTimer(name, seconds))

    def _cancel(self, name: ConnectionTimer) -> None:
        if name in self._timers:
            self._timers.discard(name)
            self._events.append(ev.CancelTimer(name))
