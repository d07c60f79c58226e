"""Reading logs: lines out of bytes, which of them are wanted, and following a file through rotation.

``LineSplitter`` and ``Selection`` are plain cores. ``FileFollower`` reads a file but never waits: the command line's
shell asks it again after a while.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import orjson

from mldserver.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LEVELS: Final = ("debug", "info", "warning", "error", "critical")

_CHUNK = 1 << 20
_HEAD = 128
"""Bytes at a file's start that tell whether it is still the same content: JSON lines begin with a timestamp."""


class LineSplitter:
    """Makes lines of bytes of any chunking."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._started: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes; return the lines that they complete, without their ends."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._started, lines[0]))
            self._started.clear()
        if rest:
            self._started.append(rest)
        return [line.removesuffix(b"\r") for line in lines]

    def finish(self) -> list[bytes]:
        """Return the last line if it has no end."""
        rest = b"".join(self._started)
        self._started.clear()
        return [rest] if rest else []


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return a log line's event, or None when it is none: something else wrote it."""
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


@dataclass(frozen=True, slots=True)
class Selection:
    """Which lines are wanted. Lines that are no events are wanted only when nothing is asked for."""

    shard: str | None = None
    """Shard id; ``*`` and ``?`` stand for any characters."""
    level: str | None = None
    """The lowest level."""
    events: tuple[str, ...] = ()
    """Names of events; ``*`` and ``?`` stand for any characters."""
    since: datetime | None = None
    """Aware; earlier events are not wanted."""

    def wants(self, event: dict[str, Any] | None) -> bool:
        """Tell whether a line is wanted, by what ``parse_event`` made of it."""
        if event is None:
            return self == Selection()
        return (
            (self.shard is None or fnmatchcase(str(event.get("shard", "")), self.shard))
            and (self.level is None or _rank(event.get("level")) >= _rank(self.level))
            and (not self.events or any(fnmatchcase(str(event["event"]), pattern) for pattern in self.events))
            and (self.since is None or _at_or_after(event.get("timestamp"), self.since))
        )


def _rank(level: object) -> int:
    """Return a level's rank; an unknown one is above all, so that it is never hidden."""
    return LEVELS.index(level) if level in LEVELS else len(LEVELS)


def _at_or_after(timestamp: object, since: datetime) -> bool:
    """Compare; a timestamp that cannot be read is never hidden."""
    try:
        when = datetime.fromisoformat(str(timestamp))
    except ValueError:
        return True
    return (when if when.tzinfo else when.replace(tzinfo=UTC)) >= since


class FileFollower:
    """Reads a growing file, across ``rename`` + ``create`` and ``copytruncate``."""

    def __init__(self, path: Path) -> None:
        """Follow whatever ``path`` names, now and later. Nothing is opened before the first ``read``."""
        self.path = path
        self._fd = -1
        self._regular = True
        """Whether it is a file in the narrow sense; a pipe is neither truncated nor replaced."""
        self._head = b""
        self._lines = LineSplitter()

    @property
    def opened(self) -> bool:
        """Whether there is a file to read."""
        return self._fd >= 0

    def read(self) -> Iterator[bytes]:
        """Yield the whole lines that have come since the last call; to be consumed to its end.

        Raises ConfigError when the path cannot be read; that it does not exist (yet, or between two files) is none.
        """
        if not self.opened and not self._open():
            return
        if self._was_truncated():
            yield from self._lines.finish()
            os.lseek(self._fd, 0, os.SEEK_SET)
            self._head = b""
        yield from self._read_on()
        if self._was_replaced():
            # Whoever wrote to the old file did so before it opened the new one: read the rest, then change over.
            yield from self._read_on()
            yield from self.finish()
            yield from self.read()

    def finish(self) -> list[bytes]:
        """Close the file; return the last line if it has no end."""
        if self.opened:
            os.close(self._fd)
            self._fd = -1
        self._head = b""
        return self._lines.finish()

    def _open(self) -> bool:
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}.") from error
        self._regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
        return True

    def _read_on(self) -> Iterator[bytes]:
        while True:
            try:
                data = os.read(self._fd, _CHUNK)
            except IsADirectoryError as error:
                raise ConfigError(f"{self.path} is a directory.", advice="Name a log file.") from error
            if not data:
                return
            if self._regular and len(self._head) < _HEAD:
                self._head += data[: _HEAD - len(self._head)]
            yield from self._lines.feed(data)

    def _was_truncated(self) -> bool:
        """Tell whether the file was emptied; it may have grown beyond our place again since."""
        if not self._head:
            return False
        shrunk = os.fstat(self._fd).st_size < os.lseek(self._fd, 0, os.SEEK_CUR)
        return shrunk or os.pread(self._fd, len(self._head), 0) != self._head

    def _was_replaced(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            named, ours = self.path.stat(), os.fstat(self._fd)
            return (named.st_dev, named.st_ino) != (ours.st_dev, ours.st_ino)
        return False
