"""What the Java writes, and how it reads what it is sent: JSON lines in the forms of three generations.

Written from the facts about the MultiLangDaemon and from captures, on purpose without ``mldserver.protocol``: it must
be able to catch that code's mistakes.
"""

from __future__ import annotations

import base64
import enum
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mldserver.testing.fake_stream import StreamRecord
    from mldserver.testing.leases import Place


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


def initialize(form: Form, shard_id: str, place: Place) -> bytes:
    """Return the ``initialize`` line."""
    message: dict[str, Any] = {"action": "initialize", "shardId": shard_id}
    if form is not Form.V1:
        message |= {"sequenceNumber": place.number, "subSequenceNumber": place.sub}
    return _line(message)


def _record(form: Form, record: StreamRecord) -> dict[str, Any]:
    data = None if record.data is None else base64.b64encode(record.data).decode()
    known: dict[str, Any] = {
        "data": data,
        "partitionKey": record.partition_key,
        "sequenceNumber": record.sequence_number,
    }
    if form is Form.V1:
        return known
    # KCL 1.x knows sub-sequences of KPL records only; KCL 2 and 3 number plain records 0.
    sub = record.sub_sequence_number if record.aggregated or form is Form.KCL3 else None
    return known | {
        "approximateArrivalTimestamp": record.arrival_ms,
        "subSequenceNumber": sub,
        "action": "record",
    }


def process_records(form: Form, records: Sequence[StreamRecord], millis_behind: int | None) -> bytes:
    """Return a ``processRecords`` line; ``millis_behind`` in milliseconds, unknown to V1."""
    message: dict[str, Any] = {
        "action": "processRecords",
        "records": [_record(form, record) for record in records],
    }
    if form is not Form.V1:
        message["millisBehindLatest"] = millis_behind
    return _line(message)


def ending(action: str, reason: str | None = None) -> bytes:
    """Return ``leaseLost``, ``shardEnded``, ``shutdownRequested``, or KCL 1.x's ``shutdown`` with its reason."""
    return _line({"action": action} if reason is None else {"action": action, "reason": reason})


def checkpoint_reply(form: Form, number: str | None, sub: int | None, error: str | None) -> bytes:
    """Return the answer to a checkpoint: the echo of what was asked, and the error's simple class name."""
    if form is Form.V1:
        return _line({"action": "checkpoint", "checkpoint": number, "error": error})
    return _line({"action": "checkpoint", "sequenceNumber": number, "subSequenceNumber": sub, "error": error})


@dataclass(frozen=True, slots=True)
class Said:
    """A status."""

    response_for: str | None
    trailing: str = ""
    """What stood behind the message on its line: the Java never sees it."""


@dataclass(frozen=True, slots=True)
class AskCheckpoint:
    """A checkpoint; None means everything delivered."""

    number: str | None
    sub: int | None
    trailing: str = ""


@dataclass(frozen=True, slots=True)
class NullMessage:
    """A literal ``null``."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line that the Java skips, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """A line without text: skipped without a word."""


Reply = Said | AskCheckpoint | NullMessage | Unreadable | Ignored

_KEYS: Final = {
    Form.V1: {"status": {"responseFor"}, "checkpoint": {"checkpoint", "error"}},
    Form.V2: {"status": {"responseFor"}, "checkpoint": {"sequenceNumber", "subSequenceNumber", "error"}},
}
"""The properties that the Java classes have. Jackson refuses any other key, and cares for case."""


def read_reply(form: Form, line: str) -> Reply:
    """Read one line as Jackson reads it: the first JSON value counts, unknown properties make it unreadable."""
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


def _read_message(form: Form, value: Any, trailing: str) -> Reply:
    if not isinstance(value, dict):
        return Unreadable("not a JSON object")
    action = value.pop("action", None)
    known = _KEYS[Form.V1 if form is Form.V1 else Form.V2].get(action) if isinstance(action, str) else None
    if known is None:
        return Unreadable(f"action {action!r} is none that a worker may send")
    if strange := sorted(value.keys() - known):
        return Unreadable(f"{action} has no property {', '.join(strange)} in form {form.value}")
    if action == "status":
        response_for = value.get("responseFor")
        return Said(response_for if isinstance(response_for, str) else None, trailing)
    number = value.get("checkpoint" if form is Form.V1 else "sequenceNumber")
    sub = value.get("subSequenceNumber")
    if not isinstance(number, str | None) or isinstance(sub, bool) or not isinstance(sub, int | None):
        return Unreadable("a sequence number is text, a sub-sequence number an integer")
    return AskCheckpoint(number, sub, trailing)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
