"""Where log lines go: a file that can be opened again, or a stream that the process was given.

Lines are written with one ``write`` call each, unbuffered. The call blocks for as long as the kernel takes, which is
for ever where a pipe's reader stalls: ``writer.py`` does it in a thread of its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from mldserver.errors import folder_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

__all__ = ["LogOutput"]

_MODE = 0o644
_END = ord("\n")


class LogOutput:
    """Takes whole lines from any thread. That a line cannot be written is told, never raised."""

    def __init__(
        self, fd: int, *, path: Path | None = None, write: Callable[[int, Buffer], int] = os.write
    ) -> None:
        """Own ``fd`` from now on; ``path`` is what ``opened`` opens. Tests pass their own ``write``."""
        self._fd = fd
        self.path = path
        self._write = write
        # A signal handler may log while the same thread writes: with a plain lock it would wait for itself.
        self._lock = threading.RLock()
        self._torn = _ends_within_a_line(fd)
        """What was written last has no end: the disk was full meanwhile. The next line must not be taken for its rest."""

    @classmethod
    def to_file(cls, path: Path) -> LogOutput:
        """Append to a file. Raises OperatorError when it cannot be opened."""
        return cls(_open(path), path=path)

    @classmethod
    def to_stream(cls, fd: int) -> LogOutput:
        """Write to a copy of an open descriptor, e.g. standard output."""
        return cls(os.dup(fd))

    @property
    def is_terminal(self) -> bool:
        """Whether a person is looking."""
        return os.isatty(self._fd)

    def line(self, line: bytes) -> bool:
        """Write a line and its end. Returns False when it is lost: the disk is full, the reader has gone."""
        with self._lock:
            try:
                self._write_all(b"\n" * self._torn + line + b"\n")
            except OSError:
                return False
            return True

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                written = self._write(self._fd, view)
            except BlockingIOError:
                # Somebody set O_NONBLOCK on the terminal or pipe that we share with them.
                select.select([], [self._fd], [])
                continue
            if written:
                self._torn = view[written - 1] != _END
            view = view[written:]

    def opened(self) -> int | None:
        """Open the file again (after logrotate moved it), for ``swap``; None without a file.

        Raises OperatorError when it cannot be opened; so too when it is a named pipe that nobody reads, for the event
        loop must not wait for a reader.
        """
        if self.path is None:
            return None
        fresh = _open(self.path, os.O_NONBLOCK)
        os.set_blocking(fresh, True)
        return fresh

    def swap(self, fresh: int) -> None:
        """Write to another descriptor from now on, and close the old one."""
        with self._lock:
            old, self._fd = self._fd, fresh
            self._torn = _ends_within_a_line(fresh)
        os.close(old)

    def close(self) -> None:
        """Close; lines after it are lost. Closing again does nothing."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def _open(path: Path, flags: int = 0) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | flags, _MODE)
    except OSError as error:
        raise folder_error(error)(
            f"The log file {path} cannot be opened: {error.strerror}.",
            advice="Check log_file and its rights.",
        ) from error


def _ends_within_a_line(fd: int) -> bool:
    """Tell whether a file's last line was cut off, by a full disk or a machine that went down."""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        with Path(f"/dev/fd/{fd}").open("rb") as file:  # ours is for writing only
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"
    except OSError:  # it is empty, or may not be read
        return False
