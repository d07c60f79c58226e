"""The measurements: peers take turns with the same lines, each answer is waited for as a daemon does."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from typing import TYPE_CHECKING, Any

import uvloop
from bench.hot import peers
from bench.hot.calls import calls_of_a_batch
from bench.hot.lines import SHAPES, Shape
from bench.rounds import in_turn

from mldserver.protocol.batches import BatchDecoder
from mldserver.protocol.messages import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.hot.peers import Connection, Peer

__all__ = ["everything"]


async def shapes(
    given: Sequence[Shape], *, rounds: int, share: float, progress: Callable[[str], None]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return by shape and peer: ``cpu_ns`` and ``parent_ns`` a record (least), ``cpu_s_gib``, ``records_s``, ``p50_us``,
    ``p99_us`` (medians of the rounds). ``share``: of each shape's batches.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    async with contextlib.AsyncExitStack() as stack:
        contenders = [
            await stack.enter_async_context(each)
            for each in (
                peers.echo(),
                peers.relay(),
                peers.mldserver(),
                peers.mldserver(handler="touch_async"),
                peers.mldserver("1"),
                peers.kclpy(),
            )
        ]
        names = ("raw echo", "raw relay", "inline", "inline, async", "one worker", "amazon_kclpy")
        by_name = dict(zip(names, contenders, strict=True))
        for shape in given:
            found[shape.name] = await _shape(shape, by_name, rounds, share)
            progress(f"{shape.name}: measured")
    return found


async def _shape(
    shape: Shape, contenders: dict[str, Peer], rounds: int, share: float
) -> dict[str, dict[str, float]]:
    line, batches = shape.line(), max(3, round(shape.batches * share))
    runs = {
        name: _Run(peer, await peer.connect(f"shard-{shape.records}-{shape.size}"), shape, line)
        for name, peer in contenders.items()
    }
    for name in in_turn(tuple(runs), 1 + rounds):
        await runs[name].round(batches)
    return {name: run.result() for name, run in runs.items()}


class _Run:
    """One connection, whose rounds are remembered; the first warms up."""

    def __init__(self, peer: Peer, connection: Connection, shape: Shape, line: bytes) -> None:
        self._peer, self._connection, self._shape, self._line = peer, connection, shape, line
        self._sent = 0
        self._rounds: list[tuple[int, int, float, list[float]]] = []

    async def round(self, batches: int) -> None:
        peer, numbered = self._peer, self._shape.numbered
        lines = [numbered(self._line, self._sent + number) for number in range(batches)]
        self._sent += batches
        cpu, parent, began = peer.cpu_ns(), peer.parent_cpu_ns(), time.perf_counter()
        seconds = []
        for line in lines:
            sent = time.perf_counter()
            await self._connection.exchange(line)
            seconds.append(time.perf_counter() - sent)
        took = time.perf_counter() - began
        self._rounds.append((peer.cpu_ns() - cpu, peer.parent_cpu_ns() - parent, took, seconds))

    def result(self) -> dict[str, float]:
        counted = self._rounds[1:]
        records = len(counted[0][3]) * self._shape.records
        least = min(cpu for cpu, *_ in counted)
        latencies = [_percentiles(seconds) for *_, seconds in counted]
        return {
            "cpu_ns": least / records,
            "parent_ns": min(parent for _, parent, *_ in counted) / records,
            "cpu_s_gib": least / 1e9 / (records * self._shape.size / 2**30),
            "records_s": statistics.median(records / took for *_, took, _ in counted),
            "p50_us": statistics.median(each[0] for each in latencies),
            "p99_us": statistics.median(each[1] for each in latencies),
        }


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile in µs."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 2] * 1e6, ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e6


async def latency(connections: int, batches: int, rounds: int) -> dict[str, float]:
    """Return the 99th percentile (µs) of one-record batches at so many connections at a time, by peer: the least."""
    shape = SHAPES[0]
    line = shape.line()
    found = {"raw echo": float("inf"), "inline": float("inf"), "one worker": float("inf")}
    async with peers.echo() as echo, peers.mldserver() as inline, peers.mldserver("1") as worker:
        by_name = dict(zip(found, (echo, inline, worker), strict=True))
        open_ = {
            name: [await peer.connect(f"shard-{number}") for number in range(connections)]
            for name, peer in by_name.items()
        }
        sent = 0
        for name in in_turn(tuple(found), 1 + rounds):
            lines = [shape.numbered(line, sent + number) for number in range(batches)]
            sent += batches
            seconds: list[float] = []
            async with asyncio.TaskGroup() as group:
                for connection in open_[name]:
                    group.create_task(_exchange(connection, lines, seconds))
            found[name] = min(found[name], _percentiles(seconds)[1])
    return found


async def _exchange(connection: Connection, lines: list[bytes], seconds: list[float]) -> None:
    for line in lines:
        sent = time.perf_counter()
        await connection.exchange(line)
        seconds.append(time.perf_counter() - sent)


async def memory(counts: Sequence[int], kclpy_counts: Sequence[int]) -> dict[str, dict[int, int]]:
    """Return the resident bytes at so many idle shards: of the server's own process, and of amazon_kclpy's processes."""
    found: dict[str, dict[int, int]] = {"one worker, its server": {}, "amazon_kclpy": {}}
    async with peers.mldserver("1") as server, peers.kclpy() as kclpy:
        for name, peer, steps in (
            ("one worker, its server", server, counts),
            ("amazon_kclpy", kclpy, kclpy_counts),
        ):
            kept: list[Connection] = []
            for count in steps:
                while len(kept) < count:
                    kept.append(await peer.connect(f"shardId-{len(kept):012d}"))
                await asyncio.sleep(1)
                found[name][count] = peer.parent_bytes() if peer is server else peer.resident_bytes()
    return found


async def long_line(mib: int) -> dict[str, float]:
    """Return what a line of so many MiB adds to the server's peak (as a multiple of the line), the longest its event
    loop worked in one go (ms of CPU), and the longest answer to another connection meanwhile (ms), and without it.
    """
    long = Shape(1, mib << 20, 1)
    line = long.numbered(long.line(), 1)
    # The other shard is on the other worker: what is looked for is the server's own event loop.
    async with peers.mldserver("2") as server:
        large = await server.connect("large")
        await large.exchange(SHAPES[0].numbered(SHAPES[0].line(), 0))
        async with peers.prober(server) as calm:
            await asyncio.sleep(1)
        before, busy_before = server.peak_bytes(), len(peers.busy_ms(server))
        async with peers.prober(server) as meanwhile:
            await large.exchange(line)
        peak = (server.peak_bytes() - before) / len(line)
        busy = max(peers.busy_ms(server)[busy_before:], default=0.0)
    return {"peak": peak, "busy_ms": busy, "longest_ms": meanwhile[0], "calm_ms": calm[0]}


async def scaling(batches: int, rounds: int) -> dict[str, float]:
    """Return records a second of a handler that thinks, with one worker and with two, on eight shards: the best."""
    shape = SHAPES[2]
    line = shape.line()
    found = {"1": 0.0, "2": 0.0}
    async with peers.mldserver("1", "grind") as one, peers.mldserver("2", "grind") as two:
        by_name = {"1": one, "2": two}
        open_ = {
            name: [await peer.connect(f"shard-{number}") for number in range(8)]
            for name, peer in by_name.items()
        }
        sent = 0
        for name in in_turn(tuple(found), 1 + rounds):
            lines = [shape.numbered(line, sent + number) for number in range(batches)]
            sent += batches
            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for connection in open_[name]:
                    group.create_task(_exchange(connection, lines, []))
            records = 8 * batches * shape.records
            found[name] = max(found[name], records / (time.perf_counter() - began))
    return found


def bare(shape: Shape, rounds: int) -> float:
    """Return the CPU (ns a record) of the decoder alone, data touched, in this process: the least."""
    line, decoder = shape.line()[:-1], BatchDecoder("shard", Version.V2)
    least = float("inf")
    for _ in range(3 * rounds + 2):
        began = time.process_time_ns()
        for record in decoder.decode(line).records:
            len(record.data)
        least = min(least, time.process_time_ns() - began)
    return least / shape.records


def everything(*, rounds: int, share: float, large: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure all; ``large``: with thousands of connections and a line of 200 MB."""

    async def run() -> dict[str, Any]:
        told: dict[str, Any] = {
            "shapes": await shapes(SHAPES, rounds=rounds, share=share, progress=progress),
            "latency_us": await latency(64 if large else 4, 50 if large else 3, rounds),
        }
        progress("64 connections: measured")
        told["memory"] = await memory((1, 8, 64, 512, 2000) if large else (1, 4), (1, 8) if large else (1,))
        progress("idle shards: measured")
        told["long_line"] = await long_line(150 if large else 1)
        progress("a long line: measured")
        told["scaling"] = await scaling(4 if large else 1, rounds)
        told["calls"] = await calls_of_a_batch()
        return told

    told = uvloop.run(run())
    told["bare_ns"] = {shape.name: bare(shape, rounds) for shape in SHAPES}
    return told
