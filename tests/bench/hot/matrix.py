"""The matrix: each shape at each number of connections, our server beside the echo, amazon_kclpy and the bare decode.

Each cell has processes of its own, so that it can be chosen by itself and its memory is nobody else's. A cell, or its
amazon_kclpy, that the machine has no room for is left out, and says why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from bench.hot import peers
from bench.hot.lines import Shape
from bench.hot.peers import Peer
from bench.hot.room import Room
from bench.hot.runs import BARE, Effort, connect, side_by_side

from mldserver.config.settings import Settings

__all__ = ["CONNECTIONS", "ECHO", "INLINE", "KCLPY", "WORKERS", "Chosen", "matrix"]

CONNECTIONS: Final = (1, 8, 64, 512, 2000)
ECHO: Final = "raw echo"
INLINE: Final = "inline"
WORKERS: Final = "workers"
KCLPY: Final = "amazon_kclpy"
_ROUNDS: Final = 3
"""At most: a cell of 2,000 connections has thousands of batches in each."""
_SECONDS: Final = 15.0
"""Of a cell, after which no further round begins: a full run is to end in about ten minutes on two free processors."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """The cells that are wanted, and the bytes of memory that one may use."""

    shapes: Sequence[Shape]
    connections: Sequence[int]
    memory: int


async def matrix(chosen: Chosen, effort: Effort, progress: Callable[[str], None]) -> dict[str, Any]:
    """Return ``cells`` by shape's name and number of connections: ``batches`` of each connection in a round,
    ``measured`` and ``left_out`` (the reason) by peer; how many processes ``workers`` are; how many ``seconds`` it all
    took; and the machine's ``load`` (average of a minute) at the beginning and at the end, its own included.
    """
    began, load = time.perf_counter(), os.getloadavg()[0]
    room = Room(chosen.memory, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    workers, effort = (
        Settings().workers,
        dataclasses.replace(effort, rounds=min(effort.rounds, _ROUNDS), seconds=_SECONDS),
    )
    cells: dict[str, dict[int, dict[str, Any]]] = {}
    for shape in chosen.shapes:
        cells[shape.name] = {}
        process = await _process_bytes(shape)
        for count in chosen.connections:
            started = time.perf_counter()
            cells[shape.name][count] = await _cell(
                shape, count, effort, workers=str(workers), room=room, process=process
            )
            progress(f"{shape.name}, {count:,} connections: {time.perf_counter() - started:.0f} s")
    return {
        "cells": cells,
        "workers": workers,
        "seconds": time.perf_counter() - began,
        "load": [load, os.getloadavg()[0]],
    }


async def _cell(
    shape: Shape, count: int, effort: Effort, *, workers: str, room: Room, process: int
) -> dict[str, Any]:
    line, batches = len(shape.line()), shape.batches_each(effort.share, count)
    lacking = room.lacking(count, line)
    if lacking:
        left_out = dict.fromkeys((ECHO, INLINE, WORKERS, KCLPY, BARE), lacking)
        return {"batches": batches, "measured": {}, "left_out": left_out}
    lacking = room.lacking_for_processes(count, process, line)
    async with contextlib.AsyncExitStack() as stack:
        contenders: dict[str, Peer] = {
            ECHO: await stack.enter_async_context(peers.echo()),
            INLINE: await stack.enter_async_context(peers.mldserver()),
            WORKERS: await stack.enter_async_context(peers.mldserver(workers)),
        }
        if not lacking:
            contenders[KCLPY] = await stack.enter_async_context(peers.kclpy())
        measured = await side_by_side(contenders, shape, effort, connections=count, bare=True)
    return {"batches": batches, "measured": measured, "left_out": {KCLPY: lacking} if lacking else {}}


async def _process_bytes(shape: Shape) -> int:
    """Return how much memory a further process of amazon_kclpy needs for these batches."""
    async with peers.kclpy() as kclpy:
        (connection,) = await connect(kclpy, 1, "alone")
        for number in range(3):
            await connection.exchange(shape.numbered(shape.line(), number))
        return kclpy.own_peak_bytes()
