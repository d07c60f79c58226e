"""Listening sockets: for daemons, and for administrators of a server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_BACKLOG: Final = 128
_SOCKET_MODE: Final = 0o600
_NAME_BYTES: Final = 107
"""Of a Unix socket's address on Linux (`man 7 unix`), without the final zero."""


async def listen_tcp(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 selects a free port. Raises OSError, and UnicodeError for an invalid name."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def listen_unix(path: Path) -> socket.socket:
    """Return a Unix socket that listens, for this user alone. Raises OSError.

    Removes the socket of a dead server first. Another kind of file, or a socket in use, stays: bind then fails.
    """
    with short_name(path) as name:
        try:
            if stat.S_ISSOCK(path.lstat().st_mode):
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                    probe.setblocking(False)
                    probe.connect(name)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except (FileNotFoundError, BlockingIOError):
            pass  # nothing is there, or a busy server has the socket
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(name)
            # No client can connect before listen: the mode holds from the first moment on.
            path.chmod(_SOCKET_MODE)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    return listener


@contextlib.contextmanager
def short_name(path: Path) -> Iterator[str]:
    """Yield a name for a Unix socket's path that fits into a socket address, however long the path. Raises OSError."""
    if len(os.fsencode(path)) <= _NAME_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
