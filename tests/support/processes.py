"""What processes there are, and a port that no other gets."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path


def group_members(leader: int) -> list[int]:
    """The processes of a group that have not ended."""
    members = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            group = entry.read_text().rpartition(")")[2].split()[2]
            if int(group) == leader and not has_ended(int(entry.parent.name)):
                members.append(int(entry.parent.name))
    return members


def has_ended(process: int) -> bool:
    """Whether a process is gone, or waits for a parent that looks, or was killed and had no turn since to die."""
    try:
        status = Path(f"/proc/{process}/status").read_text("utf-8", "replace")
    except OSError:
        return True
    told = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return told["State"][0] in "ZX" or bool(int(told["ShdPnd"], 16) & 1 << (signal.SIGKILL - 1))


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port of loopback that is given to nobody else while the block runs.

    Nobody is there until a program listens that was told of it, and may listen there again and again.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
