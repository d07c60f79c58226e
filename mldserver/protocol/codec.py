"""Lines to messages, messages to lines: everything but batches, which only the handler's runtime decodes.

Strict about types and ranges, deaf to unknown fields. What the daemon must never see is decided here too: exactly
the known keys, in compact JSON, with one LF (an extra key makes the daemon wait for ever, KCL 3.1.3).
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Final

import orjson

from mldserver.errors import DecodeError
from mldserver.protocol.fields import excerpt, optional_long, optional_text, start_position, wrong
from mldserver.protocol.messages import (
    CheckpointReply,
    Initialize,
    LeaseLost,
    PeerMessage,
    ProcessRecords,
    ShardEnded,
    Shutdown,
    ShutdownReason,
    ShutdownRequested,
    Version,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from mldserver.protocol.messages import CheckpointRequest, Line

CONTROL_LIMIT: Final = 64 * 1024
"""Bytes of the longest line that is decoded here: every message but a batch is a few hundred bytes at most."""
_MAX_SHARD_ID: Final = 128
"""AWS limit: ShardId is 1 to 128 characters."""
_BATCH: Final = re.compile(rb'\s*\{\s*"action"\s*:\s*"processRecords"')


def decode(line: Line) -> PeerMessage:
    """Return the message on a line. Raises DecodeError, and nothing else, for what is none.

    A batch is told by its start (MLD writes ``action`` first, KCL 3.1.3) and passed on as it came; ``decode_records``
    finds out whether it is one.
    """
    if _BATCH.match(line):
        return ProcessRecords(line)
    if len(line) > CONTROL_LIMIT:
        raise DecodeError(
            f"A line of {len(line)} bytes is no batch: it does not start with its action.",
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
    shard_id = message.get("shardId")
    if type(shard_id) is not str or not 0 < len(shard_id) <= _MAX_SHARD_ID or not shard_id.isprintable():
        raise wrong("shardId", shard_id, f"a text of 1 to {_MAX_SHARD_ID} printable characters")
    if "sequenceNumber" not in message:  # KCL < 1.7.1
        return Initialize(shard_id, Version.V1)
    return Initialize(
        shard_id,
        Version.V2,
        start_position(message, "sequenceNumber"),
        optional_long(message, "subSequenceNumber"),
    )


def _checkpoint(message: dict[str, Any]) -> CheckpointReply:
    if "error" not in message:
        # Java writes null, never leaves it out: without the key, success and failure could not be told apart.
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
