"""Becomes another program that dies with its parent: ``python -ISE parent_death.py PARENT PROGRAM ARGUMENTS…``.

A JVM left behind by a killed supervisor would go on holding leases. Linux only (``prctl``); elsewhere the program runs
untethered, and whatever runs the supervisor must end the group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Tie this process to ``PARENT`` (a process id) and become the program. Does not return."""
    parent, program = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the tie was made
            raise SystemExit(1)
    os.execvp(program[0], program)  # noqa: S606  # no shell is wanted; the command is the supervisor's own


if __name__ == "__main__":
    main(sys.argv[1:])
