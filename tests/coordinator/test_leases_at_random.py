"""Two coordinators on one ledger under a stream whose leases move at random, and servers that die at any call."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from coordinator.leases import stream, until_published
from coordinator.pipeline import two
from support.lanes import seeds

from mldserver.windows import Tumbling, WindowSpec, batches


@pytest.mark.parametrize("seed", seeds(6))
async def test_leases_that_move_gently_make_no_row_late(tmp_path: Path, seed: int) -> None:
    one, other = two(tmp_path)
    daemon = stream(random.Random(seed), one.clock)
    daemon.gentle, daemon.alive = True, [one, other]
    async with asyncio.timeout(800), one.life(), other.life():
        await one.clock.drive(until_published(daemon), step=0.1)
    daemon.assert_all(one)
    assert one.late() == []


SPECS = {"tumbling": Tumbling(10_000), "batches": batches(max_rows=4, max_age="2 s")}


@pytest.mark.parametrize("seed", seeds(8))
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
async def test_leases_that_move_at_any_moment_lose_and_double_nothing(
    tmp_path: Path, spec: WindowSpec, seed: int
) -> None:
    one, other = two(tmp_path, spec=spec, recompute=seed % 2 == 0)
    daemon = stream(random.Random(seed), one.clock)
    daemon.alive = [one, other]
    async with asyncio.timeout(800), one.life(), other.life():
        await one.clock.drive(until_published(daemon), step=0.1)
    daemon.assert_all(one)


@pytest.mark.parametrize("seed", seeds(10))
async def test_servers_that_die_at_any_call_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    spec = choose.choice(list(SPECS.values()))
    one, other = two(tmp_path, spec=spec, recompute=choose.random() < 0.5)
    daemon = stream(choose, one.clock)
    async with asyncio.timeout(800), asyncio.TaskGroup() as group:
        lives = [group.create_task(daemon.live(each, name)) for each, name in ((one, "one"), (other, "two"))]
        await one.clock.drive(daemon.see_out(), step=0.2)
        for life in lives:
            life.cancel()
    daemon.assert_all(one)
    assert daemon.deaths > 0
