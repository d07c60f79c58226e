"""Reading one JSON object strictly: a field has its type and range, or a DecodeError says which has not.

``bool`` is no integer here, and an integer beyond 64 bits (a float, as orjson reads it) is none either.
"""

from __future__ import annotations

from typing import Any, Final, TypeGuard

from mldserver.errors import DecodeError

MAX_ARRIVAL_MS: Final = 253_370_764_799_999
"""The last millisecond of the year 9998: a datetime, and so is the end of any window around it."""
MAX_LONG: Final = 2**63 - 1
MAX_SEQUENCE_DIGITS: Final = 129
"""AWS limit: a sequence number matches ``0|([1-9]\\d{0,128})`` (Kinesis API; DynamoDB Streams: 21 to 40)."""
SENTINELS: Final = frozenset({"TRIM_HORIZON", "LATEST", "AT_TIMESTAMP", "SHARD_END"})
"""Places that are no sequence number (KCL 3.1.3 SentinelCheckpoint)."""
_EXCERPT: Final = 80


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


def start_position(message: dict[str, Any], name: str) -> str | None:
    """Return where the daemon starts: digits, a sentinel, or None."""
    value = optional_text(message, name)
    if value is None or value in SENTINELS or is_sequence(value):
        return value
    raise wrong(name, value, f"digits, null or one of {', '.join(sorted(SENTINELS))}")
