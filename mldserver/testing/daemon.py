"""The MultiLangDaemon's side of one shard's conversation, without I/O, as strict and as silent as the Java.

The worker asks for a message (``initialize()``, ``process_records()`` …) and gets the line to send; what the server
writes back goes into ``receive_data``; ``data_to_send`` returns the answers to its checkpoints. The Java reads only
while a request is unanswered, so lines that come too early wait in its buffer and are taken for the answer to the
next request: that is how a surplus status acknowledges a batch that the server did not process.

Three things can go wrong, and the difference matters when you debug a server:

* A line that the Java cannot read is skipped and the Java goes on waiting: ``hang`` has the line and the reason.
* A wrong or missing answer makes the process exit, with every shard in it: ``JvmExit`` is raised.
* What goes through but is a mistake all the same is in ``violations``.

What the Java writes, and how it reads what it is sent, are JSON lines in the forms of three generations. They are written
from the facts about the MultiLangDaemon and from captures, on purpose without ``mldserver.protocol``: this must be able to
catch that code's mistakes.
"""

from __future__ import annotations

import base64
import codecs
import enum
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mldserver.testing.fake_stream import (
    SHARD_END,
    CheckpointRange,
    JavaThrow,
    Place,
    StreamRecord,
    WorkerMistake,
)


class Form(enum.StrEnum):
    """Which generation of the daemon speaks."""

    V1 = "v1"
    """KCL < 1.7.1: the old checkpoint form, KPL aggregates undone by the worker."""
    V2 = "v2"
    """KCL 1.7.1 to 1.x: sub-sequences and arrival times, the ending is ``shutdown`` with a reason."""
    KCL3 = "kcl3"
    """KCL 2 and 3: V2 messages with ``leaseLost`` and ``shardEnded``."""


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def checkpoint_reply(form: Form, number: str | None, sub: int | None, error: str | None) -> bytes:
    """Return the line that answers a checkpoint request. ``error``: a Java exception's simple class name; None: it is stored."""
    if form is Form.V1:
        return _line({"action": "checkpoint", "checkpoint": number, "error": error})
    return _line({"action": "checkpoint", "sequenceNumber": number, "subSequenceNumber": sub, "error": error})


@dataclass(frozen=True, slots=True)
class StatusReply:
    """The server's answer to a request."""

    response_for: str | None
    unread_rest: str = ""
    """The text after the message on the same line: the Java never reads it."""


@dataclass(frozen=True, slots=True)
class AskCheckpoint:
    """The server's request to store a checkpoint, at a sequence number (``number``) and sub-sequence number (``sub``).

    If ``number`` is None, the checkpoint covers every delivered record.
    """

    number: str | None
    sub: int | None
    unread_rest: str = ""
    """As in ``StatusReply``."""


@dataclass(frozen=True, slots=True)
class NullMessage:
    """A literal ``null``."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line that the Java skips, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """An empty line: the Java skips it silently."""


Reply = StatusReply | AskCheckpoint | NullMessage | Unreadable | Ignored

_KEYS: Final = {
    Form.V1: {"status": {"responseFor"}, "checkpoint": {"checkpoint", "error"}},
    Form.V2: {"status": {"responseFor"}, "checkpoint": {"sequenceNumber", "subSequenceNumber", "error"}},
}
"""The properties that the Java classes have. Jackson refuses any other key; case matters."""


def read_reply(form: Form, line: str) -> Reply:
    """Return what one line from the server says to the Java, which parses it with Jackson.

    Only the first JSON value of a line counts. A message with an unknown property is unreadable.
    """
    text = line.strip(" \t\r\n\x0b\x0c")
    if not text:
        return Ignored()
    try:
        value, end = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode(text)
    except (ValueError, RecursionError) as error:
        return Unreadable(f"not JSON ({error})")
    if value is None:
        return NullMessage()
    return _read_message(form, value, text[end:].strip())


def _read_message(form: Form, value: Any, unread_rest: str) -> Reply:
    """Return the message that a JSON value means: a status or a checkpoint, else ``Unreadable`` with the reason.

    ``unread_rest`` is the text after the value on its line. The value loses its ``action``.
    """
    if not isinstance(value, dict):
        return Unreadable("not a JSON object")
    action = value.pop("action", None)
    keys_of_actions = _KEYS[Form.V1 if form is Form.V1 else Form.V2]  # KCL 3 has the keys of V2
    known_keys = keys_of_actions.get(action) if isinstance(action, str) else None
    if known_keys is None:
        return Unreadable(f"action {action!r} is none that a worker may send")
    if unknown := sorted(value.keys() - known_keys):
        return Unreadable(f"{action} has no property {', '.join(unknown)} in form {form.value}")
    if action == "status":
        response_for = value.get("responseFor")
        return StatusReply(response_for if isinstance(response_for, str) else None, unread_rest)
    # The action is "checkpoint": ``_KEYS`` has no other.
    number = value.get("checkpoint" if form is Form.V1 else "sequenceNumber")
    sub = value.get("subSequenceNumber")
    # A Python bool is an int, JSON's is not.
    sub_is_integer = isinstance(sub, int) and not isinstance(sub, bool)
    if not isinstance(number, str | None) or not (sub is None or sub_is_integer):
        return Unreadable("a sequence number is text, a sub-sequence number an integer")
    return AskCheckpoint(number, sub, unread_rest)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_MAY_CHECKPOINT: Final = frozenset({"processRecords", "shutdownRequested", "shardEnded", "shutdown"})
_FINAL: Final = frozenset({"leaseLost", "shardEnded", "shutdown"})
_GOING_ON: Final = _FINAL | {"processRecords", "shutdownRequested"}
_AFTER: Final = {
    None: frozenset({"initialize"}),
    "initialize": _GOING_ON,
    "processRecords": _GOING_ON,
    "shutdownRequested": _FINAL,
}
"""Which request may follow which (KCL life cycle); nothing follows an ending."""


class JvmExit(Exception):
    """The Java calls System.exit: every shard of the host goes down with this one."""

    def __init__(self, reason: str, line: str | None = None) -> None:
        super().__init__(reason if line is None else f"{reason}: {line!r}")
        self.reason = reason
        self.line = line


class NoServer(JvmExit):
    """No server listens at the address."""


class Misuse(Exception):
    """The test asked the fake daemon for something that no real daemon does."""


@dataclass(frozen=True, slots=True)
class Hang:
    """The daemon skipped a line and waits, without a time limit, for one that it understands."""

    reason: str
    line: str
    waiting_for: str


class DaemonProtocol:
    """The daemon's side of the protocol, for one shard."""

    def __init__(
        self,
        shard_id: str,
        *,
        form: Form,
        start: Place,
        store: Callable[[Place], None] = lambda _place: None,
        on_line: Callable[[str, str], None] | None = None,
    ) -> None:
        """Serve ``shard_id`` from its checkpoint ``start``.

        ``store`` raises JavaThrow to refuse a checkpoint. ``on_line`` sees every line, with ``"in"`` for lines to the
        server and ``"out"`` for lines from the server.
        """
        self.shard_id = shard_id
        self.form = form
        self.checkpointer = CheckpointRange(start, store)
        self.outstanding: str | None = None
        """The action whose status is awaited."""
        self.last_answered: str | None = None
        self.hang: Hang | None = None
        self.violations: list[str] = []
        self.end_blocked = False
        """``shardEnded`` was answered without its checkpoint: the children will not start (KCL 2 and later)."""
        self._start = start
        self._on_line = on_line
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial: list[str] = []
        self._lines: deque[str] = deque()
        self._out = bytearray()
        self._reason: str | None = None
        self._lease_gone = False

    @property
    def finished(self) -> bool:
        """Whether the ending was answered: the daemon closes its side now."""
        return self.outstanding is None and self.last_answered in _FINAL

    def initialize(self) -> None:
        """Send ``initialize``."""
        place = {"sequenceNumber": self._start.number, "subSequenceNumber": self._start.sub}
        self._request("initialize", shardId=self.shard_id, **({} if self.form is Form.V1 else place))

    def process_records(self, records: Sequence[StreamRecord], millis_behind: int | None = None) -> None:
        """Send a batch (``processRecords``). ``millis_behind``: its distance to the newest record, which V1 does not send."""
        entries = []
        for record in records:
            self.checkpointer.delivered(Place(record.sequence_number, record.sub_sequence_number))
            entry: dict[str, Any] = {
                "data": None if record.data is None else base64.b64encode(record.data).decode(),
                "partitionKey": record.partition_key,
                "sequenceNumber": record.sequence_number,
            }
            if self.form is not Form.V1:
                # KCL 1.x has sub-sequences for KPL records only; KCL 2 and 3 give plain records the number 0.
                has_sub = record.aggregated or self.form is Form.KCL3
                entry["approximateArrivalTimestamp"] = record.arrival_ms
                entry["subSequenceNumber"] = record.sub_sequence_number if has_sub else None
                entry["action"] = "record"
            entries.append(entry)
        lag = {} if self.form is Form.V1 else {"millisBehindLatest": millis_behind}
        self._request("processRecords", records=entries, **lag)

    def shutdown_requested(self) -> None:
        """Send ``shutdownRequested``: one last chance to checkpoint (KCL 1.7.6 and later)."""
        if self.form is Form.V1:
            raise Misuse("KCL < 1.7.6 knows no shutdownRequested")
        self._request("shutdownRequested")

    def lease_lost(self) -> None:
        """Report that the lease is lost: ``leaseLost``, or ``shutdown`` with ``ZOMBIE`` in KCL 1.x."""
        self._end("leaseLost", "ZOMBIE")

    def shard_ended(self) -> None:
        """Report that the shard was read to its end: ``shardEnded``, or ``shutdown`` with ``TERMINATE`` in KCL 1.x."""
        self.checkpointer.reach_end()
        self._end("shardEnded", "TERMINATE")

    def data_to_send(self) -> bytes:
        """Return the bytes for the server: the request, or answers to checkpoints."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def receive_data(self, data: bytes) -> None:
        """Process bytes from the server, in pieces of any size: collect lines, and read those that answer the request.

        Record a violation for a line that comes while no request is unanswered. Raises JvmExit for a wrong answer.
        """
        # Java's BufferedReader ends a line at CR, LF or both; decoding replaces what is not UTF-8.
        text = self._decoder.decode(data).replace("\r\n", "\n").replace("\r", "\n")
        end_of_line, *next_lines = text.split("\n")
        self._partial.append(end_of_line)
        for start_of_line in next_lines:
            self._lines.append("".join(self._partial))
            self._partial = [start_of_line]
            if self._on_line is not None:
                self._on_line("out", self._lines[-1])
            if self.outstanding is None:
                self._report_early_line("a line that answers no request", self._lines[-1])
        self._read()

    def receive_eof(self) -> None:
        """Process the end of the server's output. Raises JvmExit while an answer is awaited, or if the shard is not finished."""
        if not self.finished:
            awaited = f"waiting for the answer to {self.outstanding}"
            raise self._exit(f"EOF while {awaited if self.outstanding else 'between two requests'}")

    def _end(self, action: str, reason: str) -> None:
        """Send the last request: ``action`` in KCL 2 and 3, ``shutdown`` with ``reason`` in KCL 1.x."""
        self._reason = reason
        if self.form is Form.KCL3:
            self._request(action)
        else:
            self._request("shutdown", reason=reason)

    def _request(self, action: str, **fields: object) -> None:
        """Queue a request for ``data_to_send``, and read lines that came too early as its answer, as the Java does. Raises Misuse."""
        if self.outstanding is not None:
            raise Misuse(
                f"{action} while waiting for the answer to {self.outstanding}: the daemon never pipelines"
            )
        if action not in _AFTER.get(self.last_answered, frozenset()):
            raise Misuse(f"{action} cannot follow {self.last_answered}")
        self.outstanding = action
        self._send(_line({"action": action, **fields}))
        self._read()

    def _report_early_line(self, what: str, line: str) -> None:
        """Record a violation for a line that came before its request, unless the line is empty."""
        if not isinstance(read_reply(self.form, line), Ignored):
            self._violation(f"{what}; the daemon takes it for the next answer", line)

    def _read(self) -> None:
        """Process received lines until the request is answered; others wait for the next request. Raises JvmExit."""
        while self._lines and self.outstanding is not None:
            line = self._lines.popleft()
            match read_reply(self.form, line):
                case Ignored():
                    pass
                case Unreadable(why):
                    self.hang = Hang(why, line, self.outstanding)
                    self._violation(f"the daemon skips the line and waits for ever: {why}", line)
                case NullMessage():
                    raise self._exit("a literal null instead of a message", line)
                case StatusReply() | AskCheckpoint() as reply:
                    self.hang = None
                    if reply.unread_rest:
                        self.hang = Hang("the second message on a line is lost", line, self.outstanding)
                        self._violation("two messages on a line: the daemon never sees the second", line)
                    if isinstance(reply, AskCheckpoint):
                        self._checkpoint(line, reply.number, reply.sub)
                    else:
                        self._status(line, reply.response_for)

    def _status(self, line: str, response_for: str | None) -> None:
        """End the outstanding request with the server's status. Raises JvmExit if the status names another action."""
        if response_for != self.outstanding:
            raise self._exit(f"a status for {response_for}, {self.outstanding} was awaited", line)
        shard_ended = self.outstanding == "shardEnded" or self._reason == "TERMINATE"
        if shard_ended and self.checkpointer.last != SHARD_END and not self._lease_gone:
            self.end_blocked = True
            self._violation(
                "the shard's end was answered without its checkpoint: its children are blocked", line
            )
        self.last_answered = self.outstanding
        self.outstanding = None
        self.hang = None
        for early in self._lines:
            self._report_early_line("a line behind the status", early)

    def _checkpoint(self, line: str, number: str | None, sub: int | None) -> None:
        """Store a checkpoint and reply; if it cannot be stored, reply with the error and go on, as the Java does."""
        error: str | None = None
        try:
            if self.outstanding not in _MAY_CHECKPOINT:
                # The server gets the same error as from the checkpointer itself.
                raise WorkerMistake(
                    "InvalidStateException", f"no checkpoint while answering {self.outstanding}"
                )
            self.checkpointer.checkpoint(number, sub)
        except JavaThrow as thrown:
            error = thrown.simple_name
            self._lease_gone |= error == "ShutdownException"
            if isinstance(thrown, WorkerMistake):
                self._violation(f"a checkpoint that cannot be: {thrown}", line)
        self._send(checkpoint_reply(self.form, number, sub, error))

    def _send(self, line: bytes) -> None:
        self._out += line
        if self._on_line is not None:
            self._on_line("in", line.decode().removesuffix("\n"))

    def _violation(self, reason: str, line: str) -> None:
        self.violations.append(f"{self.shard_id}: {reason}: {line!r}")

    def _exit(self, reason: str, line: str | None = None) -> JvmExit:
        """Record the violation that makes the JVM exit, and return the exception to raise."""
        self.violations.append(f"{self.shard_id}: the JVM exits: {reason}" + (f": {line!r}" if line else ""))
        return JvmExit(reason, line)
