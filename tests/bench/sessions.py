"""Session windows: ``handlers.visits`` on keyed state and timers, beside Spark's own ``session_window``.

``visits`` and ``rows`` are whole servers (inline) that get the same clicks of 10,000 users, in order, over six hours: one makes
visits of them, the other a row of each click. ``session_window`` is the Spark job that groups those rows, which lie in one ready
file, in a warm session on ``local[2]``: what the second way costs beside ``rows``, and only inside one window.
"""

from __future__ import annotations

import asyncio
import base64
import json
import statistics
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import numpy as np
from bench.hot.lines import initialize
from bench.hot.peers import environment, process_cpu_ns
from bench.hot.whole_server import SHARD
from bench.rounds import in_turn
from bench.serving import processes_of, serving

__all__ = ["measure"]

_USERS: Final = 10_000
_BATCH: Final = 500
_SPAN: Final = timedelta(hours=6)
_START: Final = datetime(2027, 1, 15, 8, tzinfo=UTC)
_HANDLERS: Final = {"visits": "visits", "rows": "clicks_as_rows"}
_SPARK: Final = "session_window"
_LAST: Final = b'{"action":"shutdownRequested"}\n'


def measure(clicks: int, rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    """Return by contender ``clicks_s`` and ``cpu_us`` (a click); medians of the rounds."""
    folder.mkdir(parents=True)
    return asyncio.run(_measure(clicks, rounds, folder))


async def _measure(clicks: int, rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    users, times = _draw(clicks)
    lines = await asyncio.to_thread(_lines, users, times)
    ready = folder / "clicks.parquet"
    await asyncio.to_thread(_write, users, times, ready)
    found: dict[str, list[dict[str, float]]] = {}
    for number, name in enumerate(in_turn([*_HANDLERS, _SPARK], rounds)):
        place = folder / f"{number}-{name}"
        place.mkdir()
        if name == _SPARK:
            told = await _spark(ready, place, clicks)
        else:
            told = await _server(_HANDLERS[name], lines, place, clicks)
        found.setdefault(name, []).append(told)
    return {
        name: {figure: statistics.median(each[figure] for each in told) for figure in told[0]}
        for name, told in found.items()
    }


def _draw(clicks: int) -> tuple[list[int], list[datetime]]:
    """Return who clicks, and when: in order of time."""
    dice = np.random.default_rng(clicks)
    step = _SPAN / clicks
    return dice.integers(_USERS, size=clicks).tolist(), [_START + number * step for number in range(clicks)]


def _lines(users: list[int], times: list[datetime]) -> list[bytes]:
    found = []
    for batch in range(0, len(users), _BATCH):
        records = [
            {
                "action": "record",
                "data": base64.b64encode(
                    json.dumps({"page": "/", "user": user, "at": at.isoformat()}).encode()
                ).decode(),
                "partitionKey": str(user),
                "sequenceNumber": f"4959033827149025660855{batch + place:034d}",
                "subSequenceNumber": 0,
                "approximateArrivalTimestamp": round(at.timestamp() * 1000),
            }
            for place, (user, at) in enumerate(
                zip(users[batch : batch + _BATCH], times[batch : batch + _BATCH], strict=True)
            )
        ]
        line = {"action": "processRecords", "records": records, "millisBehindLatest": 100}
        found.append(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    return found


def _write(users: list[int], times: list[datetime], ready: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"user": pa.array(map(str, users)), "at": pa.array(times, pa.timestamp("us", "UTC"))}
    pq.write_table(pa.table(columns), ready)


async def _server(handler: str, lines: list[bytes], folder: Path, clicks: int) -> dict[str, float]:
    async with serving("inline", handler, folder) as (process, connection):
        await connection.exchange(initialize(SHARD))
        before, began = _cpu_seconds(process.pid), time.perf_counter()
        for line in lines:
            await connection.exchange(line)
        await connection.exchange(_LAST)  # it is answered when all is durable
        seconds, cpu = time.perf_counter() - began, _cpu_seconds(process.pid) - before
    return _figures(clicks, seconds, cpu)


async def _spark(ready: Path, folder: Path, clicks: int) -> dict[str, float]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "ignore", "-m", "bench.sessions", str(ready), str(folder)),
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    printed, _ = await process.communicate()
    told = json.loads(printed.splitlines()[-1])
    return _figures(clicks, told["seconds"], told["cpu"])


def _figures(clicks: int, seconds: float, cpu_seconds: float) -> dict[str, float]:
    return {"clicks_s": clicks / seconds, "cpu_us": cpu_seconds * 1e6 / clicks}


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its children so far."""
    return sum(map(process_cpu_ns, processes_of(pid))) / 1e9


def _group_on_spark(ready: str, folder: str) -> None:
    """Print what the third run of the job takes: a session of a server is warm."""
    import os

    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F  # noqa: N812

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    told = {}
    for number in range(3):
        before, began = _cpu_seconds(os.getpid()), time.perf_counter()
        clicks = spark.read.parquet(ready)
        visits = clicks.groupBy("user", F.session_window("at", "30 minutes")).agg(
            F.count("*").alias("clicks")
        )
        visits.select("user", "session_window.start", "session_window.end", "clicks").write.parquet(
            f"{folder}/{number}"
        )
        told = {"seconds": time.perf_counter() - began, "cpu": _cpu_seconds(os.getpid()) - before}
    print(json.dumps(told))


if __name__ == "__main__":
    _group_on_spark(*sys.argv[1:])
