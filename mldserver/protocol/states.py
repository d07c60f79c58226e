"""The states of one connection, and every transition between them, as data.

The rules behind the table
--------------------------
The MultiLangDaemon and its child speak in strict turns: the daemon sends one request, the child may ask for
checkpoints (one at a time, each answered), then it sends exactly one status. Whose turn it is *is* the state:

* In AWAITING_INITIALIZE, IDLE and DRAINED it is the daemon's turn.
* In INITIALIZING, PROCESSING, DRAINING, ENDING, ENDED and LOSING it is ours: a request is being worked on.
* In the ``…_CHECKPOINT`` states the daemon owes a reply, in the ``…_BACKOFF`` states we owe it a repetition.
* In FINAL our last status is on its way, and only the end of the connection is left; CLOSED is the end.

An event that a state has no row for is an error, and whose error it is depends on where the event came from: from the
peer, a ProtocolViolation that closes the connection; from our own side, an InternalError that leaves the state as it
was. So nothing can be forgotten silently: what is not written down does not happen.

Why the rows are what they are (facts of KCL 1.x to 3.5.1):

* A surplus status acknowledges the next batch unread, and a missing one stops the shard: ANSWER leaves every working
  state, and no other event does so for a state in which a second ANSWER would be legal for the same request.
* Checkpoints are refused during ``initialize`` and ``leaseLost`` (InvalidStateException): these states have no
  CHECKPOINT row.
* A checkpoint error never ends a batch: processing goes on after it. Errors that pass by themselves
  (ThrottlingException, KinesisClientLibDependencyException) are BUSY and repeated after a delay within bounds
  (EXHAUSTED ends them); REFUSED is everything else, reported, and tried again at the next chance.
* ShutdownException (GONE) says that the lease is gone: the only sign the daemon can give while a batch is
  outstanding. From then on the commands become CHECKPOINT_GONE and ANSWER_GONE: nothing is sent for the former, and
  the latter is legal even at a shard's end.
* A shard's end has one chance. A status without a stored checkpoint leaves the children of the shard blocked until
  the JVM restarts, without any report. So ENDING has no ANSWER row (ENDED, after the stored checkpoint, has), every
  error but ShutdownException is repeated, and when the attempts are exhausted the connection is closed on purpose:
  the JVM exits, its supervisor restarts it, and the shard's end is delivered again. The restart is the only cure
  there is, so it had better come at once and with a clear error.
* ``shutdownRequested`` is not the end: with a graceful hand-over ``leaseLost`` follows on the same connection while
  the JVM lives on, at SIGTERM EOF may follow. After ``leaseLost`` and ``shardEnded`` nothing can follow, and our side
  ends its output right after the status, since only that makes every kind of bridge exit.
* EOF, a fault of the peer, and our own decision to close are possible in every state but CLOSED; CLOSED has no rows,
  and what happens to a closed connection is ignored.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


class State(enum.StrEnum):
    """Whose turn it is, and in the middle of what."""

    __hash__ = str.__hash__  # an enum's own is written in Python, and each step looks four of them up

    AWAITING_INITIALIZE = "awaiting_initialize"
    INITIALIZING = "initializing"
    IDLE = "idle"
    PROCESSING = "processing"
    PROCESSING_CHECKPOINT = "processing_checkpoint"
    PROCESSING_BACKOFF = "processing_backoff"
    DRAINING = "draining"
    """``shutdownRequested``, or KCL 1.x ``shutdown`` REQUESTED."""
    DRAINING_CHECKPOINT = "draining_checkpoint"
    DRAINING_BACKOFF = "draining_backoff"
    DRAINED = "drained"
    """``leaseLost``, ``shardEnded``, ``shutdown`` or EOF may follow."""
    ENDING = "ending"
    """``shardEnded``, or KCL 1.x ``shutdown`` TERMINATE; its checkpoint is not stored yet."""
    ENDING_CHECKPOINT = "ending_checkpoint"
    ENDING_BACKOFF = "ending_backoff"
    ENDED = "ended"
    """The end is checkpointed (or the lease is gone): the status may go out."""
    LOSING = "losing"
    """``leaseLost``, or KCL 1.x ``shutdown`` ZOMBIE."""
    FINAL = "final"
    """The last status is sent and our output ended; the peer closes, or the time-out does."""
    CLOSED = "closed"


class Input(enum.StrEnum):
    """What can happen: messages and EOF from the peer, commands of our own side, time-outs."""

    __hash__ = str.__hash__  # see above

    INITIALIZE = "initialize"
    PROCESS_RECORDS = "process_records"
    SHUTDOWN_REQUESTED = "shutdown_requested"
    SHARD_ENDED = "shard_ended"
    LEASE_LOST = "lease_lost"
    STORED = "checkpoint_stored"
    GONE = "checkpoint_gone"
    BUSY = "checkpoint_busy"
    EXHAUSTED = "checkpoint_exhausted"
    REFUSED = "checkpoint_refused"
    EOF = "eof"
    FAULT = "fault"
    """The peer broke the protocol, in framing, coding or order."""

    ANSWER = "answer"
    ANSWER_GONE = "answer_gone"
    CHECKPOINT = "checkpoint"
    CHECKPOINT_GONE = "checkpoint_unsent"
    ABORT = "abort"
    CLOSE = "close"

    INITIALIZE_TIMEOUT = "initialize_timeout"
    PARTIAL_LINE_TIMEOUT = "partial_line_timeout"
    RETRY_DUE = "retry_due"
    CLOSE_TIMEOUT = "close_timeout"


class Action(enum.Enum):
    """What a transition does beside changing the state."""

    __hash__ = object.__hash__  # see above

    DELIVER = enum.auto()
    """Hand the request to our side."""
    SEND_STATUS = enum.auto()
    SEND_CHECKPOINT = enum.auto()
    TELL_STORED = enum.auto()
    TELL_STOPPED = enum.auto()
    TELL_FAILED = enum.auto()
    RETRY_LATER = enum.auto()
    FAIL = enum.auto()
    """Tell the error that came with the event."""
    FAIL_END = enum.auto()
    """Tell that the shard's end could not be checkpointed."""
    END_OUTPUT = enum.auto()
    CLOSE = enum.auto()


class Transition(NamedTuple):
    """One row: where the event leads, and what is done on the way, in order."""

    to: State
    actions: tuple[Action, ...] = ()


_CLOSED: Final = Transition(State.CLOSED, (Action.CLOSE,))
_FAILED: Final = Transition(State.CLOSED, (Action.FAIL, Action.CLOSE))
_EVERYWHERE: Final = {
    Input.EOF: _CLOSED,
    Input.CLOSE: _CLOSED,
    Input.ABORT: _FAILED,
    Input.FAULT: _FAILED,
    Input.PARTIAL_LINE_TIMEOUT: _FAILED,
}
"""Rows that every living state has."""


def _answered(to: State, *more: Action) -> dict[Input, Transition]:
    """Return the rows for our side's answer to the request, with and without a lease: the status is sent in both cases."""
    row = Transition(to, (Action.SEND_STATUS, *more))
    return {Input.ANSWER: row, Input.ANSWER_GONE: row}


def _checkpointing(
    working: State, outstanding: State, backing_off: State, answered: State
) -> dict[State, dict[Input, Transition]]:
    """Return the rows of a request's states: being worked on, its checkpoint waits for the reply, or for the next attempt.

    A checkpoint that fails leads back to ``working``: the next one covers it. ``answered``: the state after the status.
    """
    ask = Transition(outstanding, (Action.SEND_CHECKPOINT,))
    return {
        working: {
            **_answered(answered),
            Input.CHECKPOINT: ask,
            Input.CHECKPOINT_GONE: Transition(working, (Action.TELL_STOPPED,)),
        },
        outstanding: {
            Input.STORED: Transition(working, (Action.TELL_STORED,)),
            Input.GONE: Transition(working, (Action.TELL_STOPPED,)),
            Input.BUSY: Transition(backing_off, (Action.RETRY_LATER,)),
            Input.EXHAUSTED: Transition(working, (Action.TELL_FAILED,)),
            Input.REFUSED: Transition(working, (Action.TELL_FAILED,)),
        },
        backing_off: {Input.RETRY_DUE: Transition(outstanding, (Action.SEND_CHECKPOINT,))},
    }


_LAST_REQUESTS: Final = {
    Input.SHARD_ENDED: Transition(State.ENDING, (Action.DELIVER,)),
    Input.LEASE_LOST: Transition(State.LOSING, (Action.DELIVER,)),
}

_ROWS: Final[dict[State, dict[Input, Transition]]] = {
    State.AWAITING_INITIALIZE: {
        Input.INITIALIZE: Transition(State.INITIALIZING, (Action.DELIVER,)),
        Input.INITIALIZE_TIMEOUT: _FAILED,
    },
    State.INITIALIZING: _answered(State.IDLE),
    State.IDLE: {
        Input.PROCESS_RECORDS: Transition(State.PROCESSING, (Action.DELIVER,)),
        Input.SHUTDOWN_REQUESTED: Transition(State.DRAINING, (Action.DELIVER,)),
        **_LAST_REQUESTS,
    },
    **_checkpointing(
        State.PROCESSING, State.PROCESSING_CHECKPOINT, State.PROCESSING_BACKOFF, answered=State.IDLE
    ),
    **_checkpointing(
        State.DRAINING, State.DRAINING_CHECKPOINT, State.DRAINING_BACKOFF, answered=State.DRAINED
    ),
    State.DRAINED: _LAST_REQUESTS,
    State.ENDING: {
        Input.ANSWER_GONE: Transition(State.FINAL, (Action.SEND_STATUS, Action.END_OUTPUT)),
        Input.CHECKPOINT: Transition(State.ENDING_CHECKPOINT, (Action.SEND_CHECKPOINT,)),
        Input.CHECKPOINT_GONE: Transition(State.ENDED, (Action.TELL_STOPPED,)),
    },
    State.ENDING_CHECKPOINT: {
        Input.STORED: Transition(State.ENDED, (Action.TELL_STORED,)),
        Input.GONE: Transition(State.ENDED, (Action.TELL_STOPPED,)),
        Input.BUSY: Transition(State.ENDING_BACKOFF, (Action.RETRY_LATER,)),
        Input.REFUSED: Transition(State.ENDING_BACKOFF, (Action.RETRY_LATER,)),
        Input.EXHAUSTED: Transition(State.CLOSED, (Action.TELL_FAILED, Action.FAIL_END, Action.CLOSE)),
    },
    State.ENDING_BACKOFF: {
        Input.RETRY_DUE: Transition(State.ENDING_CHECKPOINT, (Action.SEND_CHECKPOINT,)),
    },
    State.ENDED: _answered(State.FINAL, Action.END_OUTPUT),
    State.LOSING: _answered(State.FINAL, Action.END_OUTPUT),
    State.FINAL: {Input.CLOSE_TIMEOUT: _CLOSED},
    State.CLOSED: {},
}

TABLE: Final[dict[State, dict[Input, Transition]]] = {
    state: {**_EVERYWHERE, **rows} if rows else {} for state, rows in _ROWS.items()
}
"""``TABLE[state][input]``; a missing key is the error."""

WORKING: Final = frozenset(
    {
        State.INITIALIZING,
        State.PROCESSING,
        State.PROCESSING_BACKOFF,
        State.DRAINING,
        State.DRAINING_BACKOFF,
        State.ENDING,
        State.ENDING_BACKOFF,
        State.ENDED,
        State.LOSING,
        State.FINAL,
    }
)
"""States in which the daemon has nothing to say: the first byte of a line is already out of turn."""
