"""What many retained windows cost: a day of one-second windows is 86,400.

A ledger and an output folder are made that hold so many published windows, each with one segment. Then a server starts on
them, and turns cycles in which one batch opens a window. The same over few windows is the floor.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

from bench.deliveries import SHARDS, deliveries
from bench.memory import resident_bytes
from bench.pipelines import living
from support.store import SqliteStore

from mldserver.base.clock import SystemClock
from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.ledger.contract import Commit, Flush, Segment, SegmentKind
from mldserver.output.layout import LEDGER, segment_path
from mldserver.output.owner import FolderClaim
from mldserver.output.store import OutputStore
from mldserver.testing import LocalEngine
from mldserver.windows import TimeWindows, time_window_id

__all__ = ["measure"]

_FLOOR = 100
_CYCLES = 30
_AT_ONCE = 2_000
_FIRST_MS = 1_000_000_000_000


def measure(windows: int, folder: Path) -> dict[str, dict[str, float]]:
    """Return seconds of a start and of a median cycle, and what the process grew by, over few and many windows."""
    return {str(count): _measure(count, folder / str(count)) for count in (_FLOOR, windows)}


def _measure(windows: int, out: Path) -> dict[str, float]:
    _fill(windows, out)
    return asyncio.run(_live(out))


def _fill(windows: int, out: Path) -> None:
    (out / LEDGER).parent.mkdir(parents=True)
    store = SqliteStore(out / LEDGER, pipeline="bench", server_id="before")
    store.open(now_ms=0)
    store.claim(FolderClaim(OutputStore(str(out)), pipeline="bench", ledger=None).read().folder)
    now_ms = SystemClock().now_ms()
    for first in range(0, windows, _AT_ONCE):
        segments = tuple(_segment(number, out) for number in range(first, min(first + _AT_ONCE, windows)))
        names = tuple(each.window_id for each in segments)
        store.register(Flush((), segments), now_ms=now_ms)
        store.cut(names)
        begun = store.begin_attempts(names)
        store.commit(tuple(Commit(name, begun[name], "staged", ("part-0.parquet",), 1) for name in names))
        store.published(begun, now_ms=now_ms)
    store.leave()
    store.close()


def _segment(number: int, out: Path) -> Segment:
    start_ms = _FIRST_MS + 1000 * number
    window_id = time_window_id(start_ms)
    path = segment_path(window_id, number, "u", kind=SegmentKind.WINDOW, tag="0" * 16, shape="0" * 12)
    (out / path).parent.mkdir(parents=True)
    (out / path).touch()
    return Segment(path, window_id, 1, 1000, start_ms, start_ms + 1000)


async def _live(out: Path) -> dict[str, float]:
    engine, before, cycles = LocalEngine(), resident_bytes(), []
    rules = CoordinatorRules(on_arrival=False)
    async with asyncio.TaskGroup() as group:
        living_engine = group.create_task(engine.run())
        began = time.perf_counter()
        async with living(
            out,
            spec=TimeWindows(1000, on="scheduled"),
            rules=rules,
            engine=engine,
            clock=SystemClock(),
            shards=SHARDS,
        ) as running:
            start = time.perf_counter() - began
            for batch in deliveries(_CYCLES, batch=1, closing=False):
                await running.give(batch)
                turn = time.perf_counter()
                await running.coordinator.flush("bench")
                cycles.append(time.perf_counter() - turn)
        living_engine.cancel()
    return {
        "start_seconds": start,
        "cycle_seconds": statistics.median(cycles),
        "grown_bytes": resident_bytes() - before,
    }
