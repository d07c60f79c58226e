"""What a child prints: a pipe that is read within bounds, line by line.

A flood is slowed, not followed: once its lines are too many the pipe is left alone for a while, and whoever floods it
waits. The pipe is not asyncio's kind of subprocess pipe: an event loop may take a process for alive until its pipes are
at their end, and a flood that nobody reads, or another process that has inherited them, would hide its death.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST_LINE: Final = 64 * 1024
"""Bytes of a line that are kept; a query plan, or a list of leases, can have megabytes."""
_CUT: Final = " … cut"
_READ_BYTES: Final = 8192
"""At a time: thousands of empty lines at most."""
_PAUSE_SECONDS: Final = 0.05
_REST_BYTES: Final = 1 << 20
"""Read at most of what is left at the end; a pipe holds 64 KiB (Linux)."""


class Lines:
    """Bytes of any chunking in, lines out; memory is bounded whatever comes. Synchronous."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._begun = bytearray()
        self._cut = False

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that are complete, without their ends. What a line has beyond LONGEST_LINE is left out."""
        lines: list[str] = []
        *ended, rest = data.split(b"\n")
        for part in ended:
            self._add(part)
            lines.append(self._line())
        self._add(rest)
        return lines

    def end(self) -> list[str]:
        """Return what stands there without a line end."""
        return [self._line()] if self._begun else []

    def _add(self, part: bytes) -> None:
        room = LONGEST_LINE - len(self._begun)
        self._cut = self._cut or len(part) > room
        self._begun += part[:room]

    def _line(self) -> str:
        line = self._begun.decode("utf-8", errors="replace").rstrip("\r") + (_CUT if self._cut else "")
        self._begun, self._cut = bytearray(), False
        return line


class Output:
    """The read end of a pipe, on the event loop."""

    def __init__(self, file: int, take: Callable[[list[str]], bool]) -> None:
        """Own ``file`` from now on; ``take`` gets its lines, and returns False when they are too many for now."""
        self._file = file
        self._take = take
        self._lines = Lines()
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._open = True
        self.ended = asyncio.Event()
        """Set when nothing more is read."""
        os.set_blocking(file, False)
        self._loop.add_reader(file, self._readable)

    def go_on(self) -> None:
        """Read on at once, if that was to wait."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
            self._loop.add_reader(self._file, self._readable)

    def close(self) -> None:
        """Read what is left, and let go of the pipe, whoever else holds it. Closing again does nothing."""
        rest = _REST_BYTES
        while self._open and rest > 0 and (data := self._read()):
            self._take(self._lines.feed(data))
            rest -= len(data)
        self._end()

    def _readable(self) -> None:
        data = self._read()
        if data is None:
            return
        if not data:
            self._end()
        elif not self._take(self._lines.feed(data)):
            self._loop.remove_reader(self._file)
            self._pause = self._loop.call_later(_PAUSE_SECONDS, self.go_on)

    def _read(self) -> bytes | None:
        """Return what is there; nothing at the end, None when nothing is there now."""
        try:
            return os.read(self._file, _READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return None

    def _end(self) -> None:
        if self._open:
            self._open = False
            self.go_on()
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self.ended.set()
            self._take(self._lines.end())
