"""Events that a connection reports to its shell: frozen values, in the order in which they happened."""

from __future__ import annotations

import enum

import msgspec

from mldserver.errors import MldserverError
from mldserver.protocol.messages import RequestMessage
from mldserver.protocol.states import Input, State
from mldserver.records import Sequence


class ConnectionTimer(enum.StrEnum):
    """The time-outs of a connection; the shell runs them and reports with ``timer_fired``."""

    INITIALIZE = "initialize"
    """No ``initialize`` since the connection was made."""
    PARTIAL_LINE = "partial_line"
    """An incomplete line: from its first byte on, and again while more of it comes."""
    CHECKPOINT_RETRY = "checkpoint_retry"
    """The pause before a checkpoint is repeated."""
    CLOSE = "close"
    """The peer does not close after the last status."""


class CloseReason(enum.StrEnum):
    """Why a connection ended."""

    EOF = "eof"
    """The peer closed between requests."""
    EOF_IN_REQUEST = "eof_in_request"
    """The peer closed (or its host died) while a request was being worked on."""
    FINISHED = "finished"
    """The peer closed after the last status."""
    CLOSE_TIMEOUT = "close_timeout"
    """The peer did not close in time after the last status."""
    CLOSED = "closed"
    """Our side closed without an error, e.g. because the server stops."""
    FAILED = "failed"
    """An error, told by the ConnectionFailed event before."""


class Request(msgspec.Struct, frozen=True):
    """The daemon asks; ``answer()`` is owed."""

    message: RequestMessage


class CheckpointStored(msgspec.Struct, frozen=True):
    """The daemon stored a checkpoint."""

    position: Sequence | None
    """What was asked for; None: everything delivered."""
    attempts: int


class CheckpointRetrying(msgspec.Struct, frozen=True):
    """The daemon could not store a checkpoint; it is asked again after a pause."""

    position: Sequence | None
    error: str
    attempt: int
    """How many attempts failed so far."""
    delay_seconds: float


class CheckpointFailed(msgspec.Struct, frozen=True):
    """A checkpoint was given up for now."""

    position: Sequence | None
    error: str
    attempts: int


class CheckpointsStopped(msgspec.Struct, frozen=True):
    """The lease is gone (ShutdownException): this checkpoint and all later ones are not stored."""

    position: Sequence | None


class ConnectionFailed(msgspec.Struct, frozen=True):
    """The connection ends because of an error; Closed follows."""

    error: MldserverError


class OutputEnded(msgspec.Struct, frozen=True):
    """Nothing more will be sent: end the output once it is written (half-close), and go on reading."""


class Closed(msgspec.Struct, frozen=True):
    """The connection is over: write what is left and close."""

    reason: CloseReason
    cut_off: int = 0
    """Bytes of a last line without its end, which was dropped."""


class StartTimer(msgspec.Struct, frozen=True):
    """Start a timer, or restart it."""

    name: ConnectionTimer
    seconds: float


class CancelTimer(msgspec.Struct, frozen=True):
    """Stop a timer."""

    name: ConnectionTimer


class StateChanged(msgspec.Struct, frozen=True):
    """A transition, for the debug log."""

    from_state: State
    to_state: State
    on: Input


Event = (
    Request
    | CheckpointStored
    | CheckpointRetrying
    | CheckpointFailed
    | CheckpointsStopped
    | ConnectionFailed
    | OutputEnded
    | Closed
    | StartTimer
    | CancelTimer
    | StateChanged
)
"""Everything that ``events_received`` can return."""
