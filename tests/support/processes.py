"""What processes there are."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path


def group_members(leader: int) -> list[int]:
    """The processes of a group that live; one that is killed is dead, though it was not reaped, or had no turn since."""
    members = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = entry.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z" and not _is_killed(entry.parent):
                members.append(int(entry.parent.name))
    return members


def _is_killed(process: Path) -> bool:
    pending = (line for line in (process / "status").read_text().splitlines() if line.startswith("ShdPnd:"))
    return bool(int(next(pending).split()[1], 16) & 1 << (signal.SIGKILL - 1))
