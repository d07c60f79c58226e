"""Which servers are dead for sure: each holds a lock on a file of its own, and the lock dies with its process.

A server that crashed is then buried by the next one at once, instead of after its beats have stopped for long. Where
the lock cannot tell (the file lies on another host's disk, or the file system knows no locks), the beats decide.
"""

from __future__ import annotations

import fcntl
import os
import time
from typing import TYPE_CHECKING, Final

from mldserver.errors import NotThereYet
from mldserver.output.layout import server_tag

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ServerLocks"]

_PATIENCE: Final = 20


class ServerLocks:
    """One folder with a locked file for each server that lives. Blocking, for moments."""

    def __init__(self, folder: Path) -> None:
        """Name the folder; nothing is touched yet."""
        self._folder = folder
        self._held: tuple[Path, int] | None = None

    def _path(self, server_id: str) -> Path:
        return self._folder / f"{server_tag(server_id)}.lock"

    def hold(self, server_id: str) -> None:
        """Show that a server lives, until ``release`` or the process's end.

        Raises OperatorError when another process shows it of this name, OSError when the folder cannot be written.
        Where the file system knows no locks, nothing is shown.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(server_id)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        for _ in range(_PATIENCE):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # Another server may just be looking whether this one is dead.
                time.sleep(0.01)
                continue
            except OSError:
                pass  # a file system that knows no locks
            self._held = (path, descriptor)
            return
        os.close(descriptor)
        raise NotThereYet(
            f"Another server runs under the name {server_id}.",
            advice="Stop it first, or give each server on the ledger a server_id of its own.",
            server=server_id,
        )

    def is_dead(self, server_id: str) -> bool:
        """Whether a server held its file and holds it no more; False also when that cannot be told."""
        return _is_free(self._path(server_id))

    def held(self) -> tuple[Path, ...]:
        """Return the files of servers that live, or of which it cannot be told."""
        return tuple(path for path in sorted(self._folder.glob("*.lock")) if not _is_free(path))

    def forget(self, server_id: str) -> None:
        """Take away the file of a server that was buried."""
        self._path(server_id).unlink(missing_ok=True)

    def release(self) -> None:
        """Let the own file go, and take it away: the server has left the ledger."""
        if self._held is not None:
            self._held[0].unlink(missing_ok=True)
        self.drop()

    def drop(self) -> None:
        """Let the own file go as the process's end does; without effect when none is held."""
        if self._held is not None:
            os.close(self._held[1])
            self._held = None


def _is_free(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
