"""The values that a key's state may hold, and their form in MessagePack. Pure.

MessagePack has no form for Decimal; it is an extension here. msgspec encodes sets, naive datetimes, dataclasses and others as
what they resemble, so types are checked: what a handler stores is what it reads later (a tuple as a list).
"""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any, Final

import msgspec

MAX_STATE_BYTES: Final = 256 * 1024
"""The longest state of one key, in MessagePack."""
MAX_PAYLOAD_BYTES: Final = 16 * 1024
"""The longest payload of a timer, in MessagePack."""
MAX_TIMERS: Final = 1_000
"""How many timers a key may have."""
MAX_ID_BYTES: Final = 1_024
"""The longest id of a timer in UTF-8: its callback's name and its own."""

_DECIMAL: Final = 1
"""The code of the extension for Decimal, whose bytes are its text."""
_LEAVES: Final = frozenset({type(None), bool, int, float, str, bytes})
_CONTAINERS: Final = frozenset({list, tuple, dict})


def _extension(code: int, data: memoryview) -> Any:
    if code != _DECIMAL:
        raise ValueError(f"State has an extension with the unknown code {code}.")
    return Decimal(str(data, "ascii"))


_encode: Final = msgspec.msgpack.Encoder().encode
decode_state: Final = msgspec.msgpack.Decoder(dict[str, Any], ext_hook=_extension).decode
"""Returns the dict of a state's bytes. Raises msgspec.MsgspecError for other bytes."""
decode_payload: Final = msgspec.msgpack.Decoder(ext_hook=_extension).decode
"""Returns the payload of a timer, whose bytes ``encode_payload`` returned."""
decode_timer: Final = msgspec.msgpack.Decoder(tuple[int, int, Any], ext_hook=_extension).decode
"""Returns number, attempt and payload of a timer's value (``stores.pack_timer``)."""


def encode_state(state: dict[str, Any], before: bytes | None = None) -> bytes:
    """Return a state as bytes; ``before`` itself if those are the same.

    Raises TypeError, with the value's path, if a value is not of the types that state may have.
    """
    try:
        data = _encode(state)
    except Exception:  # noqa: BLE001  # the reason follows, with the value's path
        return _encode(_checked(state, "ctx.state"))
    if data == before:
        return before
    if not _is_plain(state):
        data = _encode(_checked(state, "ctx.state"))
    return before if data == before else data


def encode_payload(payload: Any) -> bytes:
    """Return the payload of a timer as bytes. Raises TypeError as ``encode_state`` does."""
    kind = type(payload)
    if kind not in _LEAVES and (kind not in _CONTAINERS or not _is_plain(payload)):
        payload = _checked(payload, "payload")
    try:
        return _encode(payload)
    except Exception:  # noqa: BLE001  # the reason follows, with the value's path
        return _encode(_checked(payload, "payload"))


def _is_plain(value: Any) -> bool:
    """Return whether a dict, list or tuple has only values of types that msgspec encodes as they are meant, at any depth."""
    members = value
    if type(value) is dict:
        members = value.values()
        for key in value:
            if type(key) is not str:
                return False
    for each in members:
        kind = type(each)
        if kind not in _LEAVES and (kind not in _CONTAINERS or not _is_plain(each)):
            return False
    return True


def _checked(value: Any, path: str) -> Any:
    """Return a value as msgspec must encode it. Raises TypeError, with the path of the value at fault."""
    kind = type(value)
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise _refused(f"{path} has the key {key!r:.100}, which is not text")
        return {key: _checked(each, f"{path}[{key!r:.100}]") for key, each in value.items()}
    if kind is list or kind is tuple:
        return [_checked(each, f"{path}[{place}]") for place, each in enumerate(value)]
    if kind is Decimal:
        return msgspec.msgpack.Ext(_DECIMAL, str(value).encode())
    if kind is datetime:
        if value.utcoffset() is None:
            raise _refused(f"{path} is a datetime without a time zone")
    elif kind not in _LEAVES:
        raise _refused(f"{path} is of the type {kind.__qualname__}")
    try:
        _encode(value)
    except (OverflowError, ValueError) as error:
        raise _refused(f"{path}: {error}") from None
    return value


def _refused(what: str) -> TypeError:
    return TypeError(
        f"{what}. The call failed. State holds None, bool, int of 64 bits, float, str, bytes, Decimal, aware datetimes, and "
        "lists, tuples and dicts with text keys of these."
    )
