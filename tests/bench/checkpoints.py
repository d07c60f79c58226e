"""How far checkpoints lie behind delivery while windows take an hour to close.

The real coordinator, ledger and store run on a virtual clock under the default settings, since nobody waits an hour.
Three shards get a batch a second. What counts is the time from the moment a batch was taken to the first later request
on its shard that may be answered with a checkpoint behind it.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.deliveries import HOUR_MS, SHARDS, Delivered, deliveries
from bench.pipelines import Pipeline, living
from support.virtual_loop import LoopClock, VirtualLoop
from support.virtual_process import VirtualExecutor, stand_ins

from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.coordinator.shards import IntakeSession
from mldserver.records import Sequence
from mldserver.testing import LocalEngine
from mldserver.windows import TimeWindows

__all__ = ["measure"]

_LATENCY = 0.002
"""Seconds that a hop to a thread and a transaction take on the virtual clock."""


def measure(seconds: int, folder: Path) -> dict[str, float]:
    """Play so many seconds; return the median and the longest lag (s), and how many windows closed meanwhile."""
    loop = VirtualLoop(lambda: _LATENCY)
    with (
        stand_ins({ThreadPoolExecutor: VirtualExecutor}),
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):
        return runner.run(_play(seconds, folder, LoopClock(loop)))


async def _play(seconds: int, folder: Path, clock: LoopClock) -> dict[str, float]:
    spec = TimeWindows(HOUR_MS, on="scheduled")
    rules = CoordinatorRules(on_arrival=False)
    engine = LocalEngine(clock=clock)
    lags: list[float] = []
    async with asyncio.TaskGroup() as group:
        living_engine = group.create_task(engine.run())
        async with living(
            folder, spec=spec, rules=rules, engine=engine, clock=clock, shards=SHARDS
        ) as running:
            given = deliveries(len(SHARDS) * seconds, batch=1, closing=False)
            for shard in SHARDS:
                own = [each for each in given if each.shard_id == shard]
                group.create_task(_deliver(running, shard, own, clock, lags))
            await clock.sleep(seconds + 60)
            published = running.runner.published
        living_engine.cancel()
    return {
        "median_seconds": statistics.median(lags),
        "longest_seconds": max(lags),
        "batches": len(lags),
        "windows": published,
    }


async def _deliver(
    running: Pipeline, shard: str, batches: list[Delivered], clock: LoopClock, lags: list[float]
) -> None:
    session = running.sessions[shard]
    waiting: deque[tuple[Sequence, int]] = deque()
    for batch in batches:
        await running.give(batch)
        last = batch.outcome.outline.last
        assert last is not None
        waiting.append((last, clock.now_ms()))
        _look(session, waiting, clock, lags)
        await clock.sleep(1)
    while waiting:
        await clock.sleep(1)
        _look(session, waiting, clock, lags)


def _look(
    session: IntakeSession, waiting: deque[tuple[Sequence, int]], clock: LoopClock, lags: list[float]
) -> None:
    """Checkpoint as a connection does when it answers, and note how old each batch behind it is by now."""
    due = session.checkpoint_due()
    if due is None:
        return
    session.checkpointed(due)
    while waiting and waiting[0][0] <= due:
        lags.append((clock.now_ms() - waiting.popleft()[1]) / 1000)
