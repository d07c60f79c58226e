"""Where a batch of one record goes: how many Python functions each part of the server calls for it.

What one call costs is measured beside it, so that the product can be set against the CPU of a batch.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

from bench.hot.lines import SHAPES, initialize
from bench.hot.peers import Connection

import mldserver
from mldserver.config.kinds import UnixAddress
from mldserver.config.settings import Settings
from mldserver.observe.logging import logging_to
from mldserver.server import Server
from mldserver.testing import LocalEngine

__all__ = ["calls_of_a_batch"]

_PACKAGE: Final = str(Path(mldserver.__file__).parent)
_BATCHES: Final = 200
_WARM: Final = 50
_CLIENT: Final = ("bench", "asyncio/streams.py", "json/")


async def calls_of_a_batch(workers: int | None = None) -> dict[str, float]:
    """Return the calls a batch by part of the server, and under ``ns a call`` what one costs here at the least.

    With ``workers``: those in the server's own process.
    """
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found[_part(frame.f_code.co_filename)] += 1

    async for connection in _served(workers):
        line = SHAPES[0].line()
        for number in range(_WARM + _BATCHES):
            if number == _WARM:
                sys.setprofile(count)
            await connection.exchange(SHAPES[0].numbered(line, number))
        sys.setprofile(None)
    calls = {part: number / _BATCHES for part, number in found.most_common() if part and number >= _BATCHES}
    return {**calls, "ns a call": _call_ns()}


async def _served(workers: int | None) -> AsyncIterator[Connection]:
    """Give a connection to a server in this process."""
    with tempfile.TemporaryDirectory(prefix="hot-") as folder:
        path = Path(folder) / "socket"
        settings = Settings(
            handler="bench.hot.handlers.touch",
            out=Path(folder) / "out",
            listen=UnixAddress(path),
            log_file=Path(folder) / "log",
            log_format="json",
            workers=workers,
        )
        with logging_to(settings):
            server = Server(settings, engine=LocalEngine())
            async with asyncio.TaskGroup() as group:
                group.create_task(server.run())
                await server.listening()
                connection = Connection(*await asyncio.open_unix_connection(str(path)))
                await connection.exchange(initialize("shard"))
                yield connection
                connection.writer.close()
                server.stop("measured")


def _part(file: str) -> str:
    """Return the part of the server that a source file belongs to; empty for the client's."""
    if file.startswith(_PACKAGE):
        return Path(file).relative_to(_PACKAGE).parts[0].removesuffix(".py")
    if any(each in file for each in _CLIENT):
        return ""
    known = [each for each in ("asyncio", "structlog") if each in file]
    return known[0] if known else "others"


def _call_ns() -> float:
    """Return what the call of a method that does nothing costs, in ns."""

    class Nothing:
        def method(self) -> None:
            pass

    one, least = Nothing(), float("inf")
    for _ in range(20):
        began = time.perf_counter_ns()
        for _ in range(1000):
            one.method()
        least = min(least, (time.perf_counter_ns() - began) / 1000)
    return least
