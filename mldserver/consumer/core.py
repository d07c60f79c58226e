"""The consumption of one shard as a state machine: its states, and every transition between them, as data.

The rules behind the tables
---------------------------
Two things go on at a time. The *phase* says what the source waits for: it delivers one batch, or makes one request, and waits until
that is acknowledged. The *work* says what the first batch in flight waits for. A batch is in flight from its delivery until the
coordinator has accepted it and has room for more.

* Batches are accepted in the order of their delivery, each once. When one fails, no later one is accepted: the position would move
  past records that were not processed. The batches behind it are given up, and the source is closed.
* A batch is acknowledged when it is accepted and the coordinator has room. If a position is due for a checkpoint, the checkpoint
  goes first: a daemon can store one only while it waits.
* *Late*: a source that waits for longer than the deadline is acknowledged while the handler still works, because it cannot report a
  lost lease before. A throttled shard is not: the missing acknowledgement is what slows its source down.
* *Ahead*: while batches are done quickly, the next ones are acknowledged before they are done, up to a number of batches and bytes.
  The runtime works on all of them, and the outcomes are accepted in order.
* *One at a time*: if the handler keeps state (``one_at_a_time``), the runtime has one batch of the shard, and later ones wait here. The
  values that a batch leaves are absolute, so the next batch may begin only when the coordinator has accepted them.
* Nothing acknowledged early is checkpointed before it is durable. If it is given up, it is delivered again from the checkpoint.
* While no batch needs a wait, no task runs: work is ``working``. With the first batch that needs one (a handler that failed, a visitor
  at the handler, a throttled shard, a missed deadline), the shell's task takes over, until no batch is in flight: ``awaiting``.
* A shard that another connection claims is *superseded* here. What is in flight is given up, and what the source still asks for is
  acknowledged unread, since closing one connection ends the daemon's JVM with all its shards. Only an end is not acknowledged: the
  new owner alone knows what is durable.
* A stop of the server finishes what is in flight. The last batch makes all of them durable, so that its checkpoint covers them.
* At a drain, which precedes the loss of a lease, the source waits for what is in flight for one deadline. At a lost lease it does not
  wait. At the shard's end it waits as long as it takes, and the end is refused if anything was given up before.

A signal without a row in the present state is an error of the server, and leaves the state as it was.
"""

from __future__ import annotations

import enum
from typing import Any, Final, NamedTuple

import msgspec

from mldserver.errors import InternalError
from mldserver.records import Sequence

MOST_AHEAD: Final = 64
"""Batches of a shard that are acknowledged and not done; their lines are what they take of memory."""
MOST_AHEAD_BYTES: Final = 1 << 20
QUICK_MS: Final = 50
"""The next batch is acknowledged ahead if the last was done within this time."""


class Phase(enum.StrEnum):
    """What the source waits for."""

    __hash__ = str.__hash__  # an enum's own is written in Python, and each step looks rows up

    NEW = "new"
    OPENING = "opening"
    """The shard is claimed; the coordinator and the handler open it."""
    IDLE = "idle"
    """The source waits for nothing; batches that it need not wait for may be in flight."""
    WAITING = "waiting"
    """The last batch in flight is not acknowledged."""
    CHECKPOINTING = "checkpointing"
    """That batch will be acknowledged once the source has stored a checkpoint."""
    FINISHING = "finishing"
    """``waiting``, and the server stops: no batch may follow."""
    FINISHING_CHECKPOINT = "finishing_checkpoint"
    STOPPED = "stopped"
    """The server stops, and the source waits for nothing. What it still sends stays for the next start."""
    SUPERSEDED = "superseded"
    """Another connection has the shard."""
    SUPERSEDED_CHECKPOINT = "superseded_checkpoint"
    DRAINING = "draining"
    """What is in flight is finished or given up, and all that is accepted made durable."""
    DRAINING_CHECKPOINT = "draining_checkpoint"
    DRAINED = "drained"
    """Only the loss of the lease or the shard's end may follow."""
    ENDING = "ending"
    """All records of the shard are processed, and its end is made durable."""
    ENDING_CHECKPOINT = "ending_checkpoint"
    ENDED = "ended"
    LOSING = "losing"
    """The lease is lost: what is in flight is given up."""
    LOST = "lost"
    FAILED = "failed"
    """An error ended the consumption; the source is closed."""
    RELEASED = "released"


class Work(enum.StrEnum):
    """What the first batch in flight waits for."""

    __hash__ = str.__hash__  # see above

    EMPTY = "empty"
    """No batch is in flight."""
    WORKING = "working"
    """The runtime works on the batches, and reports each outcome by itself."""
    AWAITING = "awaiting"
    """The shell's task waits for the handler, or for its turn at it."""
    THROTTLED = "throttled"
    """The batch is accepted; the task waits until the coordinator has room."""
    FLUSHING = "flushing"
    """The last batch before a stop: the task waits until everything accepted is durable."""
    OVER = "over"
    """Nothing more is accepted."""


class Signal(enum.StrEnum):
    """What happens."""

    __hash__ = str.__hash__  # see above

    # To the phase.
    CLAIM = "claim"
    OPENED = "opened"
    BATCH = "batch"
    READY = "ready"
    """What the source waits for may be acknowledged."""
    READY_DUE = "ready_due"
    """Likewise, once a checkpoint was stored, or refused."""
    CHECKPOINTED = "checkpointed"
    DRAIN = "drain"
    LOSE = "lose"
    END = "end"
    STOP = "stop"
    SUPERSEDED = "superseded"
    FAILURE = "failure"
    FORGET = "forget"

    # To the work.
    SUBMIT = "submit"
    """A batch comes that the runtime may have at once."""
    FOLLOW = "follow"
    """A batch comes that the runtime may have once those before it are done."""
    QUEUE = "queue"
    """A batch comes that must wait for its turn."""
    OUTCOME = "outcome"
    """The first batch is processed."""
    AWAIT = "await"
    """The first batch needs a wait."""
    NO_ROOM = "no_room"
    FLUSH = "flush"
    NEXT = "next"
    """The first batch is done, and another is in flight."""
    LAST = "last"
    """The first batch is done, and none is in flight."""
    GIVE_UP = "give_up"


class Order(enum.Enum):
    """What the shell must do."""

    __hash__ = object.__hash__  # see above

    SUBMIT = enum.auto()
    """Begin the batch in the runtime."""
    ACCEPT = enum.auto()
    """Give the batch's outcome to the coordinator."""
    AWAIT = enum.auto()
    """Wake the task: the first batch needs a wait."""
    BEGIN = enum.auto()
    """Report to the coordinator that the work on the batch begins: it is the first now."""
    CHECKPOINT = enum.auto()
    """Ask the source for a checkpoint."""
    ACKNOWLEDGE = enum.auto()
    """Acknowledge the batch or the request that the source waits for."""
    REPORT = enum.auto()
    """Log and count the batch: it is done."""
    GIVE_UP = enum.auto()
    """Cancel everything in flight."""
    FAIL = enum.auto()
    """Close the source with the error."""
    RELEASE = enum.auto()
    """Report to the coordinator that no connection reads the shard now."""


class Move(NamedTuple):
    """One row: the state that follows, and what the shell does, in order."""

    to: Any
    orders: tuple[Order, ...] = ()


_FAILED: Final = Move(Phase.FAILED, (Order.GIVE_UP, Order.FAIL))
_RELEASED: Final = {Signal.FORGET: Move(Phase.RELEASED, (Order.GIVE_UP, Order.RELEASE))}
_RELEASED_BEFORE: Final = {Signal.FORGET: Move(Phase.RELEASED, (Order.GIVE_UP,))}
"""The coordinator knows already: the shard has ended, is lost, or is another connection's."""
_SUPERSEDED: Final = {Signal.SUPERSEDED: Move(Phase.SUPERSEDED, (Order.GIVE_UP,))}
_SUPERSEDED_WAITING: Final = {Signal.SUPERSEDED: Move(Phase.SUPERSEDED, (Order.GIVE_UP, Order.ACKNOWLEDGE))}
_SUPERSEDED_CHECKPOINT: Final = {Signal.SUPERSEDED: Move(Phase.SUPERSEDED_CHECKPOINT, (Order.GIVE_UP,))}
_OPEN: Final = {Signal.FAILURE: _FAILED, **_RELEASED}


def _waiting(waiting: Phase, checkpointing: Phase, then: Phase) -> dict[Phase, dict[Signal, Move]]:
    """Return the rows of two phases in which the source waits: before, and while it stores a checkpoint."""
    acknowledged = Move(then, (Order.ACKNOWLEDGE,))
    return {
        waiting: {
            Signal.READY: acknowledged,
            Signal.READY_DUE: Move(checkpointing, (Order.CHECKPOINT,)),
            **_SUPERSEDED_WAITING,
            **_OPEN,
        },
        checkpointing: {Signal.CHECKPOINTED: acknowledged, **_SUPERSEDED_CHECKPOINT, **_OPEN},
    }


_UNREAD: Final = Move(Phase.SUPERSEDED, (Order.ACKNOWLEDGE,))

PHASES: Final[dict[Phase, dict[Signal, Move]]] = {
    Phase.NEW: {Signal.CLAIM: Move(Phase.OPENING), Signal.FORGET: Move(Phase.RELEASED)},
    Phase.OPENING: {
        Signal.OPENED: Move(Phase.IDLE, (Order.ACKNOWLEDGE,)),
        Signal.STOP: Move(Phase.STOPPED),
        **_SUPERSEDED_WAITING,
        **_OPEN,
    },
    Phase.IDLE: {
        Signal.BATCH: Move(Phase.WAITING),
        Signal.DRAIN: Move(Phase.DRAINING),
        Signal.LOSE: Move(Phase.LOSING),
        Signal.END: Move(Phase.ENDING),
        Signal.STOP: Move(Phase.STOPPED),
        **_SUPERSEDED,
        **_OPEN,
    },
    **_waiting(Phase.WAITING, Phase.CHECKPOINTING, Phase.IDLE),
    **_waiting(Phase.FINISHING, Phase.FINISHING_CHECKPOINT, Phase.STOPPED),
    Phase.STOPPED: {
        Signal.OPENED: Move(Phase.STOPPED, (Order.ACKNOWLEDGE,)),
        Signal.BATCH: Move(Phase.STOPPED),
        **_SUPERSEDED,
        **_OPEN,
    },
    Phase.SUPERSEDED: {
        Signal.BATCH: _UNREAD,
        Signal.DRAIN: _UNREAD,
        Signal.LOSE: _UNREAD,
        Signal.END: Move(Phase.SUPERSEDED, (Order.FAIL,)),
        Signal.FAILURE: Move(Phase.SUPERSEDED, (Order.FAIL,)),
        **_RELEASED_BEFORE,
    },
    Phase.SUPERSEDED_CHECKPOINT: {
        Signal.CHECKPOINTED: _UNREAD,
        Signal.FAILURE: Move(Phase.SUPERSEDED, (Order.FAIL,)),
        **_RELEASED_BEFORE,
    },
    **_waiting(Phase.DRAINING, Phase.DRAINING_CHECKPOINT, Phase.DRAINED),
    Phase.DRAINED: {
        Signal.LOSE: Move(Phase.LOSING),
        Signal.END: Move(Phase.ENDING),
        **_SUPERSEDED,
        **_OPEN,
    },
    **_waiting(Phase.ENDING, Phase.ENDING_CHECKPOINT, Phase.ENDED),
    Phase.ENDED: _RELEASED_BEFORE,
    Phase.LOSING: {Signal.READY: Move(Phase.LOST, (Order.ACKNOWLEDGE,)), **_SUPERSEDED_WAITING, **_OPEN},
    Phase.LOST: _RELEASED_BEFORE,
    Phase.FAILED: {Signal.FAILURE: Move(Phase.FAILED), Signal.CHECKPOINTED: Move(Phase.FAILED), **_RELEASED},
    Phase.RELEASED: {Signal.CHECKPOINTED: Move(Phase.RELEASED), Signal.FORGET: Move(Phase.RELEASED)},
}
PHASES[Phase.WAITING][Signal.STOP] = Move(Phase.FINISHING)
PHASES[Phase.CHECKPOINTING][Signal.STOP] = Move(Phase.FINISHING_CHECKPOINT)
PHASES[Phase.ENDING][Signal.SUPERSEDED] = Move(Phase.SUPERSEDED, (Order.GIVE_UP, Order.FAIL))
# The end is durable: nothing is left that the new owner could do.
PHASES[Phase.ENDING_CHECKPOINT] |= {Signal.SUPERSEDED: Move(Phase.ENDING_CHECKPOINT), **_RELEASED_BEFORE}
for _phase in (
    Phase.ENDED,
    Phase.LOST,
    Phase.SUPERSEDED,
    Phase.SUPERSEDED_CHECKPOINT,
    Phase.FAILED,
    Phase.RELEASED,
):
    PHASES[_phase] = {Signal.SUPERSEDED: Move(_phase), **PHASES[_phase]}

_AWAIT: Final = Move(Work.AWAITING, (Order.AWAIT,))
_DONE: Final = {
    Signal.NEXT: Move(Work.AWAITING, (Order.BEGIN, Order.AWAIT)),
    Signal.LAST: Move(Work.EMPTY),
}
_OVER: Final = {Signal.GIVE_UP: Move(Work.OVER)}

WORK: Final[dict[Work, dict[Signal, Move]]] = {
    Work.EMPTY: {
        Signal.SUBMIT: Move(Work.WORKING, (Order.SUBMIT,)),
        Signal.QUEUE: Move(Work.AWAITING, (Order.BEGIN, Order.AWAIT)),
        **_OVER,
    },
    Work.WORKING: {
        Signal.SUBMIT: Move(Work.WORKING, (Order.SUBMIT,)),
        Signal.FOLLOW: Move(Work.WORKING),
        Signal.QUEUE: _AWAIT,
        Signal.OUTCOME: Move(Work.WORKING, (Order.ACCEPT,)),
        Signal.AWAIT: _AWAIT,
        Signal.NO_ROOM: Move(Work.THROTTLED, (Order.AWAIT,)),
        Signal.NEXT: Move(Work.WORKING, (Order.BEGIN,)),
        Signal.LAST: Move(Work.EMPTY),
        **_OVER,
    },
    Work.AWAITING: {
        Signal.QUEUE: Move(Work.AWAITING),
        Signal.NO_ROOM: Move(Work.THROTTLED),
        Signal.FLUSH: Move(Work.FLUSHING),
        **_DONE,
        **_OVER,
    },
    Work.THROTTLED: {Signal.QUEUE: Move(Work.THROTTLED), Signal.FLUSH: Move(Work.FLUSHING), **_DONE, **_OVER},
    Work.FLUSHING: {Signal.LAST: Move(Work.EMPTY), **_OVER},
    Work.OVER: {Signal.GIVE_UP: Move(Work.OVER)},
}

_OF_WORK: Final = frozenset(signal for row in WORK.values() for signal in row)
_STOPPING: Final = frozenset({Phase.FINISHING, Phase.FINISHING_CHECKPOINT, Phase.STOPPED})
_BATCH_OWED: Final = frozenset({Phase.WAITING, Phase.FINISHING})
_REQUESTS: Final = frozenset(
    phase for phase, row in PHASES.items() if {Signal.READY, Signal.CHECKPOINTED} & row.keys()
) - {Phase.FAILED, Phase.RELEASED}


# An attribute of an enum class costs four times a global: every batch comes through here.
_IDLE, _WAITING, _FINISHING = Phase.IDLE, Phase.WAITING, Phase.FINISHING
_EMPTY, _WORKING = Work.EMPTY, Work.WORKING
_BATCH, _READY, _SUBMIT, _NEXT, _LAST = Signal.BATCH, Signal.READY, Signal.SUBMIT, Signal.NEXT, Signal.LAST
_QUEUE, _FOLLOW, _OUTCOME = Signal.QUEUE, Signal.FOLLOW, Signal.OUTCOME
_REPORT: Final = Order.REPORT
_STAY: Final = Move(None)
"""Stands for a signal that is not given."""


class Stage(enum.Enum):
    """How far a batch in flight has come."""

    QUEUED = enum.auto()
    """The task must see to it."""
    FOLLOWING = enum.auto()
    """The runtime may have it once the batches before it are done."""
    SUBMITTED = enum.auto()
    """The runtime works on it, and reports the outcome."""
    PROCESSED = enum.auto()
    ACCEPTED = enum.auto()
    DONE = enum.auto()


class InFlight(msgspec.Struct, eq=False):
    """A batch from its delivery until it is done. Times are steady, in ms."""

    payload: Any
    size: int
    """Bytes, as they came; a runtime may empty a long payload once it has passed it on."""
    received_ms: int
    stage: Stage = Stage.QUEUED
    ahead: bool = False
    """Whether it may be acknowledged as soon as the runtime has it."""
    late: bool = False
    """Whether it is acknowledged because the deadline was over."""
    began: bool = False
    """Whether the coordinator knows that the work on it has begun."""
    held: bool = False
    """Whether its bytes are counted against the source's memory."""
    after: Sequence | None = None
    """The accepted position when the runtime got it."""
    begun: Any = None
    """What the runtime returned for it: a future or a coroutine."""
    outcome: Any = None
    began_ms: int = 0
    processed_ms: int = 0
    done_ms: int = 0
    checkpoint: Sequence | None = None
    """What was checkpointed before it was acknowledged."""
    stored_ms: int = 0
    """When that was stored; 0: nothing was."""


_DONE_STAGE, _SUBMITTED, _PROCESSED = Stage.DONE, Stage.SUBMITTED, Stage.PROCESSED
_QUEUED, _FOLLOWING = Stage.QUEUED, Stage.FOLLOWING


class Consumption:
    """The state of one shard's consumption. Each method is called by the shell, which then carries out ``orders``."""

    __slots__ = (
        "_early", "_one_at_a_time", "batches", "bytes", "incomplete", "orders", "owed", "phase", "quick", "work",
    )  # fmt: skip

    def __init__(self, *, early: bool = False, one_at_a_time: bool = False) -> None:
        """``early``: whether batches may be acknowledged before they are done; ``one_at_a_time``: see the rules above."""
        self._early, self._one_at_a_time = early, one_at_a_time
        self.phase, self.work = Phase.NEW, _EMPTY
        self.batches: list[InFlight] = []
        """In flight, in order."""
        self.bytes = 0
        """The sum of their sizes."""
        self.owed: InFlight | None = None
        """The batch that the source waits for."""
        self.quick = False
        """Whether the last batch that the runtime completed by itself was done quickly."""
        self.incomplete = False
        """Whether a batch was given up: none of what follows it may be accepted."""
        self.orders: list[tuple[Order, InFlight | None]] = []
        """What the shell must do, in order; it removes what it has done."""

    def __repr__(self) -> str:
        """Show the states."""
        return f"<Consumption {self.phase}, {self.work}, {len(self.batches)} in flight>"

    @property
    def owed_since_ms(self) -> int | None:
        """When the batch came that the source waits for; None if it waits for none, or a checkpoint goes first."""
        return self.owed.received_ms if self.owed is not None and self.phase in _BATCH_OWED else None

    @property
    def in_request(self) -> bool:
        """Whether the source waits for an acknowledgement, except that of the shard's opening."""
        return self.phase in _REQUESTS

    def signal(self, signal: Signal) -> None:
        """Note a signal that needs no rule beyond its row. Raises InternalError if it is not possible in this state."""
        if signal in _OF_WORK:
            self._step(None, None, signal)
        else:
            self._step(None, signal)

    def is_first(self, batch: InFlight) -> bool:
        """Whether a batch is the first in flight; not if it was given up."""
        return bool(self.batches) and self.batches[0] is batch

    # Batches.

    def deliver(self, batch: InFlight, *, free: bool = True, ahead: bool = False) -> bool:
        """Take a batch from the source; return whether it is in flight now.

        ``free``: no visitor is at the handler; ``ahead``: there is memory for more batches, and no checkpoint is due.
        """
        if self.phase is not _IDLE:
            self._step(None, _BATCH)
            return False
        by_itself = free and (self.work is _EMPTY or self.work is _WORKING)
        follows = by_itself and self._one_at_a_time and self.work is _WORKING
        self._step(batch, _BATCH, _FOLLOW if follows else _SUBMIT if by_itself else _QUEUE)
        self.batches.append(batch)
        self.bytes += batch.size
        self.owed = batch
        if follows:
            batch.stage = _FOLLOWING
            if ahead and self._is_bounded():
                self.owed = None
                self._step(batch, _READY)
        elif by_itself:
            batch.ahead = ahead and self._is_bounded()
        else:
            self.quick = False
        return True

    def submitted(self, batch: InFlight) -> None:
        """Note that the runtime works on a batch, and will report its outcome."""
        batch.stage = _SUBMITTED
        if batch.ahead:
            self.owed = None
            self._step(batch, _READY)

    def processed(self, batch: InFlight) -> None:
        """Note that the runtime has completed a batch by itself; it is accepted once it is the first."""
        batch.stage = _PROCESSED
        if self.work is _WORKING and batch is self.batches[0]:
            self._step(batch, None, _OUTCOME)

    def unfinished(self, batch: InFlight) -> None:
        """Note that a batch needs a wait: the task does what is left of it once the batch is the first."""
        was, batch.stage = batch.stage, Stage.QUEUED
        if self.work is _WORKING and (batch is self.batches[0] or was is Stage.QUEUED):
            self._await()

    def throttled(self, batch: InFlight) -> None:
        """Note that the coordinator has accepted the first batch, and has no room for more."""
        batch.stage = Stage.ACCEPTED
        self.quick = False
        self._step(batch, None, Signal.NO_ROOM)

    @property
    def must_flush(self) -> bool:
        """Whether the first batch is done only when all that is accepted is durable: it is the last before a stop."""
        return self.phase in _STOPPING and len(self.batches) == 1

    def done(self, batch: InFlight, now_ms: int, *, due: bool = False, memory: bool = False) -> None:
        """Note that the first batch is accepted, and that the coordinator has room.

        ``due``: a position is due for a checkpoint; ``memory``: there is memory for more batches in flight.
        """
        owed, by_itself = self.owed, self.work is _WORKING
        del self.batches[0]
        self.bytes -= batch.size
        batch.stage, batch.done_ms = _DONE_STAGE, now_ms
        if by_itself and batch.begun is not None:
            self.quick = self._early and now_ms - batch.received_ms < QUICK_MS
        following = _NEXT if self.batches else _LAST
        if (self.phase is not _WAITING and self.phase is not _FINISHING) or (
            owed is not batch and (due or not (memory and by_itself and self.quick and self._is_bounded()))
        ):
            self._step(batch, None, following)
        elif due:
            self.quick = False
            self._step(owed, Signal.READY_DUE, following)
            return  # it is reported with its checkpoint
        else:
            self.owed = None
            self._step(owed, _READY, following)
        self.orders.append((_REPORT, batch))
        if following is _NEXT and by_itself:
            first = self.batches[0]
            if first.stage is _PROCESSED:
                self._step(first, None, _OUTCOME)
            elif first.stage is _FOLLOWING:
                self._step(first, None, _SUBMIT)
            elif first.stage is _QUEUED:
                self._await()

    def deadline(self, *, due: bool, memory: bool) -> bool:
        """Acknowledge the batch that the source waits for, since its deadline is over; return whether that is possible."""
        owed = self.owed
        possible = self.phase in _BATCH_OWED and self.work in {_WORKING, Work.AWAITING} and memory
        if owed is None or not possible:
            return False
        owed.late = True
        if due:
            self._step(owed, Signal.READY_DUE)
        else:
            self.owed = None
            self._step(owed, _READY)
        if self.work is _WORKING:
            self._await()
        return True

    def checkpointed(self) -> None:
        """Note that the source has stored the checkpoint that it was asked for, or has refused it."""
        batch, self.owed = self.owed, None
        self._step(batch, Signal.CHECKPOINTED)
        if batch is not None and batch.stage is _DONE_STAGE and not batch.late:
            self.orders.append((_REPORT, batch))

    # Endings.

    def superseded(self) -> None:
        """Note that another connection has claimed the shard."""
        owed = self.owed
        if self.phase in _BATCH_OWED:
            self.owed = None
        self._step(owed, Signal.SUPERSEDED)

    def stop(self) -> None:
        """Note that the server stops: no batch may follow those that are in flight."""
        if Signal.STOP in PHASES[self.phase]:
            self._step(None, Signal.STOP)
            if self.work is _WORKING:
                self._await()

    def give_up(self) -> list[InFlight]:
        """Return what was in flight; none of it will be accepted, nor any batch behind it."""
        given_up, self.batches, self.bytes = self.batches, [], 0
        self.incomplete |= bool(given_up)
        self._step(None, None, Signal.GIVE_UP)
        return given_up

    def _is_bounded(self) -> bool:
        return len(self.batches) <= MOST_AHEAD and self.bytes <= MOST_AHEAD_BYTES

    def _await(self) -> None:
        self.quick = False
        self._step(self.batches[0], None, Signal.AWAIT)

    def _step(self, batch: InFlight | None, signal: Signal | None, to_work: Signal | None = None) -> None:
        """Take the row of a signal to the phase, and of one to the work; their orders are for ``batch``.

        Raises InternalError, and changes nothing, if one of the two has no row.
        """
        move = _STAY if signal is None else PHASES[self.phase].get(signal)
        of_work = _STAY if to_work is None else WORK[self.work].get(to_work)
        if move is None:
            raise self._impossible(signal, self.phase)
        if of_work is None:
            raise self._impossible(to_work, self.work)
        orders = self.orders
        if move is not _STAY:
            self.phase = move.to
            for order in move.orders:
                orders.append((order, batch))
        if of_work is not _STAY:
            self.work = of_work.to
            for order in of_work.orders:
                orders.append((order, batch))

    def _impossible(self, signal: Signal | None, state: enum.StrEnum) -> InternalError:
        return InternalError(f"{signal} is not possible while consumption is {state}.", state=repr(self))
