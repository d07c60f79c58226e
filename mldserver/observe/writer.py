"""Writes log lines, to a file that can be reopened or to a stream that the process inherited.

A separate thread writes, because a reader that stalls must not stall the server.

Callers put a line into a queue and go on. When the queue is full (a pipe without a reader, a terminal that
was stopped, a disk that hangs) lines are dropped and counted. Before the next line that can be written, a ``log.lost``
reports how many. Urgent lines, warnings and above, have reserved room.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from typing_extensions import Buffer

from mldserver.errors import folder_error

ROOM: Final = 4 * 1024 * 1024
"""The most bytes in the queue: about ten thousand lines, one second of a very busy server at level debug."""

RESERVE: Final = 1024 * 1024
"""Bytes beyond ``ROOM`` for urgent lines."""

CLOSE_SECONDS: Final = 3.0
"""How long ``close`` waits for a reader that stalls."""

LINGER_SECONDS: Final = 0.02
"""How long lines that are not urgent may wait for more lines. To wake the thread for each line would cost the event loop
more than the line itself, because both threads would then compete for the interpreter."""

_MODE = 0o640
_END = ord("\n")
_PER_LINE: Final = 200
"""Overhead of a line in memory, in bytes."""


class LogOutput:
    """Writes whole lines, from one thread. A failed write returns False and never raises.

    Each line is one ``write`` call, unbuffered, which blocks for as long as the kernel takes.
    """

    def __init__(self, place: int | Path, *, write: Callable[[int, Buffer], int] = os.write) -> None:
        """Own a descriptor from now on, or append to a file. Tests pass their own ``write``.

        Raises OperatorError when the file cannot be opened.
        """
        self.path = place if isinstance(place, Path) else None
        self._fd = _open(place) if isinstance(place, Path) else place
        self.is_terminal = os.isatty(self._fd)
        """Whether the output is a terminal."""
        self._write = write
        self._torn = _ends_within_a_line(self._fd)
        """Whether the last line was cut off because the disk was full. The next line then begins with a line end."""

    def line(self, line: bytes) -> bool:
        """Write a line and its end. Returns False if the line is lost: the disk is full, or the reader has gone."""
        # If the last line was cut off, end it first, so that this line begins on a line of its own.
        start = b"\n" if self._torn else b""
        view = memoryview(start + line + b"\n")
        try:
            while view:
                try:
                    written = self._write(self._fd, view)
                except BlockingIOError:
                    # Another process set O_NONBLOCK on the terminal or pipe that it shares with this one: wait until
                    # it can be written. Not with select(), which fails for descriptors from 1024 on.
                    writable = select.poll()
                    writable.register(self._fd, select.POLLOUT)
                    writable.poll()
                    continue
                if written:
                    self._torn = view[written - 1] != _END
                view = view[written:]
        except OSError:
            return False
        return True

    def swap(self, fresh: int) -> None:
        """Write to another descriptor from now on, and close the old one."""
        old, self._fd = self._fd, fresh
        self._torn = _ends_within_a_line(fresh)
        os.close(old)

    def close(self) -> None:
        """Close; lines after it are lost. Closing again does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def _open(path: Path, flags: int = 0) -> int:
    """Open a log file to append to, with its folders made; return the descriptor. Raises OperatorError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | flags, _MODE)
    except OSError as error:
        raise folder_error(error)(
            f"The log file {path} cannot be opened: {error.strerror}.",
            advice="Check log_file and its rights.",
        ) from error


def _ends_within_a_line(fd: int) -> bool:
    """Return whether a file's last line has no line end, after a full disk or a crash of the machine.

    Returns False for an empty file, for one that cannot be read, and for anything except a regular file.
    """
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        with Path(f"/dev/fd/{fd}").open("rb") as file:  # ``fd`` is open for writing only
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"
    except OSError:  # the file is empty (no byte before its end), or cannot be read
        return False


class _QueuedLine(NamedTuple):
    data: bytes
    stamp: str
    dropped: int
    """How many lines before this one found no room."""


class LogWriter:
    """Accepts lines from any thread, without waiting, and writes them in order."""

    def __init__(
        self,
        output: LogOutput,
        render_lost: Callable[[int, str], bytes],
        *,
        room: int = ROOM,
        reserve: int = RESERVE,
    ) -> None:
        """Own ``output`` from now on, and start the thread that writes.

        ``render_lost`` returns the line that reports lost lines, given their number and a time stamp. ``room`` and
        ``reserve``: the most bytes in the queue, and how many more urgent lines may take.
        """
        self._output = output
        self.path = output.path
        """The log file, if it is one."""
        self._render_lost = render_lost
        self._room = room
        self._reserve = reserve
        # A signal handler may log while the same thread does: with a plain lock it would wait for itself.
        self._changed = threading.Condition(threading.RLock())
        self._queue: deque[_QueuedLine | int] = deque()
        """A number is the descriptor to write to from then on."""
        self._bytes = 0
        self._idle = False
        """Whether everything is written, and the thread waits for a line without a time limit."""
        self._closing = False
        self._dropped = 0
        """How many lines found no room since the last accepted one."""
        self.lost = 0
        """How many lines were lost since the start: they found no room, or could not be written."""
        # A daemon thread: a write may hang for ever, and the process must still end.
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def line(self, data: bytes, *, stamp: str, urgent: bool = False) -> bool:
        """Queue a line, given without its end. Returns False if the line is lost, because the queue is full or closing.

        ``stamp`` is the line's time, for a report of lost lines. An urgent line may use the reserve, and wakes the thread.
        """
        size = len(data) + _PER_LINE
        with self._changed:
            room = self._room + (self._reserve if urgent else 0)
            # An empty queue accepts a line of any length.
            fits = not self._bytes or self._bytes + size <= room
            accepted = fits and not self._closing
            if accepted:
                self._bytes += size
                self._queue.append(_QueuedLine(data, stamp, self._dropped))
                self._dropped = 0
            else:
                self._dropped += 1
                self.lost += 1
            if self._idle or urgent:
                self._changed.notify_all()
        return accepted

    def reopen(self) -> None:
        """Open the file again (after logrotate moved it): lines queued so far go to the old one. No file: do nothing.

        Raises OperatorError if the file cannot be opened, or is a named pipe without a reader, because the event loop must
        not wait for a reader. The old file then stays in use.
        """
        if self.path is None:
            return
        fresh = _open(self.path, os.O_NONBLOCK)
        os.set_blocking(fresh, True)
        with self._changed:
            self._queue.append(fresh)
            self._changed.notify_all()

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Write the queued lines within ``seconds``, and close the output. Return False if lines were left."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(seconds)
        if not self._thread.is_alive():
            return True
        with self._changed:
            # Should its write ever return, the thread reports what is lost, closes the output, and ends.
            self._dropped += len(self._queue)
            self.lost += len(self._queue)
            self._queue.clear()
        return False

    # Runs in the thread.

    def _run(self) -> None:
        """Write queued lines until the writer is closed, then close the output.

        A report of lost lines goes before the first line that can be written after them.
        """
        missing, stamp = 0, ""  # lines lost since the last report, and the latest line's time
        try:
            while (item := self._next()) is not None:
                if isinstance(item, int):
                    self._output.swap(item)
                    continue
                stamp, missing = item.stamp, missing + item.dropped
                if missing and self._output.line(self._render_lost(missing, stamp)):
                    missing = 0
                if missing or not self._output.line(item.data):
                    # The report or the line could not be written (the disk is full, or the reader has gone), so this
                    # line is lost, too. The next line tries again.
                    missing += 1
                    with self._changed:
                        self.lost += 1
            if missing := missing + self._dropped:
                self._output.line(self._render_lost(missing, stamp))
        finally:
            self._output.close()

    def _next(self) -> _QueuedLine | int | None:
        """Wait for the next item of the queue and return it; None if the queue is empty and the writer is closed."""
        with self._changed:
            if not self._queue:
                # First wait a moment without being woken by lines that are not urgent: see LINGER_SECONDS.
                if not self._closing:
                    self._changed.wait(LINGER_SECONDS)
                self._idle = True
                self._changed.wait_for(lambda: self._queue or self._closing)
                self._idle = False
            if not self._queue:
                return None
            item = self._queue.popleft()
            if isinstance(item, _QueuedLine):
                self._bytes -= len(item.data) + _PER_LINE
            return item
