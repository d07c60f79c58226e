"""A whole server, as ``mldserver serve`` runs it, with a small engine in Spark's place and its log in a file."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from pathlib import Path
from typing import Any, Final

import uvloop

from mldserver.admin.endpoint import AdminEndpoint
from mldserver.base.clock import SystemClock
from mldserver.config.kinds import TcpAddress, UnixAddress
from mldserver.config.settings import Settings
from mldserver.observe.logging import logging_to
from mldserver.server import Server
from mldserver.testing import LocalEngine

__all__ = ["BUSY", "SHARD"]

BUSY: Final = "busy"
SHARD: Final = "shard"
"""The shard that the stream lists, with ``how`` \"listed\"."""
LONG_MS: Final = 2.0


class OneShard:
    """ListShards of a stream that has one shard, for every key."""

    async def list_shards(self, **_request: Any) -> dict[str, Any]:
        """Return the page."""
        keys = {"StartingHashKey": "0", "EndingHashKey": str((1 << 128) - 1)}
        numbers = {"StartingSequenceNumber": "1"}
        return {"Shards": [{"ShardId": SHARD, "HashKeyRange": keys, "SequenceNumberRange": numbers}]}


def main(workers: str, handler: str, how: str, path: str) -> int:
    """Run it until it is told to stop; ``how``: "watched", "shown", "listed" (the stream's one shard), or nothing."""
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
        stream="bench" if how == "listed" else None,
        state_bytes=1 << 30,  # a million timers
    )
    gc.freeze()  # as `mldserver serve` does
    with logging_to(settings):
        return uvloop.run(_serve(settings, folder / BUSY if how in {"watched", "listed"} else None))


async def _serve(settings: Settings, busy: Path | None) -> int:
    endpoint = None if settings.admin is None else AdminEndpoint(settings, SystemClock())
    listed = None if settings.stream is None else lambda: contextlib.nullcontext(OneShard())
    server = Server(settings, engine=LocalEngine(), endpoint=endpoint, kinesis=listed)
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
