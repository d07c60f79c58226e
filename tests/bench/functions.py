"""Five functions in one server against five servers of one function: what memory and processor the same load takes.

Each server is ``mldserver serve``, with Spark and its default settings. Every function gets the same batches over a socket of its own
at a fixed pace, makes a row of each record, and counts the rows of each window on Spark. Windows are cut on the arrival time.

``resident``: the memory of all processes, the JVMs included, as the system counts it for each of them (RSS), while the load runs: the
median of the samples. ``peak``: the largest of them; why it is larger is not known yet. ``proportional``: the
same, with pages that processes share counted once (PSS), when all windows are published. ``cpu_s``: the processor time of all processes from the first record until the last window is published. ``start_cpu_s``:
before, from the start until every function is ready.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow.parquet as pq
from bench.hot.lines import initialize
from bench.hot.peers import Connection, Peer, resident
from support.host import Function, Host, hosting

__all__ = ["COUNT", "MOST", "WITHOUT_SPARK", "counting_handler", "measure"]

COUNT: Final = 5
MOST: Final = {"resident": 0.45, "cpu_s": 0.80}
"""Of what five servers take, one may take so much at most."""
BATCH: Final = 200
_PACE_SECONDS: Final = 0.25
_WINDOW_SECONDS: Final = 10
_PATIENCE_SECONDS: Final = 240.0
_END: Final = b'{"action":"shardEnded"}\n'
_TICKS: Final = os.sysconf("SC_CLK_TCK")
WITHOUT_SPARK: Final = '''
"""Reads each record, and gives no row."""


def process_record(record):
    record.json()
'''


def counting_handler(window_seconds: int) -> str:
    """Return the text of a handler that counts the readings of each device on Spark."""
    return f'''
"""Counts the readings of each device in windows of {window_seconds} seconds."""
from pyspark.sql import functions as F

from mldserver import tumbling

schema = "device STRING, value DOUBLE"
windows = tumbling("{window_seconds} seconds")


def process_record(record):
    reading = record.json()
    return reading["device"], reading["value"]


def on_window(rows, window):
    return rows.groupBy("device").agg(F.count("*").alias("readings"), F.avg("value").alias("mean"))
'''


def measure(seconds: float, folder: Path, *, spark: bool = True) -> dict[str, dict[str, float]]:
    """Return the figures of ``one`` server and of ``five``. ``seconds``: how long the load runs. Without ``spark`` there are no rows."""
    found = {}
    for name, servers in (("five", COUNT), ("one", 1)):
        found[name] = asyncio.run(_measure(servers, seconds, folder / name, spark=spark))
    return found


async def _measure(servers: int, seconds: float, folder: Path, *, spark: bool) -> dict[str, float]:
    text, each = counting_handler(_WINDOW_SECONDS) if spark else WITHOUT_SPARK, COUNT // servers
    functions = [Function(f"f{number}", text, {"listen": "127.0.0.1:0"}) for number in range(COUNT)]
    async with contextlib.AsyncExitStack() as stack:
        hosts = [
            await stack.enter_async_context(hosting(folder / str(number), *functions[number * each :][:each]))
            for number in range(servers)
        ]
        owners = {function.name: hosts[number // each] for number, function in enumerate(functions)}
        for host in hosts:
            await host.start()
        peers = [Peer("server", [host.pid]) for host in hosts]
        for name, host in owners.items():
            await host.until(partial(host.named, "server.ready", function=name))
        started = _cpu_seconds(peers)
        async with asyncio.TaskGroup() as group:
            sampler = Sampler(peers)
            sampling = group.create_task(sampler.run())
            loads = [group.create_task(_load(host, name, seconds)) for name, host in owners.items()]
            await asyncio.wait(loads)
            sampling.cancel()
        sent = sum(load.result() for load in loads)
        if spark:
            await asyncio.gather(*(_published(host, name, sent // COUNT) for name, host in owners.items()))
        figures = {
            "resident": statistics.median(sampler.found),
            "peak": float(max(sampler.found)),
            "proportional": float(sum(peer.resident_bytes() for peer in peers)),
            "processes": float(sum(len(peer.children()) for peer in peers)),
            "start_cpu_s": started,
            "cpu_s": _cpu_seconds(peers) - started,
            "records": float(sent),
        }
        codes = [await host.stopped() for host in hosts]
    if any(codes):
        raise RuntimeError(f"servers have stopped with the exit codes {codes}")
    return figures


class Sampler:
    """Looks once a second at how much memory servers have resident."""

    def __init__(self, servers: Sequence[Peer]) -> None:
        """Watch these."""
        self._servers = servers
        self.found: list[int] = []
        """What it saw, in bytes."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            found = 0
            for process in (each for server in self._servers for each in server.children()):
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    found += resident(process)
            self.found.append(found)
            await asyncio.sleep(1)


async def _load(host: Host, function: str, seconds: float) -> int:
    """Send batches at a fixed pace, then end the shard; return how many records that were."""
    address, _, port = (await host.address(function)).rpartition(":")
    connection = Connection(*await asyncio.open_connection(address, int(port), limit=1 << 20))
    await connection.exchange(initialize("shard"))
    batches = max(1, round(seconds / _PACE_SECONDS))
    began = time.monotonic()
    for batch in range(batches):
        await asyncio.sleep(max(0.0, began + batch * _PACE_SECONDS - time.monotonic()))
        await connection.exchange(_line(batch))
    await connection.exchange(_END)
    connection.writer.close()
    return batches * BATCH


def _line(batch: int) -> bytes:
    records = [
        {
            "action": "record",
            "data": base64.b64encode(
                json.dumps({"device": f"d{place % 20}", "value": place}).encode()
            ).decode(),
            "partitionKey": f"d{place % 20}",
            "sequenceNumber": f"4959033827149025660855{batch:08d}{place:026d}",
            "subSequenceNumber": 0,
            "approximateArrivalTimestamp": time.time_ns() // 1_000_000,
        }
        for place in range(BATCH)
    ]
    line = {"action": "processRecords", "records": records, "millisBehindLatest": 0}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


async def _published(host: Host, function: str, readings: int) -> None:
    """Return once all windows are published. Raises RuntimeError if their counts are not those of the records."""
    out, found = host.folder / "out" / function, 0
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while found < readings:
            await asyncio.sleep(0.2)
            files = [str(path) for path in out.glob("window=*/*.parquet")]
            found = sum(sum(pq.ParquetFile(file).read(["readings"])[0].to_pylist()) for file in files)
    if found != readings:
        raise RuntimeError(f"{function}: {found} readings of {readings} are published")


def _cpu_seconds(servers: Sequence[Peer]) -> float:
    """Return the processor time of servers, and of all that they have started, ended ones included (proc(5): utime to cstime)."""
    ticks = 0
    for process in (each for server in servers for each in server.children()):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, after_name[11:15]))
    return ticks / _TICKS
