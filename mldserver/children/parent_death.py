"""A process that dies with its parent: an orphan would go on working, and keep its files and locks.

As a program it becomes another one that does: ``python -ISE parent_death.py PARENT PROGRAM ARGUMENTS…``. Linux only
(``prctl``); elsewhere a process is not tied, and the parent's supervisor must end the group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Tie this process to its parent; it ends at once if that is not ``parent`` (a process id) any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:  # it died before the tie was made
            raise SystemExit(1)


def main(arguments: list[str]) -> None:
    """Tie this process to ``PARENT`` and become the program. Does not return."""
    die_with_parent(int(arguments[0]))
    os.execvp(arguments[1], arguments[1:])  # noqa: S606  # no shell is wanted; the command is the supervisor's own


if __name__ == "__main__":
    main(sys.argv[1:])
