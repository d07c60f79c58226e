"""Streams in which every record fails, against the same stream without a fault: from the socket until all is durable.

One server with ``handlers.departures`` takes both in turn, inline: a row for each departure, or, as none has the delay that
the handler asks for, a dead letter with its traceback in an embedded ledger.
"""

from __future__ import annotations

import asyncio
import base64
import json
import statistics
import time
from pathlib import Path
from typing import Final

from bench.hot.lines import initialize
from bench.hot.peers import Connection
from bench.rounds import in_turn

from mldserver.config.kinds import UnixAddress
from mldserver.config.settings import Settings
from mldserver.observe.logging import logging_to
from mldserver.server import Server
from mldserver.testing import LocalEngine
from mldserver.testing.playground import read_lines

__all__ = ["measure"]

BATCH: Final = 500
DAY: Final = 900
"""Departures of a day: a busy stream has few windows open."""
KINDS: Final = ("good", "poison")


def measure(records: int, rounds: int, folder: Path) -> dict[str, float]:
    """Return ``good`` and ``poison``: records a second, medians; ``share``: the CPU of good records, as a share of that of poison."""
    folder.mkdir(parents=True)
    return asyncio.run(_measure(max(1, records // BATCH), rounds, folder))


async def _measure(batches: int, rounds: int, folder: Path) -> dict[str, float]:

    departures = read_lines(None, limit=DAY)
    settings = Settings(
        handler="handlers.departures",
        out=folder / "out",
        listen=UnixAddress(folder / "socket"),
        log_file=folder / "log",
        log_format="json",
        flush_interval_ms=250,
        workers=None,
    )
    wall: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with logging_to(settings):
        server, sent = Server(settings, engine=LocalEngine()), 0
        async with asyncio.TaskGroup() as group:
            group.create_task(server.run())
            await server.listening()
            connection = Connection(*await asyncio.open_unix_connection(str(folder / "socket")))
            await connection.exchange(initialize("shard"))
            for number, kind in enumerate(in_turn(KINDS, rounds + 1)):
                lines = [_line(kind, departures, sent + batch * BATCH) for batch in range(batches)]
                sent += batches * BATCH
                began, used = time.perf_counter(), time.process_time()
                for line in lines:
                    await connection.exchange(line)
                while (status := server.status()).rows_durable + status.dead_letters < sent:  # noqa: ASYNC110  # nobody tells
                    await asyncio.sleep(0.005)
                if number >= len(KINDS):  # the first of each warms up
                    wall[kind].append(time.perf_counter() - began)
                    cpu[kind].append(time.process_time() - used)
            connection.writer.close()
            server.stop("measured")
    rates = {kind: batches * BATCH / statistics.median(each) for kind, each in wall.items()}
    return {**rates, "share": statistics.median(cpu["good"]) / statistics.median(cpu["poison"])}


def _line(kind: str, departures: list[bytes], first: int) -> bytes:
    records = [
        {
            "action": "record",
            "data": base64.b64encode(_payload(kind, departures[number % len(departures)])).decode(),
            "partitionKey": f"key-{number % 97}",
            "sequenceNumber": f"4959033827149025660855{number:034d}",
            "subSequenceNumber": 0,
            "approximateArrivalTimestamp": 1_800_000_000_000,
        }
        for number in range(first, first + BATCH)
    ]
    return (
        json.dumps({"action": "processRecords", "records": records, "millisBehindLatest": 9}).encode() + b"\n"
    )


def _payload(kind: str, line: bytes) -> bytes:
    return line if kind == "good" else line.replace(b"dep_delay", b"delay")
