"""Shards that ended: remembered while the stream may give their records again, and not for ever."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from coordinator.pipeline import RULES, Pipeline, listed

from mldserver.consumer.intake import ShardOpening
from mldserver.records import Sequence
from mldserver.windows import time_window_id

pytestmark = pytest.mark.quick

HOUR_MS = 3_600_000
SHORT = replace(
    RULES,
    flush_interval_ms=600_000,
    retention_ms=HOUR_MS,
    shard_retention_ms=2 * HOUR_MS,
    server_timeout_ms=2 * HOUR_MS,
)
SPLIT: dict[str, tuple[str, ...]] = {"p": (), "left": ("p",), "right": ("p",)}
FIRST = time_window_id(0)


async def read_the_parent(pipeline: Pipeline) -> None:
    """Read the parent to its end, which another cycle makes durable."""
    pipeline.coordinator.shards.add_listing(listed(SPLIT))
    parent = await pipeline.open("p")
    await pipeline.give(parent, [(1, 1000), (2, 5000)])
    ending = asyncio.get_running_loop().create_task(parent.end())
    await pipeline.clock.advance(600)
    assert ending.result()


async def test_a_shard_that_the_stream_still_lists_is_not_read_twice_however_long_ago_it_ended(
    tmp_path: Path,
) -> None:
    pipeline = Pipeline(tmp_path, rules=SHORT)
    async with pipeline.life():
        await read_the_parent(pipeline)
        await pipeline.clock.advance(6 * 3600)
        assert pipeline.published() == {FIRST: [1, 2]}
        # The lease table was deleted.
        again = await pipeline.open("p")
        assert again.after == Sequence(2)
        await pipeline.give(again, [(1, 1000), (2, 5000)])
        ending = asyncio.get_running_loop().create_task(again.end())
        await pipeline.clock.advance(3600)
        assert ending.result()
        assert (pipeline.published(), pipeline.late()) == ({FIRST: [1, 2]}, [])


async def test_a_daemon_that_had_not_checkpointed_a_shards_end_comes_back_while_the_stream_lists_it(
    tmp_path: Path,
) -> None:
    pipeline = Pipeline(tmp_path, rules=SHORT)
    async with pipeline.life() as coordinator:
        await read_the_parent(pipeline)
        await pipeline.clock.advance(6 * 3600)
        late = await coordinator.shards.open_shard(ShardOpening("p", Sequence(1), tells_lag=True))
        assert late.after == Sequence(2)


async def test_a_child_that_is_read_late_goes_on_from_its_parents_times_while_the_stream_lists_that(
    tmp_path: Path,
) -> None:
    pipeline = Pipeline(tmp_path, rules=SHORT)
    async with pipeline.life():
        await read_the_parent(pipeline)
        await pipeline.clock.advance(6 * 3600)
    async with pipeline.life() as coordinator:
        coordinator.shards.add_listing(listed(SPLIT))
        child = await pipeline.open("left")
        await pipeline.give(child, [(3, 4000)])
        assert coordinator.lineage.nodes["left"].effective_ms == 5000


async def test_a_shard_that_the_stream_does_not_list_any_more_is_forgotten(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, rules=SHORT)
    async with pipeline.life() as coordinator:
        await read_the_parent(pipeline)
        await pipeline.clock.advance(6 * 3600)
        assert "p" in coordinator.lineage.nodes
        coordinator.shards.add_listing(listed({"left": ("p",), "right": ("p",)}))
        await pipeline.clock.advance(2 * 3600)
        assert "p" not in coordinator.lineage.nodes
    assert "p" not in pipeline.state().shards


async def test_no_shard_is_forgotten_before_the_stream_has_said_which_it_lists(tmp_path: Path) -> None:
    async def ask() -> bool:
        """AWS does not answer."""
        return False

    pipeline = Pipeline(tmp_path, rules=SHORT, ask_stream=ask)
    async with pipeline.life() as coordinator:
        parent = await pipeline.open("p")
        ending = asyncio.get_running_loop().create_task(parent.end())
        await pipeline.clock.advance(6 * 3600)
        assert ending.result()
        assert "p" in coordinator.lineage.nodes
        coordinator.shards.add_listing(listed({"left": ("p",), "right": ("p",)}))
        await pipeline.clock.advance(2 * 3600)
        assert "p" not in coordinator.lineage.nodes
    assert "p" not in pipeline.state().shards
