"""Shards that are opened again while a cycle runs: what is delivered again is never late, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from coordinator.pipeline import Pipeline, Records

from mldserver.records import Sequence
from mldserver.windows import time_window_id

W = [time_window_id(start) for start in range(0, 100_000, 10_000)]
DURABLE: Records = [(1, 1000), (2, 2000)]
BUFFERED: Records = [(3, 8000), (4, 25_000)]
BEHIND_MS = 60_000
TURNS = 14
"""A cycle takes fewer turns of the loop, and so does an opening."""


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def reopen(pipeline: Pipeline, offset: int, wait: int) -> None:
    """Open a shard again ``offset`` turns after a cycle began, and deliver all of it again ``wait`` turns later."""
    await turns(offset)
    session = await pipeline.open("a")
    await turns(wait)
    await pipeline.give(session, DURABLE + BUFFERED, lag_ms=BEHIND_MS)


async def flush(pipeline: Pipeline, offset: int) -> None:
    await turns(-offset)
    await pipeline.coordinator.flush("now")


async def outcome_of(pipeline: Pipeline, offset: int, wait: int) -> tuple[dict[str, list[int]], list[int]]:
    """Return the windows, and what was late, of a shard that has 2 rows in the buffer when it is opened again."""
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, DURABLE, lag_ms=BEHIND_MS)
        for _ in range(3):
            await pipeline.cycle()
        assert session.checkpoint_due() == Sequence(2)
        await pipeline.give(session, BUFFERED, lag_ms=BEHIND_MS)
        async with asyncio.TaskGroup() as group:
            group.create_task(reopen(pipeline, offset, wait))
            group.create_task(flush(pipeline, offset))
        for _ in range(4):
            await pipeline.cycle()
        return pipeline.published(), pipeline.late()


@pytest.mark.parametrize("wait", [0, 2, 60])
async def test_no_row_that_is_delivered_again_is_late_whenever_its_shard_was_opened(
    tmp_path: Path, wait: int
) -> None:
    for offset in range(-TURNS, TURNS + 1):
        pipeline = Pipeline(tmp_path / f"{offset}")
        assert (offset, *await outcome_of(pipeline, offset, wait)) == (offset, {W[0]: [1, 2, 3]}, [])


@pytest.mark.parametrize("amid", ["sync", "write", "register"])
async def test_a_shard_that_is_opened_again_in_every_cycle_holds_only_what_comes_after_it(
    tmp_path: Path, amid: str
) -> None:
    pipeline = Pipeline(tmp_path)
    async with pipeline.life():
        await pipeline.give(await pipeline.open("b"), [(1, 1000), (2, 45_000)], lag_ms=BEHIND_MS)
        await pipeline.give(await pipeline.open("a"), DURABLE + BUFFERED[1:], lag_ms=BEHIND_MS)
        await pipeline.clock.advance(0)
        await pipeline.coordinator.flush("now")
        await come_back(pipeline)
        again: list[asyncio.Task[None]] = []

        def open_again(name: str, after: bool) -> None:
            if name == amid and not after and (not again or again[-1].done()):
                # The ledger raises the epoch now; the connection learns of it in some later turn.
                pipeline.ledger.store.open_shard("a")
                again.append(asyncio.get_running_loop().create_task(come_back(pipeline)))

        pipeline.faults.hook = open_again
        for _ in range(6):
            await pipeline.cycle()
        pipeline.faults.hook = None
        assert len(again) > 4
        assert pipeline.published() == {W[0]: [1, 1, 2]}
        assert pipeline.late() == []


async def come_back(pipeline: Pipeline) -> None:
    """Open a shard again and deliver what closes a later window than its position does."""
    session = await pipeline.open("a")
    await pipeline.give(session, [(5, 33_000), (6, 45_000)], lag_ms=BEHIND_MS)
