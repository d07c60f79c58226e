"""What of the matrix the machine has room for: memory and open files."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["FILES", "Room", "open_files"]

_SERVERS: Final = 2
"""Without workers, and with."""
_SOCKETS: Final = 1 + _SERVERS
"""Of each shard here: to the echo and to the servers."""
_PIPES: Final = 2
"""Of each shard's process of amazon_kclpy."""
_OTHER_FILES: Final = 200

FILES: Final = 2000 * (_SOCKETS + _PIPES) + _OTHER_FILES
"""Open files that the largest cell needs."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of memory, and open files of a process."""

    memory: int
    files: int

    def lacking(self, connections: int, line: int) -> str | None:
        """Return what is lacking to send lines of so many bytes on so many connections at the same time.

        Both servers may hold all of them, one after the other, and need not give the memory back in between.
        """
        return self._files_lacking(connections * _SOCKETS) or self._memory_lacking(
            f"{connections:,} lines of {line / 2**20:.1f} MiB in flight, held by {_SERVERS} servers",
            _SERVERS * connections * line,
        )

    def lacking_for_processes(self, processes: int, each: int, line: int) -> str | None:
        """Return what is lacking for so many more processes that hold so many bytes each, while others get the lines."""
        return self._files_lacking(processes * (_SOCKETS + _PIPES)) or self._memory_lacking(
            f"{processes:,} processes of {each / 2**20:.1f} MiB beside the servers",
            processes * (each + _SERVERS * line),
        )

    def _files_lacking(self, needed: int) -> str | None:
        needed += _OTHER_FILES
        return f"{needed:,} open files, the limit is {self.files:,}" if needed > self.files else None

    def _memory_lacking(self, what: str, needed: int) -> str | None:
        if needed <= self.memory:
            return None
        return f"{what}: {needed / 2**30:.1f} GiB, where {self.memory / 2**30:.1f} GiB may be used"


@contextlib.contextmanager
def open_files() -> Iterator[None]:
    """Let this process and those that it starts open as many files as are needed, or as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        yield
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
