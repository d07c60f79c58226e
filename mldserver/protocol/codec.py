"""Bytes to lines, lines to messages, messages to lines: everything but batches, which only the handler's runtime decodes.

A line ends with LF; CRLF is accepted; blank lines are skipped (the Java skips them too, KCL 3.1.3). Each byte is
searched once for a line end, and copied once: into its line. A large line's first copy costs more than all other
steps here (page faults on new memory), so the framer makes only one.

Messages are read strictly in types and ranges, and unknown fields are passed over. ``bool`` does not count as an
integer, nor does a number beyond 64 bits (orjson reads a float). What the daemon must never see is decided here too:
exactly the known keys, in compact JSON, with one LF (an extra key makes the daemon wait for ever, KCL 3.1.3).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Final, TypeGuard

import orjson

from mldserver.errors import DecodeError, FramingError
from mldserver.protocol.messages import (
    CheckpointReply,
    CheckpointRequest,
    Initialize,
    LeaseLost,
    Line,
    PeerMessage,
    ProcessRecords,
    ShardEnded,
    Shutdown,
    ShutdownReason,
    ShutdownRequested,
    Version,
)

CONTROL_LIMIT: Final = 64 * 1024
"""Bytes of the longest line that is decoded here: every message but a batch is a few hundred bytes at most."""
_MAX_SHARD_ID: Final = 128
"""AWS limit: ShardId is 1 to 128 characters."""
_BATCH: Final = re.compile(rb'\s*\{\s*"action"\s*:\s*"processRecords"')

MAX_ARRIVAL_MS: Final = 253_370_764_799_999
"""The last millisecond of the year 9998: a datetime, and so is the end of any window around it."""
MAX_LONG: Final = 2**63 - 1
MAX_SEQUENCE_DIGITS: Final = 129
"""AWS limit: a sequence number matches ``0|([1-9]\\d{0,128})`` (Kinesis API; DynamoDB Streams: 21 to 40)."""
SENTINELS: Final = frozenset({"TRIM_HORIZON", "LATEST", "AT_TIMESTAMP", "SHARD_END"})
"""Checkpoint values that are not sequence numbers (KCL 3.1.3 SentinelCheckpoint)."""
_EXCERPT: Final = 80


class LineFramer:
    """Collects bytes, gives whole lines. Holds at most one incomplete line of at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        """Refuse lines longer than ``limit`` bytes (line end not counted, a CR is)."""
        self._limit = limit
        self.partial = bytearray()
        """The incomplete line held so far; read only, and only until more comes."""
        self.error: FramingError | None = None
        """Set once a line was too long. From then on every byte is dropped: line ends mean nothing any more."""

    @property
    def pending_blank(self) -> bool:
        """Whether the incomplete line is nothing but a little white space, such as the CR of a CRLF."""
        return len(self.partial) <= _EXCERPT and self.partial.isspace()

    def feed(self, data: bytes | bytearray, size: int | None = None) -> list[Line]:
        """Take the first ``size`` bytes of ``data`` (default: all); return the lines they complete, without their ends.

        ``data`` may be used again afterwards. Never raises: a line above the limit sets ``error``; the lines before it
        are returned.
        """
        lines: list[Line] = []
        if self.error is not None:
            return lines
        size, start = len(data) if size is None else size, 0
        if not self.partial and 1 < size <= self._limit and data.find(b"\n", 0, size) == size - 1:
            # The fast path for what comes nearly always: exactly one whole line.
            whole = bytes(memoryview(data)[: size - 1]).removesuffix(b"\r")
            return [whole] if whole and not whole.isspace() else lines
        with memoryview(data) as view:
            while (end := data.find(b"\n", start, size)) >= 0:
                if not self._within_limit(end - start, view[start:]):
                    return lines
                line: Line
                if self.partial:
                    self.partial += view[start:end]
                    # A fresh buffer each time: one huge line must not leave its memory with an idle connection.
                    line, self.partial = self.partial, bytearray()
                    if line.endswith(b"\r"):
                        del line[-1:]
                else:
                    line = bytes(view[start:end]).removesuffix(b"\r")
                if line and not line.isspace():
                    lines.append(line)
                start = end + 1
            if self._within_limit(size - start, view[start:size]):
                self.partial += view[start:size]
        return lines

    def feed_eof(self) -> int:
        """Take the end of the input: return the length of the line that was cut off, 0 when there was none.

        A line without its end is dropped: it may be any prefix of what was meant, so it is never acted upon.
        """
        cut_off = 0 if self.partial.isspace() else len(self.partial)
        self.partial = bytearray()
        return cut_off

    def _within_limit(self, more: int, rest: memoryview) -> bool:
        """Return whether the line may grow by ``more`` bytes, the first of ``rest``. If not, set ``error`` and drop the line."""
        size = len(self.partial) + more
        if size <= self._limit:
            return True
        shown = (self.partial[:_EXCERPT] + rest[: min(more, _EXCERPT)])[:_EXCERPT]
        self.error = FramingError(
            f"A line is longer than the limit of {self._limit} bytes.",
            did="The connection was closed.",
            advice="Raise the line limit if the stream's batches are really that large, or lower maxRecords.",
            excerpt=shown.decode("ascii", "replace"),
        )
        self.partial = bytearray()
        return False


def decode(line: Line) -> PeerMessage:
    """Return the message on a line.

    Raises only DecodeError, for a malformed line. A batch is recognized by its start (MLD writes ``action`` first,
    KCL 3.1.3) and passed on undecoded; ``decode_records`` verifies it.
    """
    if _BATCH.match(line):
        return ProcessRecords(line)
    if len(line) > CONTROL_LIMIT:
        raise DecodeError(
            f"A line of {len(line)} bytes is not a batch: it does not start with its action.",
            excerpt=excerpt(line),
        )
    try:
        message = orjson.loads(line)
    except orjson.JSONDecodeError as error:  # also invalid UTF-8 and nesting deeper than orjson's limit
        raise DecodeError(f"A line is not JSON: {error.msg}.", excerpt=excerpt(line)) from None
    if type(message) is not dict:
        raise DecodeError("A line is not a JSON object.", excerpt=excerpt(line))
    action = message.get("action")
    if action == "processRecords":
        return ProcessRecords(line)
    reader = _READERS.get(action) if type(action) is str else None
    if reader is None:
        raise wrong("action", action, f"one of {', '.join([*_READERS, 'processRecords'])}")
    return reader(message)


def encode(message: CheckpointRequest) -> bytes:
    """Return the line that asks for a checkpoint, LF included."""
    keys: dict[str, Any]
    if message.version is Version.V1:
        keys = {"action": "checkpoint", "checkpoint": message.sequence_number}
    else:
        keys = {
            "action": "checkpoint",
            "sequenceNumber": message.sequence_number,
            "subSequenceNumber": message.sub_sequence_number,
        }
    return orjson.dumps(keys, option=orjson.OPT_APPEND_NEWLINE)


@functools.lru_cache(maxsize=16)  # there are seven actions
def encode_status(response_for: str) -> bytes:
    """Return the line that answers an action, LF included: sent exactly once for each request."""
    keys = {"action": "status", "responseFor": response_for}
    return orjson.dumps(keys, option=orjson.OPT_APPEND_NEWLINE)


def _initialize(message: dict[str, Any]) -> Initialize:
    """Return the checked fields of ``initialize``. Without a sequence number it comes from a V1 daemon."""
    shard_id = message.get("shardId")
    if type(shard_id) is not str or not 0 < len(shard_id) <= _MAX_SHARD_ID or not shard_id.isprintable():
        raise wrong("shardId", shard_id, f"a text of 1 to {_MAX_SHARD_ID} printable characters")
    if "sequenceNumber" not in message:  # KCL < 1.7.1
        return Initialize(shard_id, Version.V1)
    start = optional_text(message, "sequenceNumber")
    if start is not None and start not in SENTINELS and not is_sequence(start):
        raise wrong("sequenceNumber", start, f"digits, null or one of {', '.join(sorted(SENTINELS))}")
    return Initialize(shard_id, Version.V2, start, optional_long(message, "subSequenceNumber"))


def _checkpoint(message: dict[str, Any]) -> CheckpointReply:
    if "error" not in message:
        # Java writes null, never omits the key: without it, a success would look like a failure.
        raise DecodeError("A checkpoint reply has no field error.")
    name = "sequenceNumber" if "sequenceNumber" in message else "checkpoint"
    return CheckpointReply(
        optional_text(message, name),
        optional_long(message, "subSequenceNumber"),
        optional_text(message, "error"),
    )


def _shutdown(message: dict[str, Any]) -> Shutdown:
    reason = message.get("reason")
    if type(reason) is not str or reason not in ShutdownReason.__members__:
        raise wrong("reason", reason, f"one of {', '.join(ShutdownReason)}")
    return Shutdown(ShutdownReason(reason))


_READERS: Final[dict[str, Callable[[dict[str, Any]], PeerMessage]]] = {
    "initialize": _initialize,
    "checkpoint": _checkpoint,
    "leaseLost": lambda _: LeaseLost(),
    "shardEnded": lambda _: ShardEnded(),
    "shutdownRequested": lambda _: ShutdownRequested(),
    "shutdown": _shutdown,
}


def excerpt(line: bytes | bytearray | memoryview) -> str:
    """Return the start of a peer's line in a form that is safe to log."""
    return bytes(line[:_EXCERPT]).decode("ascii", "backslashreplace")


def wrong(name: str, value: object, wanted: str, *, where: str = "") -> DecodeError:
    """Return the error for a field of a wrong type or range; ``where`` names the record, if any."""
    place = f"{where}.{name}" if where else name
    shown = repr(value)
    if len(shown) > _EXCERPT:
        shown = f"{shown[:_EXCERPT]}…"
    return DecodeError(f"Field {place} must be {wanted}, not {shown}.")


def is_sequence(value: object) -> TypeGuard[str]:
    """Tell whether ``value`` is a sequence number: a text of ASCII digits, within the limit."""
    return type(value) is str and value.isdigit() and value.isascii() and len(value) <= MAX_SEQUENCE_DIGITS


def optional_text(message: dict[str, Any], name: str) -> str | None:
    """Return a text, or None for null and for a missing key."""
    value = message.get(name)
    if value is None or type(value) is str:
        return value
    raise wrong(name, value, "a text or null")


def optional_long(message: dict[str, Any], name: str, *, where: str = "") -> int | None:
    """Return an integer from 0 to 2**63-1 (Java's long), or None for null and for a missing key."""
    value = message.get(name)
    if value is None or (type(value) is int and 0 <= value <= MAX_LONG):
        return value
    raise wrong(name, value, "an integer from 0 to 2**63-1, or null", where=where)
