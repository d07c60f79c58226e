"""What a connection tells its shell: frozen values, in the order in which they happened."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mldserver.errors import MldserverError
    from mldserver.protocol.messages import RequestMessage
    from mldserver.protocol.states import Input, State
    from mldserver.records import Sequence

__all__ = [
    "CancelTimer",
    "CheckpointFailed",
    "CheckpointRetrying",
    "CheckpointStored",
    "CheckpointsStopped",
    "CloseReason",
    "Closed",
    "Event",
    "Failed",
    "OutputEnded",
    "Request",
    "StartTimer",
    "StateChanged",
    "Timer",
]


class Timer(enum.StrEnum):
    """The time-outs of a connection; the shell runs them and reports with ``timer_fired``."""

    INITIALIZE = "initialize"
    """No ``initialize`` since the connection was made."""
    PARTIAL_LINE = "partial_line"
    """An incomplete line, since its first byte."""
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
    """An error, told by the Failed event before."""


@dataclass(frozen=True, slots=True)
class Request:
    """The daemon asks; ``answer()`` is owed."""

    message: RequestMessage


@dataclass(frozen=True, slots=True)
class CheckpointStored:
    """The daemon stored a checkpoint."""

    position: Sequence | None
    """What was asked for; None: everything delivered."""
    attempts: int


@dataclass(frozen=True, slots=True)
class CheckpointRetrying:
    """The daemon could not store a checkpoint; it is asked again after a pause."""

    position: Sequence | None
    error: str
    attempt: int
    """How many attempts failed so far."""
    delay_seconds: float


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """A checkpoint was given up for now."""

    position: Sequence | None
    error: str
    attempts: int


@dataclass(frozen=True, slots=True)
class CheckpointsStopped:
    """The lease is gone (ShutdownException): this checkpoint and all later ones are not stored."""

    position: Sequence | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The connection ends because of an error; Closed follows."""

    error: MldserverError


@dataclass(frozen=True, slots=True)
class OutputEnded:
    """Nothing more will be sent: end the output once it is written (half-close), and go on reading."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The connection is over: write what is left and close."""

    reason: CloseReason
    cut_off: int = 0
    """Bytes of a last line without its end, which was dropped."""


@dataclass(frozen=True, slots=True)
class StartTimer:
    """Start a timer, or start it anew."""

    name: Timer
    seconds: float


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """Stop a timer."""

    name: Timer


@dataclass(frozen=True, slots=True)
class StateChanged:
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
    | Failed
    | OutputEnded
    | Closed
    | StartTimer
    | CancelTimer
    | StateChanged
)
"""Everything that ``events_received`` can return."""
