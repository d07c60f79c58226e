"""What processes there are."""

from __future__ import annotations

import contextlib
from pathlib import Path


def group_members(leader: int) -> list[int]:
    """The processes of a group that live; a killed one whose new parent has not reaped it yet is dead."""
    members = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = entry.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                members.append(int(entry.parent.name))
    return members
