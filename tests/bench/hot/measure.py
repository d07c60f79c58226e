"""The measurements: peers take turns with the same lines, each answer is waited for as a daemon does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import uvloop
from bench.hot import peers
from bench.hot.calls import calls_of_a_batch
from bench.hot.lines import SHAPES, Shape
from bench.hot.matrix import Chosen, matrix
from bench.hot.room import open_files
from bench.hot.runs import Effort, connect, side_by_side

__all__ = ["everything", "only_matrix"]


async def shapes(
    given: Sequence[Shape], effort: Effort, progress: Callable[[str], None]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return by shape what ``side_by_side`` tells of one connection."""
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
            found[shape.name] = await side_by_side(by_name, shape, effort, bare=True)
            progress(f"{shape.name}: measured")
    return found


async def latency(connections: int, batches: int, effort: Effort) -> dict[str, float]:
    """Return the 99th percentile (µs) of one-record batches at so many connections at a time, by peer: the least."""
    async with peers.echo() as echo, peers.mldserver() as inline, peers.mldserver("1") as worker:
        by_name = {"raw echo": echo, "inline": inline, "one worker": worker}
        found = await side_by_side(by_name, SHAPES[0], effort, connections=connections, batches=batches)
    return {name: each["least_p99_us"] for name, each in found.items()}


async def quiet(connections: int, seconds: int) -> float:
    """Return what a server inline takes of one core while each connection has a batch of one record a second."""
    shape = SHAPES[0]
    line = shape.line()
    async with peers.mldserver() as server:
        opened = await connect(server, connections, "quiet")

        async def send(place: int, connection: peers.Connection) -> None:
            await asyncio.sleep(place / connections)
            for number in range(seconds):
                due = asyncio.create_task(asyncio.sleep(1))
                await connection.exchange(shape.numbered(line, number))
                await due

        async with asyncio.TaskGroup() as group:
            for place, connection in enumerate(opened):
                group.create_task(send(place, connection))
            await asyncio.sleep(1)
            before, began = server.cpu_ns(), time.perf_counter()
            await asyncio.sleep(max(1, seconds - 2))
            return (server.cpu_ns() - before) / 1e9 / (time.perf_counter() - began)


async def memory(counts: Sequence[int], kclpy_counts: Sequence[int]) -> dict[str, dict[int, int]]:
    """Return the resident bytes at so many idle shards: of the server's own process, and of amazon_kclpy's processes."""
    found: dict[str, dict[int, int]] = {"one worker, its server": {}, "amazon_kclpy": {}}
    async with peers.mldserver("1") as server, peers.kclpy() as kclpy:
        for name, peer, steps in (
            ("one worker, its server", server, counts),
            ("amazon_kclpy", kclpy, kclpy_counts),
        ):
            opened = 0
            for count in steps:
                await connect(peer, count - opened, f"up-to-{count}")
                opened = count
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
    async with peers.mldserver("2", watched=True) as server:
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


async def scaling(batches: int, effort: Effort) -> dict[str, float]:
    """Return records a second of a handler that thinks, with one worker and with two, on eight shards: the best."""
    async with peers.mldserver("1", "grind") as one, peers.mldserver("2", "grind") as two:
        found = await side_by_side({"1": one, "2": two}, SHAPES[2], effort, connections=8, batches=batches)
    return {name: each["most_records_s"] for name, each in found.items()}


def everything(effort: Effort, chosen: Chosen, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure all, in full with thousands of connections and a line of 200 MB; ``chosen``: cells of the matrix."""

    async def run() -> dict[str, Any]:
        full = effort.full
        told: dict[str, Any] = {
            "shapes": await shapes(SHAPES, effort, progress),
            "latency_us": await latency(64 if full else 4, 50 if full else 3, effort),
        }
        progress("64 connections: measured")
        count = 2000 if full else 4
        told["quiet"] = {f"{count:,}": await quiet(count, 12 if full else 2)}
        progress("a batch a second on each connection: measured")
        told["memory"] = await memory((1, 8, 64, 512, 2000) if full else (1, 4), (1, 8) if full else (1,))
        progress("idle shards: measured")
        told["long_line"] = await long_line(150 if full else 1)
        progress("a long line: measured")
        told["scaling"] = await scaling(4 if full else 1, effort)
        told["calls"] = await calls_of_a_batch()
        told["matrix"] = await matrix(chosen, effort, progress)
        return told

    return _run(run())


def only_matrix(effort: Effort, chosen: Chosen, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure these cells of the matrix, and nothing else."""

    async def run() -> dict[str, Any]:
        return {"matrix": await matrix(chosen, effort, progress)}

    return _run(run())


def _run(measuring: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    with open_files():
        return uvloop.run(measuring)
