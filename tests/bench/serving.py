"""A whole server in a process of its own, and a daemon's connection to it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from bench.hot.peers import Connection, environment

__all__ = ["processes_of", "serving"]

_START_SECONDS: Final = 60.0


@contextlib.asynccontextmanager
async def serving(
    workers: str, handler: str, folder: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Connection]]:
    """Run a server (``bench.hot.whole_server``) on a folder, and connect to it."""
    socket = folder / "socket"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "bench.hot.whole_server", workers, handler, "listed", str(socket)),
        env=environment(),
    )
    try:
        async with asyncio.timeout(_START_SECONDS):
            while not socket.exists():  # nobody tells
                if process.returncode is not None:
                    raise RuntimeError(f"{handler} did not start: exit code {process.returncode}")
                await asyncio.sleep(0.02)
        connection = Connection(*await asyncio.open_unix_connection(str(socket), limit=1 << 20))
        yield process, connection
        connection.writer.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def processes_of(parent: int) -> list[int]:
    """Return the ids of a process and of all that it started, itself first."""
    found = [parent]
    for each in found:
        for task in Path(f"/proc/{each}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found
