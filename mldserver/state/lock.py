"""One server for one ledger: an OS lock beside the file that dies with the process that holds it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

from mldserver.errors import OperatorError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ProcessLock"]


class ProcessLock:
    """An exclusive ``flock`` on a file that holds the owner's process id. The file stays when the lock goes.

    The lock belongs to the open file, so a second one conflicts even inside one process, and a child that was forked
    without exec would keep it alive: children of the server are started by exec.
    """

    def __init__(self, path: Path) -> None:
        """Name the lock's file; nothing is touched yet."""
        self._path = path
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock without waiting. Raises OperatorError when another server has it, or the file cannot be."""
        try:
            with contextlib.ExitStack() as undo:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
                undo.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                undo.pop_all()
        except BlockingIOError as error:
            raise self._held() from error
        except OSError as error:
            raise OperatorError(
                f"The lock file {self._path} cannot be written: {error.strerror}.",
                advice="Check the output folder, its permissions and the room on its disk.",
                path=str(self._path),
            ) from error
        self._fd = fd

    def release(self) -> None:
        """Let the lock go; without effect when it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _held(self) -> OperatorError:
        # The owner may just have taken the lock and not have written its id yet.
        pid = self._path.read_text(encoding="ascii", errors="replace").strip() or "unknown"
        return OperatorError(
            f"Another mldserver (process {pid}) is using this ledger.",
            advice="Stop it first, or give this server an output folder of its own.",
            path=str(self._path),
            pid=pid,
        )
