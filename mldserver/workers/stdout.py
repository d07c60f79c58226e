"""What a worker prints past Python's own streams, or in its last moment: a pipe that is read within bounds.

A flood is slowed, not followed: once its lines are too many the pipe is left alone for a while, and whoever floods it
waits. The pipe is not the event loop's own kind of subprocess pipe, because a loop may take a process for alive until
its pipes are at their end: a flood that nobody reads, or another process that has inherited them, would hide its death.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import Final

import structlog

from mldserver.observe.stdout_capture import Printed

__all__ = ["Output"]

log = structlog.get_logger("mldserver")

_READ_BYTES: Final = 4096
"""At a time: thousands of empty lines at most."""
_PAUSE_SECONDS: Final = 0.05
_REST_BYTES: Final = 1 << 20
"""Read at most of what is left at the end; a pipe holds 64 KiB (Linux)."""
_KEPT_LINES: Final = 200
_LONGEST_LINE: Final = 8192


class Output:
    """The read end of a pipe, on the event loop."""

    def __init__(self, file: int, *, printed: Printed | None = None) -> None:
        """Own ``file`` from now on; ``printed`` says how many lines are told."""
        self._file = file
        self._printed = printed or Printed()
        self._loop = asyncio.get_running_loop()
        self._begun = b""
        self._last: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._pause: asyncio.TimerHandle | None = None
        self._silent = False
        self._flooded = False
        self._open = True
        os.set_blocking(file, False)
        self._loop.add_reader(file, self._readable)

    @property
    def last_words(self) -> str:
        """The last lines, whether they were told or not."""
        return "\n".join(map(_text, self._last))

    def only_keep(self) -> None:
        """Tell nothing any more: what comes now is asked for, and read from ``last_words``."""
        self._silent, self._flooded = True, False
        self._last.clear()
        self._go_on()

    def close(self) -> None:
        """Read what is left, and let go of the pipe. Closing again does nothing."""
        if not self._open:
            return
        self._go_on()
        rest = _REST_BYTES
        while rest > 0 and (data := self._read()):
            self._take(data)
            rest -= len(data)
        self._end()

    def _readable(self) -> None:
        data = self._read()
        if data is None:
            return
        if not data:
            self._end()
            return
        self._take(data)
        if self._flooded:
            self._loop.remove_reader(self._file)
            self._pause = self._loop.call_later(_PAUSE_SECONDS, self._go_on)

    def _go_on(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
            self._loop.add_reader(self._file, self._readable)

    def _read(self) -> bytes | None:
        """Return what is there; nothing at the end, None when nothing is there now."""
        try:
            return os.read(self._file, _READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return None

    def _take(self, data: bytes) -> None:
        *lines, self._begun = (self._begun + data).split(b"\n")
        while len(self._begun) > _LONGEST_LINE:
            lines.append(self._begun[:_LONGEST_LINE])
            self._begun = self._begun[_LONGEST_LINE:]
        self._last.extend(lines)
        if not self._silent:
            self._tell([line for line in lines if line])

    def _tell(self, lines: list[bytes]) -> None:
        self._flooded = False
        for line in lines:
            if self._printed.passes():
                log.info("handler.output", stream="stderr", text=_text(line))
            else:
                self._flooded = True

    def _end(self) -> None:
        if self._begun:
            self._take(b"\n")
        self._printed.tell()
        self._open = False
        self._loop.remove_reader(self._file)
        os.close(self._file)


def _text(line: bytes) -> str:
    return line[:_LONGEST_LINE].decode("utf-8", "replace").rstrip("\r")
