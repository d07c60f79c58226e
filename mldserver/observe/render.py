"""Log events as JSON lines and as lines for people. Pure functions; nothing that is logged can make them fail."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST: Final = ("timestamp", "level", "event")
_WHERE: Final = ("pipeline", "connection", "shard", "window")
_BLOCKS: Final = ("traceback", "exception")
"""Fields of several lines, shown below."""

_DEEPEST = 20
_EVENT_WIDTH = 22
_PLAIN_WORD = re.compile(r"[^\s\"=\\]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")

_RESET, _DIM, _BOLD = "\x1b[0m", "\x1b[2m", "\x1b[1m"
_COLOUR_OF_LEVEL: Final = {
    "debug": "\x1b[2m",
    "info": "\x1b[32m",
    "warning": "\x1b[33m",
    "error": "\x1b[31m",
    "critical": "\x1b[1;31m",
}


def as_json(event: Mapping[str, Any]) -> bytes:
    """Return one line of JSON without its end: timestamp, level, event, then the rest as given.

    What JSON cannot hold is told as text: integers beyond 64 bits (sequence numbers) in their digits, bytes and lone
    surrogates with escapes, anything else by its ``str``.
    """
    ordered = {key: event[key] for key in _FIRST if key in event} | dict(event)
    try:
        return orjson.dumps(ordered, default=_told)
    except TypeError:  # orjson's JSONEncodeError: something in it is beyond JSON
        return orjson.dumps(_plain(ordered))


def _told(value: object) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "backslashreplace")
    if isinstance(value, set | frozenset):
        return sorted(map(_text, value))
    return _text(value)


def _text(value: object) -> str:
    try:
        text = str(value)
    except Exception as error:  # noqa: BLE001  # a user's __str__ may raise anything
        text = f"<{type(value).__name__}: {type(error).__name__} in its __str__>"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _plain(value: Any, depth: int = 0) -> Any:
    """Return the same with everything replaced that orjson refuses."""
    if value is None or isinstance(value, bool | float):
        return value
    if type(value) is int:
        return value if -(2**63) <= value < 2**64 else str(value)
    if depth < _DEEPEST and isinstance(value, dict):
        return {_text(key): _plain(item, depth + 1) for key, item in value.items()}
    if depth < _DEEPEST and type(value) in {list, tuple}:
        return [_plain(item, depth + 1) for item in value]
    return _text(value) if isinstance(value, str) else _told(value)


def as_text(event: Mapping[str, Any], *, colours: bool) -> str:
    """Return an event for people: one line, and below it, indented, the tracebacks that it carries."""
    level, name = _text(event.get("level", "")), harmless(_text(event.get("event", "")))
    when = harmless(_text(event.get("timestamp", "")))
    parts = [
        _coloured(when, _DIM, colours),
        _coloured(f"{harmless(level):<8}", _COLOUR_OF_LEVEL.get(level, ""), colours),
        _coloured(f"{name:<{_EVENT_WIDTH}}", _BOLD, colours),
    ]
    rest = [key for key in event if key not in _FIRST and key not in _WHERE and key not in _BLOCKS]
    parts += [
        f"{_coloured(f'{harmless(key)}=', _DIM, colours)}{_value(event[key])}"
        for key in [key for key in _WHERE if key in event] + rest
    ]
    lines = [" ".join(parts).rstrip()]
    for key in _BLOCKS:
        if block := event.get(key):
            lines += [f"    {harmless(line)}" for line in _text(block).splitlines()]
    return "\n".join(lines)


def _coloured(text: str, colour: str, colours: bool) -> str:  # noqa: FBT001  # private, always by position
    return f"{colour}{text}{_RESET}" if colours and colour else text


def _value(value: Any) -> str:
    if isinstance(value, str) and _PLAIN_WORD.fullmatch(value) and not _CONTROL.search(value):
        return value
    return harmless(as_json({"": value})[4:-1].decode())


def harmless(text: str) -> str:
    """Return text with control characters escaped: what is logged must not move a reader's cursor."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
