"""Keyed state: a count for each key, from the socket until the counts are durable, beside other programs that do the same.

Every contender runs in a fresh process and gets the same lines, 500 records of about 9 bytes in each, with keys drawn at random from
10,000 or 1,000,000, and gives a row for each record. ``keyed`` and ``stateless`` are whole servers (inline), ``worker`` is the keyed
one with a worker process: each batch is sent when the one before is answered, and rows become Parquet. The others read the lines from
a file and write rows as JSON lines (``state_peers.py``).

``open_seconds``: how long a restarted server takes to open the shard, and with it the store. ``busy_ms``: the longest time for which the
event loop of the keyed server was not free, by its CPU time, with all batches and flushes in it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from bench.hot.lines import initialize
from bench.hot.peers import environment, process_cpu_ns
from bench.hot.whole_server import BUSY, SHARD
from bench.rounds import in_turn
from bench.serving import processes_of, serving
from bench.state_peers import PEERS

__all__ = ["KEYS", "LEAST", "measure"]

KEYS: Final = (10_000, 1_000_000)
BATCH: Final = 500
SERVERS: Final = {
    "stateless": ("inline", "uncounted"),
    "keyed": ("inline", "counted"),
    "worker": ("1", "counted"),
}
LEAST: Final = {"stateless": 0.7, "bytewax": 1.0, "quix": 3.0}
"""How many times a contender's rate the keyed server's must be."""
_NOT_INSTALLED: Final = 3
_LAST: Final = b'{"action":"shutdownRequested"}\n'


def measure(records: int, rounds: int, folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Return by number of keys, by contender: ``records_s`` and ``cpu_us`` (a record), medians of the rounds.

    Contenders that are not installed are left out.
    """
    return {str(keys): asyncio.run(_measure(records, keys, rounds, folder / str(keys))) for keys in KEYS}


async def _measure(records: int, keys: int, rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    lines = await asyncio.to_thread(_write_lines, records // BATCH, keys, folder)
    found: dict[str, list[dict[str, float]]] = {}
    for number, name in enumerate(in_turn([*SERVERS, *PEERS], rounds)):
        place = folder / f"{number}-{name}"
        place.mkdir()
        told = await (_server if name in SERVERS else _peer)(name, lines, place)
        if told is not None:
            found.setdefault(name, []).append(told)
    return {
        name: {figure: statistics.median(each[figure] for each in told) for figure in told[0]}
        for name, told in found.items()
    }


def _write_lines(batches: int, keys: int, folder: Path) -> Path:
    folder.mkdir(parents=True)
    lines = folder / "lines"
    with lines.open("wb") as file:
        file.writelines(_lines(batches, keys))
    return lines


def _lines(batches: int, keys: int) -> Iterator[bytes]:
    dice = np.random.default_rng(keys)
    for batch in range(batches):
        drawn = dice.integers(keys, size=BATCH).tolist()
        records = [
            {
                "action": "record",
                "data": base64.b64encode(b'{"n":%d}' % place).decode(),
                "partitionKey": f"key-{key}",
                "sequenceNumber": f"4959033827149025660855{batch:08d}{place:026d}",
                "subSequenceNumber": 0,
                "approximateArrivalTimestamp": 1_800_000_000_000 + batch,
            }
            for place, key in enumerate(drawn)
        ]
        line = {"action": "processRecords", "records": records, "millisBehindLatest": 100}
        yield json.dumps(line, separators=(",", ":")).encode() + b"\n"


async def _peer(name: str, lines: Path, folder: Path) -> dict[str, float] | None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "ignore", "-m", "bench.state_peers", name, str(lines), str(folder)),
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await process.communicate()
    if process.returncode == _NOT_INSTALLED:
        return None
    told = json.loads(printed)
    return _figures(told["records"], told["seconds"], told["cpu"])


async def _server(name: str, lines: Path, folder: Path) -> dict[str, float]:
    batches = (await asyncio.to_thread(lines.read_bytes)).splitlines(keepends=True)
    async with serving(*SERVERS[name], folder) as (process, connection):
        await connection.exchange(initialize(SHARD))
        watched = folder / BUSY
        started = len(watched.read_text().splitlines())
        before, began = _cpu_seconds(process), time.perf_counter()
        for line in batches:
            await connection.exchange(line)
        await connection.exchange(_LAST)  # it is answered when all is durable
        told = _figures(len(batches) * BATCH, time.perf_counter() - began, _cpu_seconds(process) - before)
    busy = [float(text) for text in watched.read_text().splitlines()[started:]]
    async with serving(*SERVERS[name], folder) as (_, connection):
        began = time.perf_counter()
        await connection.exchange(initialize(SHARD))
        opened = time.perf_counter() - began
    return told | {"busy_ms": max(busy, default=0.0), "open_seconds": opened}


def _figures(records: int, seconds: float, cpu_seconds: float) -> dict[str, float]:
    return {"records_s": records / seconds, "cpu_us": cpu_seconds * 1e6 / records}


def _cpu_seconds(process: asyncio.subprocess.Process) -> float:
    """Return the CPU time of a server and its workers so far."""
    return sum(map(process_cpu_ns, processes_of(process.pid))) / 1e9
