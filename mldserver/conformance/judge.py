"""Judges a child's lines by what each does to a real daemon. No I/O.

Lines are read as the Java reads them. A mistake that does harm there is a fault: the daemon waits for ever, its JVM exits
with every shard of the host, records are acknowledged unread, or a shard's children are blocked. Any other mistake is a
remark.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from mldserver.conformance.cases import Ask, Want
from mldserver.testing.daemon import (
    AskCheckpoint,
    Form,
    Ignored,
    NullMessage,
    Unreadable,
    checkpoint_reply,
    read_reply,
)
from mldserver.testing.fake_stream import (
    SHARD_END,
    TRIM_HORIZON,
    CheckpointRange,
    JavaThrow,
    Place,
    WorkerMistake,
)

ENDLESS: Final = 60
"""A child that asks for more checkpoints than this in one request will not stop."""
AT_ONCE_SECONDS: Final = 0.01
"""A child that repeats a throttled checkpoint sooner than this did not wait."""

_MOST_REMARKS: Final = 1000
_TRANSIENT_ERRORS: Final = frozenset({"ThrottlingException", "KinesisClientLibDependencyException"})
_GONE: Final = "ShutdownException"


class Judge:
    """Judges the lines that a child writes on one connection to a daemon of generation ``form``.

    ``faults`` and ``remarks`` are sentences without their subject, the child.
    """

    def __init__(self, form: Form) -> None:
        self._form = form
        self.faults: list[str] = []
        self.remarks: list[str] = []
        self.asking: Ask | None = None
        """The request that is not answered yet; None between two requests."""
        self.asked = 0
        """Checkpoints asked for since the request."""
        self.skipped = ""
        """The last line that the daemon could not read, and why; it explains a daemon that waits for ever."""
        self.replying = False
        """Whether the daemon is about to reply to a checkpoint: the child must not write meanwhile."""
        self._replies: deque[str | bytes | None] = deque()
        """The case's replies to the next checkpoints: None for success, an error's name, or raw bytes."""
        self._delivered: set[tuple[str, int]] = set()
        """Sequence and sub-sequence numbers of all delivered records."""
        self._lease_gone = False
        """Whether the child has received ``ShutdownException``."""
        self._throttled_at: float | None = None
        """When the last checkpoint failed with a transient error; None if it did not."""
        self._error: str | None = None
        """The error that the case plans for the current checkpoint; None for success."""
        self._start = TRIM_HORIZON
        self.checkpointer = CheckpointRange(TRIM_HORIZON, self._store)

    def begin_request(self, request: Ask) -> None:
        """Note a request that the daemon sends: what the child may answer, and which records it may checkpoint."""
        self.asking, self.asked, self.skipped = request, 0, ""
        self._replies = deque(request.replies)
        self._throttled_at = None
        if request.start is not None:
            self._start = request.start
            self.checkpointer = CheckpointRange(request.start, self._store)
        for place in request.places:
            self.checkpointer.delivered(place)
            self._delivered.add((place.number.lstrip("0"), place.sub))
        if request.ends:
            self.checkpointer.reach_end()

    def receive_line(self, text: str, now: float) -> bytes | None:
        """Judge a line; return the daemon's reply if the line asks for a checkpoint, else None. ``now``: steady seconds."""
        reply = read_reply(self._form, text)
        shown = text if len(text) <= 100 else f"{text[:100]}…"  # noqa: PLR2004  # as much as a report has room for
        if isinstance(reply, Ignored):
            return None
        if isinstance(reply, Unreadable):
            self.skipped = f"{shown!r} is skipped: {reply.why}"
            self.remarks.append(f"wrote a line that the daemon skips ({reply.why}): {shown!r}")
            if len(self.remarks) > _MOST_REMARKS:
                self._fault("wrote nothing but lines that the daemon skips: it waits for ever")
        elif isinstance(reply, NullMessage):
            self._fault("wrote a literal null: the JVM exits")
            self.asking = None
        elif self.replying:
            self._fault(f"wrote a line before the daemon had replied to its checkpoint: {shown!r}")
        elif self.asking is None:
            self._fault(f"wrote a line that answers no request: it is taken for the next answer: {shown!r}")
        else:
            if reply.unread_rest:
                self._fault(f"wrote two messages on a line: the second is lost: {shown!r}")
            if isinstance(reply, AskCheckpoint):
                return self._checkpoint(self.asking, reply, now)
            self._status(self.asking, reply.response_for)
        return None

    def _fault(self, what: str) -> None:
        """Record a harmful mistake. After a request that no daemon sends, a mistake does no harm: it is a remark."""
        refusable = self.asking is not None and self.asking.want is Want.REFUSAL
        (self.remarks if refusable else self.faults).append(what)

    def _status(self, request: Ask, response_for: str | None) -> None:
        """Judge a status, which ends the request. ``response_for``: the action that the status names."""
        self.asking = None
        if request.want is Want.REFUSAL:
            self.remarks.append("answered what no daemon sends")
        elif request.want is Want.NO_STATUS:
            self._fault(f"answered {request.action} though its checkpoint was never stored")
        elif response_for != request.action:
            self._fault(f"answered {response_for}, not {request.action}: the JVM exits")
        elif request.ends and self.checkpointer.last != SHARD_END and not self._lease_gone:
            self._fault("answered the shard's end without its checkpoint stored: its children are blocked")
        elif request.covers and self.checkpointer.last != self.checkpointer.largest:
            behind = f"{self.checkpointer.last} of {self.checkpointer.largest}"
            self._fault(f"answered {request.action} with {behind} checkpointed: the rest is delivered again")

    def _checkpoint(self, request: Ask, asked: AskCheckpoint, now: float) -> bytes:
        """Judge and carry out a request for a checkpoint; return the daemon's reply."""
        self.asked += 1
        if self.asked > ENDLESS:
            self._fault(f"asked for more than {ENDLESS} checkpoints under one request")
            self.asking = None
        if self._lease_gone:
            self.remarks.append(f"asked for a checkpoint after {_GONE}: the lease is gone")
        if self._throttled_at is not None and now - self._throttled_at < AT_ONCE_SECONDS:
            self.remarks.append("asked again at once for a checkpoint that was throttled")
        planned_reply = self._replies.popleft() if self._replies else None
        if self._lease_gone:
            self._error = _GONE
        else:
            self._error = planned_reply if isinstance(planned_reply, str) else None
        error = self._store_checkpoint(request, asked)
        self._lease_gone |= error == _GONE
        self._throttled_at = now if error in _TRANSIENT_ERRORS else None
        if isinstance(planned_reply, bytes):
            return planned_reply
        return checkpoint_reply(self._form, asked.number, asked.sub, error)

    def _store_checkpoint(self, request: Ask, asked: AskCheckpoint) -> str | None:
        """Store a checkpoint as the Java does, and judge its place. Return the error's simple name; None for success."""
        if not request.checkpointable:
            self.remarks.append(
                f"asked for a checkpoint while answering {request.action}, where none is allowed"
            )
            return "InvalidStateException"
        number, sub = asked.number, asked.sub or 0
        if number is not None and number not in {self._start.number, "TRIM_HORIZON", "SHARD_END"}:
            place = number if not sub else f"{number}/{sub}"
            if (number.lstrip("0"), sub) not in self._delivered:
                self._fault(f"asked for a checkpoint at {place}, which was never delivered")
        stored_before = self.checkpointer.last
        try:
            self.checkpointer.checkpoint(asked.number, asked.sub)
        except WorkerMistake as mistake:
            self.remarks.append(f"asked for a checkpoint that cannot be: {mistake}")
            return mistake.simple_name
        except JavaThrow as thrown:
            return thrown.simple_name
        # The Java does not store the same place again, so ``_store`` was not called. The planned error counts all the same.
        return self._error if stored_before == self.checkpointer.last else None

    def _store(self, _place: Place) -> None:
        """Raise the planned error, if any. The checkpointer calls this for each new place."""
        if self._error is not None:
            raise JavaThrow(self._error, "so the case has it")
