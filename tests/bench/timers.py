"""Durable timers: how fast they are set and fired until all rows are durable, how late an idle server fires, and what a timer takes.

A whole server with one worker process. ``set_s``: timers a second, from the first record until the ledger has the last one's position.
``fired_s``: all timers are due within one second; from the first due time until the ledger has all rows. ``late``: how late single timers
are called by a server whose daemon sends an empty batch every so many ms, the 99th percentile. ``disk``: bytes of the state files once
all are set. ``memory``: what the worker process has grown by then. Both by timer, with their keys.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from bench.hot.lines import initialize
from bench.hot.peers import Connection
from bench.hot.whole_server import SHARD
from bench.serving import processes_of, serving

__all__ = ["EVENTING", "POLLS_MS", "TARGETS", "TIMERS_A_RECORD", "measure"]

POLLS_MS: Final = (50, 200, 1000)
"""Between the empty batches of an idle daemon. KCL reads an idle shard once a second, unless it is told otherwise."""
TARGETS: Final = {"set_s": 100_000, "fired_s": 50_000, "late": 250, "disk": 120, "memory": 400}
"""At least so many a second; at most so many ms (``POLLS_MS[0]``), and so many bytes."""
EVENTING: Final = {"late": "3,000 to 14,000", "memory": "832 to 1,856"}
"""What Couchbase's documentation says of timers in Eventing."""
TIMERS_A_RECORD: Final = (1, 10)
_BATCH: Final = 500
_FIRST: Final = 10_000
"""The number of the batch before the first one of a million."""
_IDLE_STEP_MS: Final = 97
_SPREAD_MS: Final = 1000
_SLOWEST: Final = 25_000
"""Timers a second that must be set at least, so that none is due before the last is set."""
_PATIENCE_SECONDS: Final = 300.0
_ROWS: Final = "SELECT coalesce(sum(rows), 0) FROM segments"
_SET: Final = "SELECT count(*) FROM shards WHERE position LIKE ?"
_STATE: Final = "SELECT sum(bytes) FROM state_files WHERE gone_ms IS NULL"


def measure(timers: int, idle: int, folder: Path) -> dict[str, dict[str, float]]:
    """Return the figures by timers a record. ``idle``: how many single timers tell how late they are."""
    return {
        str(each): asyncio.run(_measure(timers, each, idle, folder / str(each))) for each in TIMERS_A_RECORD
    }


async def _measure(timers: int, each: int, idle: int, folder: Path) -> dict[str, float]:
    async with serving("1", "timed", folder) as (process, connection):
        daemon = _Daemon(connection, folder / "out" / "_mldserver")
        await connection.exchange(initialize(SHARD))
        late = {f"late_{poll_ms}": await daemon.idle(idle, poll_ms) for poll_ms in POLLS_MS}
        known = daemon.asked(_ROWS)
        worker = processes_of(process.pid)[1:]
        before, first_ms = _resident(worker), _now_ms() + 5000 + 1000 * timers // _SLOWEST
        lines = [*_lines(timers, each, first_ms)]
        began = time.perf_counter()
        for line in lines:
            await connection.exchange(line)
        await daemon.until(_SET, 1, f"%{_number(_FIRST + len(lines))}%")
        figures = {"set_s": timers / (time.perf_counter() - began)}
        if (behind_ms := _now_ms() - first_ms) > 0:
            raise RuntimeError(f"the last timer was set {behind_ms} ms after the first was due")
        figures["disk"] = daemon.asked(_STATE) / timers
        figures["memory"] = (_resident(worker) - before) / timers
        await daemon.until(_ROWS, known + timers)
        figures["fired_s"] = timers * 1000 / (_now_ms() - first_ms)
        return figures | late


class _Daemon:
    """A daemon whose shard is idle, and what the server's ledger has meanwhile."""

    def __init__(self, connection: Connection, folder: Path) -> None:
        self._connection = connection
        self._folder = folder

    def asked(self, question: str, *values: str) -> int:
        with contextlib.closing(
            sqlite3.connect(f"file:{self._folder}/ledger.sqlite?mode=ro", uri=True)
        ) as db:
            return int(db.execute(question, values).fetchone()[0] or 0)

    async def until(self, question: str, least: int, *values: str, poll_ms: int = POLLS_MS[0]) -> None:
        """Send empty batches until the ledger has what is asked for."""
        empty = _line([])
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while await asyncio.to_thread(self.asked, question, *values) < least:
                await self._connection.exchange(empty)
                await asyncio.sleep(poll_ms / 1000)

    async def idle(self, timers: int, poll_ms: int) -> float:
        """Let single timers fire; return how late they are."""
        known, files = self.asked(_ROWS), set(self._files())
        told = {"due": _now_ms() + 1000, "step": _IDLE_STEP_MS, "timers": timers}
        await self._connection.exchange(_line([_record(poll_ms, 0, told)]))
        await self.until(_ROWS, known + timers, poll_ms=poll_ms)
        rows = [
            pq.read_table(file, columns=["late_ms"])["late_ms"].to_numpy()
            for file in set(self._files()) - files
        ]
        return float(np.percentile(np.concatenate(rows), 99))

    def _files(self) -> Iterator[Path]:
        return (self._folder / "segments").rglob("*.parquet")


def _lines(timers: int, each: int, first_ms: int) -> Iterator[bytes]:
    records = timers // each
    places = np.random.default_rng(each).permutation(records)  # not in the order in which they are due
    for batch, start in enumerate(range(0, records, _BATCH), 1):
        chosen = places[start : start + _BATCH].tolist()
        yield _line(
            [
                _record(
                    _FIRST + batch,
                    place,
                    {"due": first_ms + key * _SPREAD_MS // records, "step": 0, "timers": each},
                    key,
                )
                for place, key in enumerate(chosen)
            ]
        )


def _number(batch: int) -> str:
    return f"4959033827149025660855{batch:08d}"


def _record(batch: int, place: int, told: dict[str, Any], key: int = -1) -> dict[str, Any]:
    return {
        "action": "record",
        "data": base64.b64encode(json.dumps(told).encode()).decode(),
        "partitionKey": f"key-{key}",
        "sequenceNumber": f"{_number(batch)}{place:026d}",
        "subSequenceNumber": 0,
        "approximateArrivalTimestamp": _now_ms(),
    }


def _line(records: list[dict[str, Any]]) -> bytes:
    line = {"action": "processRecords", "records": records, "millisBehindLatest": 0}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _resident(processes: list[int]) -> int:
    pages = sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in processes)
    return pages * os.sysconf("SC_PAGE_SIZE")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
