"""What functions that misbehave do to a healthy one in the same server: its batch latency and its windows, alone and beside each of them.

One server, ``mldserver serve`` with Spark, runs the healthy function and five others, which do harm only while they get batches: ``raises``
fails on every record, ``floods`` prints 10,000 lines a batch, ``sleeps`` sleeps 10 s a batch, ``kills`` kills its worker with each
record, ``fills`` has more rows than its ``segment_disk_bytes`` allows (its only shard holds the watermark, so it goes on). Phases take turns: the healthy function alone, then beside one of them, or beside
all of them.

``p50_ms``, ``p99_ms``: how long the server takes to answer one of its small batches. ``window_s``: the longest time from a window's end until it is
published.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from bench.functions import WITHOUT_SPARK, counting_handler
from bench.hot.lines import initialize
from bench.hot.peers import Connection
from bench.rounds import in_turn
from support.host import Function, Host, hosting

__all__ = ["HARMFUL", "MOST_LATENCY", "measure"]

MOST_LATENCY: Final = 1.5
"""So many times the p99 of the healthy function alone, at most."""
_WINDOW_SECONDS: Final = 5
_PACE_SECONDS: Final = 0.02
_HARM_SECONDS: Final = 0.5
_ALL: Final = "all of them"
_ALONE: Final = "alone"
HARMFUL: Final = {
    "raises": '''
"""Fails on every record."""


def process_record(record):
    raise ValueError("always")
''',
    "floods": '''
"""Prints 10,000 lines a batch."""


def process_records(records):
    for number in range(10_000):
        print("flood", number)
''',
    "sleeps": '''
"""Sleeps 10 s a batch."""
import time


def process_records(records):
    time.sleep(10)
''',
    "kills": '''
"""Kills its worker with each record."""
import os
import signal


def process_record(record):
    os.kill(os.getpid(), signal.SIGKILL)
''',
    "fills": '''
"""Gives rows of 100 KB that no window closes."""
import random

from mldserver import tumbling

schema = "data BINARY"
windows = tumbling("1 day")


def process_record(record):
    return (random.randbytes(100_000),)
''',
}
_SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "healthy": {"flush_interval": "1 s"},
    "kills": {"attempts": 2},
    "fills": {"segment_disk_bytes": "2 MiB", "flush_interval": "1 s"},
}


def measure(seconds: float, rounds: int, folder: Path, *, spark: bool = True) -> dict[str, dict[str, float]]:
    """Return the figures of each phase. ``seconds``: how long a phase runs. Without ``spark`` no function has rows."""
    texts = (
        {"healthy": counting_handler(_WINDOW_SECONDS), **HARMFUL}
        if spark
        else {"healthy": WITHOUT_SPARK, **HARMFUL}
    )
    if not spark:
        del texts["fills"]
    return asyncio.run(_measure(texts, seconds, rounds, folder))


async def _measure(
    texts: dict[str, str], seconds: float, rounds: int, folder: Path
) -> dict[str, dict[str, float]]:
    functions = [
        Function(name, text, {"listen": "127.0.0.1:0", **_SETTINGS.get(name, {})})
        for name, text in texts.items()
    ]
    async with hosting(folder, *functions) as host:
        await host.start()
        for name in texts:
            await host.until(partial(host.named, "server.ready", function=name))
        probe = Shard(host, "healthy")
        await probe.connect()
        harmful = {name: Shard(host, name) for name in texts if name != probe.function}
        await _phase(probe, harmful, seconds)  # everything warms up
        found: dict[str, list[tuple[list[float], float]]] = {}
        for phase in in_turn((_ALONE, *harmful, _ALL), rounds):
            chosen = {name: each for name, each in harmful.items() if phase in {name, _ALL}}
            found.setdefault(phase, []).append(await _phase(probe, chosen, seconds))
        probe.close()
        if (code := await host.stopped()) != 0:
            raise RuntimeError(f"the server has stopped with the exit code {code}: {host.tail()}")
    return {phase: _figures(each) for phase, each in found.items()}


def _figures(rounds: list[tuple[list[float], float]]) -> dict[str, float]:
    taken = np.concatenate([seconds for seconds, _ in rounds]) * 1000
    p50, p99 = np.percentile(taken, [50, 99])
    return {"p50_ms": float(p50), "p99_ms": float(p99), "window_s": max(window for _, window in rounds)}


class Shard:
    """The daemon of one function's shard."""

    def __init__(self, host: Host, function: str) -> None:
        """Deliver to a function of a server."""
        self.host = host
        self.function = function
        self._connection: Connection | None = None
        self._numbers = itertools.count()

    async def connect(self) -> None:
        """Connect and initialise the shard."""
        address, _, port = (await self.host.address(self.function)).rpartition(":")
        self._connection = Connection(*await asyncio.open_connection(address, int(port), limit=1 << 20))
        await self._connection.exchange(initialize("shard"))

    def close(self) -> None:
        """End the connection, whatever was not answered."""
        if self._connection is not None:
            self._connection.writer.transport.abort()

    async def give(self, records: int) -> float:
        """Send a batch, and return the seconds until its answer."""
        assert self._connection is not None
        line, began = _line(next(self._numbers), records), time.perf_counter()
        await self._connection.exchange(line)
        return time.perf_counter() - began

    async def keep_giving(self) -> None:
        """Connect, and send batches until cancelled, each once the one before is answered."""
        try:
            await self.connect()
            while True:
                await self.give(50)
                await asyncio.sleep(_HARM_SECONDS)
        finally:
            self.close()


async def _phase(probe: Shard, harmful: dict[str, Shard], seconds: float) -> tuple[list[float], float]:
    """Return how long each batch of the healthy function took, and its latest window."""
    windows = partial(probe.host.named, "window.done", function=probe.function)
    known = len(windows())
    async with asyncio.TaskGroup() as group:
        giving = [group.create_task(each.keep_giving()) for each in harmful.values()]
        ends, taken = time.monotonic() + seconds, []
        while (left := ends - time.monotonic()) > 0:
            taken.append(await probe.give(5))
            await asyncio.sleep(min(_PACE_SECONDS, left))
        for task in giving:
            task.cancel()
    return taken, max((event["lag_seconds"] for event in windows()[known:]), default=0.0)


def _line(batch: int, records: int) -> bytes:
    told = [
        {
            "action": "record",
            "data": base64.b64encode(json.dumps({"device": f"d{place}", "value": place}).encode()).decode(),
            "partitionKey": f"d{place}",
            "sequenceNumber": f"4959033827149025660855{batch:08d}{place:026d}",
            "subSequenceNumber": 0,
            "approximateArrivalTimestamp": time.time_ns() // 1_000_000,
        }
        for place in range(records)
    ]
    line = {"action": "processRecords", "records": told, "millisBehindLatest": 0}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"
