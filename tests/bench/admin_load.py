"""What clients of the admin endpoint cost the pipeline: fifty of them, half of whom behave, beside daemons that saturate it.

Rounds with and without them take turns on one server. Then thousands of requests, and what memory is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.hot import peers
from bench.hot.lines import SHAPES
from bench.hot.runs import Run, connect
from bench.rounds import in_turn
from support.raw_http import asked, connected

__all__ = ["measure"]

DAEMONS: Final = 4
KEYS: Final = ("records_s", "most_records_s", "parent_ns", "least_parent_ns")
_SECOND: Final = 1.0
_SCRAPE: Final = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


def measure(rounds: int, share: float, requests: int) -> dict[str, float]:
    """Return records a second and the server's CPU (ns) a record, ``alone`` and ``beside`` clients, as medians and as the
    best of any round; seconds until ``/livez`` answers meanwhile, and bytes that the server holds before and after so many
    ``requests``.
    """
    return asyncio.run(_measure(rounds, share, requests))


async def _measure(rounds: int, share: float, requests: int) -> dict[str, float]:
    shape = replace(SHAPES[1], batches=400)  # about a second
    async with peers.mldserver(shown=True) as server:
        address = await _address(server)
        runs = {
            name: Run(server, await connect(server, DAEMONS, name), shape, shape.batches_each(share, DAEMONS))
            for name in ("alone", "beside")
        }
        answered: list[float] = []
        for run in runs.values():
            await run.warm_up()
        async with _clients(address, "load") as load, _clients(address, "probe") as probe:
            for name in in_turn(tuple(runs), rounds):
                run = runs[name]
                if name == "alone":
                    await asyncio.sleep(_SECOND)  # as long as clients take to come
                    await run.round()
                    continue
                await load(True)
                await probe(True)
                await run.round()
                answered += await probe(False)
                await load(False)
        await _ask(address, requests // 10)
        held = peers.resident(server.processes[0])
        await _ask(address, requests)
        return {
            **{f"{name} {key}": run.result()[key] for name, run in runs.items() for key in KEYS},
            "livez_seconds": statistics.median(answered),
            "longest_livez_seconds": max(answered),
            "bytes before": held,
            "bytes after": peers.resident(server.processes[0]),
        }


async def _address(server: peers.Peer) -> str:
    log = Path(server.path).parent / "log"  # type: ignore[attr-defined]  # it listens on a Unix socket
    while True:
        for line in log.read_text().splitlines():
            if (event := json.loads(line))["event"] == "admin.listening":
                return str(event["address"])
        await asyncio.sleep(0.05)


async def _ask(address: str, requests: int) -> None:
    """Ask for everything."""
    paths = itertools.cycle(("/metrics", "/status", "/livez", "/readyz", "/history", "/", "/none"))
    for _ in range(requests):
        await asked(address, next(paths))


@contextlib.asynccontextmanager
async def _clients(address: str, kind: str) -> AsyncIterator[Callable[[bool], Awaitable[list[float]]]]:
    """Run clients in a process of their own; what is yielded lets them come or go, and returns how long /livez took."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.admin_load", address, kind),
        env=peers.environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    async def let(come: bool) -> list[float]:
        stdin.write(b"come\n" if come else b"go\n")
        return list(map(float, (await stdout.readline()).split()))

    try:
        yield let
    finally:
        stdin.close()
        await process.wait()


# The clients' process.


async def _scrape(address: str) -> None:
    while True:
        await asked(address, "/metrics")
        await asyncio.sleep(_SECOND)


async def _watch(address: str) -> None:
    client = await connected(address)
    client.writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    while await client.reader.read(1 << 16):
        pass


async def _garble(address: str) -> None:
    while True:
        client = await connected(address)
        client.writer.write(random.randbytes(512) + b"\r\n\r\n")
        await client.ended()
        await asyncio.sleep(_SECOND)


async def _dawdle(address: str) -> None:
    """Send and read a byte a second."""
    client = await connected(address)
    for byte in _SCRAPE:
        client.writer.write(bytes([byte]))
        await asyncio.sleep(_SECOND)
        if client.reader.at_eof():
            break


async def _hang(address: str) -> None:
    """Ask for much, and read a byte a second of it."""
    client = await connected(address)
    client.reader._limit = 1  # type: ignore[attr-defined]  # nothing is read ahead
    client.writer.write(_SCRAPE * 50)
    while await client.reader.read(1):  # noqa: ASYNC110  # it is the pace that counts
        await asyncio.sleep(_SECOND)


async def _again(kind: Callable[[str], Awaitable[None]], address: str) -> None:
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await kind(address)
        await asyncio.sleep(_SECOND)


async def _probe(address: str, answered: list[float]) -> None:
    while True:
        began = time.perf_counter()
        client = await connected(address)
        await client.ask("/livez")
        answered.append(time.perf_counter() - began)
        client.writer.transport.abort()
        await asyncio.sleep(_SECOND / 10)


async def _come_and_go(address: str, kind: str) -> None:
    kinds = itertools.cycle((_scrape, _watch, _garble, _dawdle, _hang))
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []
    answered: list[float] = []
    while said := await loop.run_in_executor(None, sys.stdin.readline):
        if said == "come\n" and kind == "load":
            tasks = [asyncio.create_task(_again(next(kinds), address)) for _ in range(50)]
            await asyncio.sleep(_SECOND)
        elif said == "come\n":
            answered.clear()
            tasks = [asyncio.create_task(_probe(address, answered))]
        else:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        print(*answered, flush=True)


if __name__ == "__main__":
    if sys.argv[2] == "load":
        os.nice(19)  # they would be elsewhere
    asyncio.run(_come_and_go(*sys.argv[1:]))
