"""A whole server, as ``mldserver serve`` runs it, with a small engine in Spark's place and its log in a file."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from pathlib import Path
from typing import Final

import uvloop

from mldserver.admin.endpoint import AdminEndpoint
from mldserver.base.clock import SystemClock
from mldserver.config.kinds import TcpAddress, UnixAddress
from mldserver.config.settings import Settings
from mldserver.observe.logging import logging_to
from mldserver.server import Server
from mldserver.testing import LocalEngine

__all__ = ["BUSY"]

BUSY: Final = "busy"
LONG_MS: Final = 2.0


def main(workers: str, handler: str, how: str, path: str) -> int:
    """Run it until it is told to stop; ``how``: "watched", "shown", or neither."""
    folder = Path(path).parent
    settings = Settings(
        handler=f"bench.hot.handlers.{handler}",
        out=folder / "out",
        listen=UnixAddress(Path(path)),
        log_file=folder / "log",
        log_format="json",
        connection_limit=4096,
        workers=None if workers == "inline" else int(workers),
        admin=TcpAddress("127.0.0.1", 0) if how == "shown" else None,
    )
    gc.freeze()  # as `mldserver serve` does
    with logging_to(settings):
        return uvloop.run(_serve(settings, folder / BUSY if how == "watched" else None))


async def _serve(settings: Settings, busy: Path | None) -> int:
    endpoint = None if settings.admin is None else AdminEndpoint(settings, SystemClock())
    server = Server(settings, engine=LocalEngine(), endpoint=endpoint)
    if busy is None:
        return await server.run()
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(_watch(busy))
        code = await server.run()
        watch.cancel()
    return code


async def _watch(busy: Path) -> None:
    """Write how long (ms) the event loop worked in one go, whenever that was long.

    By its thread's CPU time: other processes that take the processor away meanwhile do not count.
    """
    with busy.open("w", buffering=1) as file:
        while True:
            before = time.thread_time_ns()
            await asyncio.sleep(0.001)
            worked_ms = (time.thread_time_ns() - before) / 1e6
            if worked_ms > LONG_MS:
                file.write(f"{worked_ms:.1f}\n")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
