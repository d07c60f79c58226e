"""``batches(…)`` through restarts, and over several servers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from coordinator.pipeline import RULES, Pipeline

from mldserver.ledger.contract import batch_id
from mldserver.records import Sequence
from mldserver.testing import VirtualClock
from mldserver.windows import batches


@pytest.mark.parametrize(
    "recompute",
    [pytest.param(False, id="separate", marks=pytest.mark.long), pytest.param(True, id="recompute")],
)
async def test_the_number_of_one_that_was_cut_for_its_age_is_not_given_again_after_a_restart(
    tmp_path: Path, recompute: bool
) -> None:
    rules = replace(RULES, retention_ms=60_000)
    pipeline = Pipeline(tmp_path, spec=batches(max_rows=100, max_age="2 s"), rules=rules, recompute=recompute)
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (2, 1001)])
        await pipeline.clock.advance(130)
        assert pipeline.published() == {batch_id(0): [1, 2]}
    assert pipeline.state().windows == {}, "published, and not retained any more"
    async with pipeline.life():
        session = await pipeline.open("a", Sequence(2))
        # Long enough for the window to be forgotten.
        for _ in range(80):
            await pipeline.clock.advance(60)
        await pipeline.give(session, [(3, 5_000_000), (4, 5_000_001)])
        await pipeline.clock.advance(20)
        assert pipeline.published() == {batch_id(0): [1, 2], batch_id(1): [3, 4]}
        assert pipeline.coordinator.status().windows_halted == ()


async def test_of_two_servers_that_fill_a_batch_each_keeps_its_bound_for_its_own_rows(tmp_path: Path) -> None:
    clock = VirtualClock(1_000_000)

    async def pause() -> None:
        """Let the other server go on between any two calls of the ledger."""
        for _ in range(40):
            await asyncio.sleep(0)

    def server(server_id: str) -> Pipeline:
        made = Pipeline(
            tmp_path, spec=batches(max_rows=100, max_age="1 hour"), server_id=server_id, clock=clock
        )
        made.faults.pause = pause  # type: ignore[method-assign]  # of this one
        return made

    one, two = server("one"), server("two")
    async with one.life(), two.life():
        a, b = await one.open("a"), await two.open("b")
        for first in range(1, 601, 10):
            records = [(first + n, 1000 + first) for n in range(10)]
            await one.give(a, records)
            await two.give(b, records)
            await clock.advance(1)
        for _ in range(10):
            await clock.advance(1)
        for server in (one, two):
            await server.cycle()
        found = [len(rows) for rows in one.published().values()]
    # What the two put in between each other's last look at the ledger and their flush may exceed the bound.
    assert all(100 <= rows <= 200 for rows in found), found
