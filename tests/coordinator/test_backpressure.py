"""Who is held back: whoever has a connection, whatever is known of the shard."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from coordinator.pipeline import RULES, Pipeline

from mldserver.errors import LedgerError
from mldserver.records import Sequence
from mldserver.testing import VirtualClock

if TYPE_CHECKING:
    from pathlib import Path

    from mldserver.coordinator.shards import ShardSession

LITTLE = replace(RULES, buffer_bytes=1)


def lose_the_ledger(pipeline: Pipeline) -> None:
    def hook(called: str, _after: bool) -> None:
        if called == "sync":
            raise LedgerError("out of reach")

    pipeline.faults.hook = hook


async def assert_held(pipeline: Pipeline, session: ShardSession) -> None:
    """While nothing can be registered, the session's batches wait."""
    given = asyncio.get_running_loop().create_task(pipeline.give(session, [(1, 1000)]))
    await pipeline.clock.advance(30)
    assert pipeline.coordinator.buffer.bytes > 1
    assert not given.done()
    pipeline.faults.hook = None
    await pipeline.clock.advance(40)
    assert given.done()


async def test_a_connection_whose_shard_another_server_has_ended_meanwhile_is_held_back_too(
    tmp_path: Path,
) -> None:
    clock = VirtualClock(1_000_000)
    one = Pipeline(tmp_path, server_id="one", clock=clock, rules=LITTLE)
    other = Pipeline(tmp_path, server_id="other", clock=clock)
    async with one.life(), other.life():
        await clock.advance(3)
        stale = await one.open("p")
        assert await (await other.open("p")).end()
        await one.open("c", parents=("p",))
        lose_the_ledger(one)
        assert stale.alive, "no cycle has heard yet that the shard was opened elsewhere"
        await assert_held(one, stale)
        assert not stale.alive


async def test_a_connection_whose_shard_has_ended_as_far_as_its_child_shows_is_held_back_too(
    tmp_path: Path,
) -> None:
    pipeline = Pipeline(tmp_path, rules=LITTLE)
    async with pipeline.life() as coordinator:
        parent, _ = await pipeline.open("p"), await pipeline.open("c")
        coordinator.shards.know({"p": (), "c": ("p",)})
        lose_the_ledger(pipeline)
        await assert_held(pipeline, parent)
        assert parent.alive
        assert parent.checkpoint_due() == Sequence(1)
