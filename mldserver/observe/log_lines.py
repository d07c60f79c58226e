"""Log lines: events as JSON and as text for people, which of them are selected, and a file that is followed.

Nothing that is logged can make writing it fail. ``FileFollower`` reads a file but never waits: the command calls it again
after a while.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import orjson

from mldserver.base.lines import LineSplitter
from mldserver.errors import ConfigError

LEVELS: Final = ("debug", "info", "warning", "error", "critical")

_CHUNK = 1 << 20
_HEAD = 128
"""Bytes at a file's start that identify its content: JSON lines begin with a timestamp."""


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return a log line's event, or None when it is none: something else wrote it."""
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


@dataclass(frozen=True, slots=True)
class Selection:
    """Selects log lines. Lines that are not events are selected only if no filter is set."""

    shard: str | None = None
    """Shard id; ``*`` and ``?`` stand for any characters."""
    level: str | None = None
    """The lowest level."""
    events: tuple[str, ...] = ()
    """Names of events; ``*`` and ``?`` stand for any characters."""
    since: datetime | None = None
    """Aware; earlier events are not wanted."""

    def wants(self, event: dict[str, Any] | None) -> bool:
        """Return whether a line is selected, given the result of ``parse_event``."""
        if event is None:
            return self == Selection()
        if self.shard is not None and not fnmatchcase(str(event.get("shard", "")), self.shard):
            return False
        # A level that is unknown, and a timestamp that cannot be read, are never hidden.
        if self.level is not None and event.get("level") in LEVELS[: LEVELS.index(self.level)]:
            return False
        if self.since is not None:
            with contextlib.suppress(ValueError):
                when = datetime.fromisoformat(str(event.get("timestamp")))
                if (when if when.tzinfo else when.replace(tzinfo=UTC)) < self.since:
                    return False
        return not self.events or any(fnmatchcase(str(event["event"]), pattern) for pattern in self.events)


@dataclass(slots=True)
class FileFollower:
    """Reads a growing file, across ``rename`` + ``create`` and ``copytruncate``: whatever ``path`` names, now and later.

    Nothing is opened before the first ``read``.
    """

    path: Path
    _fd: int = -1
    _regular: bool = True
    """Whether it is a file in the narrow sense; a pipe is neither truncated nor replaced."""
    _first_bytes: bytes = b""
    _lines: LineSplitter = field(default_factory=LineSplitter)

    @property
    def opened(self) -> bool:
        """Whether there is a file to read."""
        return self._fd >= 0

    def read(self) -> Iterator[bytes]:
        """Yield the complete lines written since the last call; the caller must consume all. No file: yield nothing.

        Follows a file that was truncated or replaced (logrotate). Raises ConfigError when the path cannot be read.
        """
        if not self.opened:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return
            except OSError as error:
                raise ConfigError(f"{self.path} cannot be read: {error.strerror}.") from error
            self._regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
        if self._first_bytes:
            # A truncated file may have grown beyond this reader's offset again: then its first bytes differ.
            shrunk = os.fstat(self._fd).st_size < os.lseek(self._fd, 0, os.SEEK_CUR)
            if shrunk or os.pread(self._fd, len(self._first_bytes), 0) != self._first_bytes:
                yield from self._lines.finish()
                os.lseek(self._fd, 0, os.SEEK_SET)
                self._first_bytes = b""
        yield from self._read_lines()
        at_path, opened = None, os.fstat(self._fd)
        with contextlib.suppress(FileNotFoundError):
            at_path = self.path.stat()
        if at_path is not None and (at_path.st_dev, at_path.st_ino) != (opened.st_dev, opened.st_ino):
            # The path names another file now. Its writer wrote to the old file before: read the old file's rest first.
            yield from self._read_lines()
            yield from self.finish()
            yield from self.read()

    def finish(self) -> list[bytes]:
        """Close the file; return the last line if it has no end."""
        if self.opened:
            os.close(self._fd)
            self._fd = -1
        self._first_bytes = b""
        return self._lines.finish()

    def _read_lines(self) -> Iterator[bytes]:
        """Yield the complete lines from this reader's offset to the end of the open file."""
        while True:
            try:
                data = os.read(self._fd, _CHUNK)
            except IsADirectoryError as error:
                raise ConfigError(f"{self.path} is a directory.", advice="Name a log file.") from error
            if not data:
                return
            if self._regular and len(self._first_bytes) < _HEAD:
                self._first_bytes += data[: _HEAD - len(self._first_bytes)]
            yield from self._lines.feed(data)


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

    Values that JSON cannot hold become text: integers beyond 64 bits (sequence numbers) as digits, bytes and lone
    surrogates with escapes, other values by ``str``.
    """
    ordered = {key: event[key] for key in _FIRST if key in event} | dict(event)
    try:
        return orjson.dumps(ordered, default=_plain)
    except TypeError:  # orjson's JSONEncodeError: something in it is beyond JSON
        return orjson.dumps(_plain(ordered))


def _text(value: object) -> str:
    try:
        text = str(value)
    except Exception as error:  # noqa: BLE001  # a user's __str__ may raise anything
        text = f"<{type(value).__name__}: {type(error).__name__} in its __str__>"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a value that orjson accepts: the same value, unless orjson refuses it."""
    if value is None or type(value) in {bool, float}:
        return value
    if type(value) is int:
        return value if -(2**63) <= value < 2**64 else str(value)
    if depth < _DEEPEST and isinstance(value, dict):
        return {_text(key): _plain(item, depth + 1) for key, item in value.items()}
    if depth < _DEEPEST and type(value) in {list, tuple}:
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(_text, value))
    if isinstance(value, bytes | bytearray | memoryview):
        value = bytes(value).decode("utf-8", "backslashreplace")
    return _text(value)


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
    for key in [key for key in _WHERE if key in event] + rest:
        value = event[key]
        if not isinstance(value, str) or not _PLAIN_WORD.fullmatch(value) or _CONTROL.search(value):
            value = harmless(as_json({"": value})[4:-1].decode())
        parts.append(f"{_coloured(f'{harmless(key)}=', _DIM, colours)}{value}")
    lines = [" ".join(parts).rstrip()]
    for key in _BLOCKS:
        if block := event.get(key):
            lines += [f"    {harmless(line)}" for line in _text(block).splitlines()]
    return "\n".join(lines)


def _coloured(text: str, colour: str, colours: bool) -> str:  # noqa: FBT001  # private, always by position
    return f"{colour}{text}{_RESET}" if colours and colour else text


def harmless(text: str) -> str:
    """Return text with control characters escaped: what is logged must not move a reader's cursor."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
