"""Contenders that take turns: each exchanges the same batches, round by round, and is measured meanwhile."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from bench.hot.lines import Shape
from bench.rounds import in_turn

from mldserver.protocol.batch_decoder import BatchDecoder
from mldserver.protocol.messages import Version

if TYPE_CHECKING:
    from bench.hot.peers import Connection, Peer

__all__ = ["BARE", "Effort", "connect", "side_by_side"]

BARE: Final = "bare decode"

_LOOK_SECONDS: Final = 0.05
_PAUSES: Final = 20
"""How many times longer than a look the pause behind it is: a look stops a large process from growing meanwhile."""
_CALM_LOOK_SECONDS: Final = 0.25
_CALM_SECONDS: Final = 60.0
_CALM_SHARE: Final = 0.1
"""Of a processor, in all."""
_TOGETHER: Final = 16
"""Connections that are opened at a time: enough to start processes on every core."""


class Contender(Protocol):
    """What takes turns."""

    async def warm_up(self) -> None:
        """Do what a round does, unmeasured."""

    async def round(self) -> None:
        """Exchange the batches of a round."""

    def result(self) -> dict[str, float]:
        """Return the medians of the rounds."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Rounds that count, the share of each shape's batches in each of them, and the seconds after which no further one
    begins.
    """

    rounds: int
    share: float
    seconds: float = math.inf

    @property
    def full(self) -> bool:
        """Whether this is more than a quick look."""
        return self.share >= 1


async def side_by_side(
    peers: Mapping[str, Peer],
    shape: Shape,
    effort: Effort,
    *,
    connections: int = 1,
    batches: int | None = None,
    bare: bool = False,
) -> dict[str, dict[str, float]]:
    """Return what ``Run.result`` tells of each peer, and with ``bare`` what ``Bare.result`` does.

    ``batches``: of each of so many connections in a round; None: its part of the shape's. One round more, before those
    that count, warms up.
    """
    each = shape.batches_each(effort.share, connections) if batches is None else batches
    contenders: dict[str, Contender] = {
        name: Run(peer, await connect(peer, connections, f"shard-{shape.key}"), shape, each)
        for name, peer in peers.items()
    }
    if bare:
        contenders[BARE] = Bare(shape, shape.batches_each(effort.share))
    if effort.full:
        await _calm(list(peers.values()))
    for contender in contenders.values():
        await contender.warm_up()
    began = time.perf_counter()
    for place, name in enumerate(in_turn(tuple(contenders), effort.rounds)):
        if place and place % len(contenders) == 0 and time.perf_counter() - began > effort.seconds:
            break
        await contenders[name].round()
    return {name: contender.result() for name, contender in contenders.items()}


async def _calm(peers: list[Peer]) -> None:
    """Wait until nobody works who is not asked to: a new server starts a spare worker still, which no batch has cost.

    Raises TimeoutError when somebody never rests.
    """
    working = True
    async with asyncio.timeout(_CALM_SECONDS):
        while working:
            before = sum(each.cpu_ns() for each in peers)
            await asyncio.sleep(_CALM_LOOK_SECONDS)
            worked = sum(each.cpu_ns() for each in peers) - before
            working = worked > _CALM_SHARE * _CALM_LOOK_SECONDS * 1e9


async def connect(peer: Peer, shards: int, name: str) -> list[Connection]:
    """Return so many new connections to a peer, each initialised for a shard of its own."""
    opened: list[Connection] = []
    while len(opened) < shards:
        numbers = range(len(opened), min(len(opened) + _TOGETHER, shards))
        async with asyncio.TaskGroup() as group:
            opening = [group.create_task(peer.connect(f"{name}-{number}")) for number in numbers]
        opened += [each.result() for each in opening]
    return opened


@dataclass(frozen=True, slots=True)
class _Round:
    """CPU time (ns) of all processes and of the one with the connections, seconds, and seconds of each batch."""

    cpu_ns: int
    parent_ns: int
    took: float
    seconds: list[float]


class Run:
    """A peer's connections, each of which sends its next batch when the last one is answered."""

    def __init__(self, peer: Peer, connections: list[Connection], shape: Shape, batches: int) -> None:
        """``batches``: of each connection in a round."""
        self._peer, self._connections, self._shape, self._batches = peer, connections, shape, batches
        self._line = shape.line()
        self._sent = 0
        self._resident = 0
        self._rounds: list[_Round] = []

    async def warm_up(self) -> None:
        """Exchange a round's batches, and see how much memory that takes: looking would slow a round that counts."""
        async with asyncio.TaskGroup() as group:
            busy = group.create_task(self._exchange_all(self._lines()))
            while not busy.done():
                began = time.perf_counter()
                await self._look()
                pause = max(_LOOK_SECONDS, _PAUSES * (time.perf_counter() - began))
                await asyncio.wait({busy}, timeout=pause)

    async def round(self) -> None:
        """Exchange a round's batches."""
        lines, peer = self._lines(), self._peer
        cpu, parent, began = peer.cpu_ns(), peer.parent_cpu_ns(), time.perf_counter()
        seconds = await self._exchange_all(lines)
        took = time.perf_counter() - began
        self._rounds.append(_Round(peer.cpu_ns() - cpu, peer.parent_cpu_ns() - parent, took, seconds))
        await self._look()

    def result(self) -> dict[str, float]:
        """Return the medians of the rounds: ``cpu_ns`` and ``parent_ns`` a record, ``cpu_s_gib``, ``records_s``,
        ``p50_us`` and ``p99_us`` of a batch; ``resident_bytes``, the most that was seen; and how many ``rounds`` count.
        Beside them the best of any round, which others on the machine disturb least, for what must be reached.
        """
        records = len(self._rounds[0].seconds) * self._shape.records
        cpu = statistics.median(each.cpu_ns for each in self._rounds)
        latencies = [_percentiles(each.seconds) for each in self._rounds]
        return {
            "cpu_ns": cpu / records,
            "parent_ns": statistics.median(each.parent_ns for each in self._rounds) / records,
            "cpu_s_gib": _seconds_a_gib(cpu / records, self._shape),
            "records_s": statistics.median(records / each.took for each in self._rounds),
            "p50_us": statistics.median(median for median, _ in latencies),
            "p99_us": statistics.median(last for _, last in latencies),
            "resident_bytes": self._resident,
            "rounds": len(self._rounds),
            "least_cpu_ns": min(each.cpu_ns for each in self._rounds) / records,
            "least_parent_ns": min(each.parent_ns for each in self._rounds) / records,
            "least_p99_us": min(last for _, last in latencies),
            "most_records_s": max(records / each.took for each in self._rounds),
        }

    def _lines(self) -> list[bytes]:
        """Return the next round's lines. Connections share them: they are different shards."""
        first = self._sent
        self._sent += self._batches
        return [self._shape.numbered(self._line, number) for number in range(first, self._sent)]

    async def _exchange_all(self, lines: list[bytes]) -> list[float]:
        seconds: list[float] = []
        async with asyncio.TaskGroup() as group:
            for connection in self._connections:
                group.create_task(_exchange(connection, lines, seconds))
        return seconds

    async def _look(self) -> None:
        self._resident = max(self._resident, await asyncio.to_thread(self._peer.resident_bytes))


async def _exchange(connection: Connection, lines: list[bytes], seconds: list[float]) -> None:
    for line in lines:
        sent = time.perf_counter()
        await connection.exchange(line)
        seconds.append(time.perf_counter() - sent)


class Bare:
    """The decoder alone, data touched, in this process."""

    def __init__(self, shape: Shape, batches: int) -> None:
        """``batches``: of a round."""
        self._shape, self._batches, self._line = shape, batches, shape.line()
        self._decoder = BatchDecoder("shard")
        self._sent = 0
        self._cpu_ns: list[int] = []

    async def warm_up(self) -> None:
        """Decode a round's batches."""
        self._decode()

    async def round(self) -> None:
        """Decode a round's batches, one after the other as they would come."""
        self._cpu_ns.append(self._decode())

    def result(self) -> dict[str, float]:
        """Return the medians of the rounds: ``cpu_ns`` a record, ``cpu_s_gib``."""
        cpu_ns = statistics.median(self._cpu_ns) / (self._batches * self._shape.records)
        return {"cpu_ns": cpu_ns, "cpu_s_gib": _seconds_a_gib(cpu_ns, self._shape)}

    def _decode(self) -> int:
        """Return the CPU time in ns."""
        first = self._sent
        self._sent += self._batches
        lines = [self._shape.numbered(self._line, number)[:-1] for number in range(first, self._sent)]
        began = time.thread_time_ns()
        for line in lines:
            for record in self._decoder.decode(line, Version.V2).records:
                len(record.data)
        return time.thread_time_ns() - began


def _seconds_a_gib(cpu_ns: float, shape: Shape) -> float:
    return cpu_ns / 1e9 / (shape.size / 2**30)


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile in µs."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 2] * 1e6, ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e6
