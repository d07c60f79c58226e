"""Two servers on one ledger, killed and stopped while leases move between them; what comes out is always the same."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING

import pytest
from crash.pair import Ground, Pair, kind_for
from crash.world import Death, Toll, play_all

from mldserver.faults import STEPS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from crash.stories import Story

pytestmark = pytest.mark.timeout(600)

EVERY = sorted(STEPS)
HANGS_AT = (
    "segment.written",
    "flush.registering",
    "job.running",
    "attempt.staged",
    "window.committed",
    "batch.buffered",
)
"""Steps at which a server that hangs still has much to do when it goes on."""


@pytest.fixture
def seed() -> int:
    return int(os.environ.get("MLDSERVER_CRASH_SEED") or random.SystemRandom().randrange(1_000_000))


def fates(dice: random.Random, steps: Iterable[str], *, instants: int, hangs: int) -> Toll:
    """Return a death at each step, some at random instants, and some servers that hang."""
    deaths = [Death(step, dice.randint(1, 3)) for step in steps]
    deaths += [Death(after_seconds=0.02 + dice.random() * 0.7) for _ in range(instants)]
    stopped = dice.sample(HANGS_AT, hangs - 1)
    deaths += [Death(step, dice.randint(1, 3), hangs=True) for step in stopped]
    deaths += [Death(after_seconds=0.3 + dice.random() * 0.5, hangs=True)]
    dice.shuffle(deaths)
    return Toll.of(deaths)


async def play_pairs(folder: Path, seed: int, toll: Toll, ground: Ground) -> None:
    """Play until every death was died, and tell what that took."""
    steps = {death.step for death in toll.ahead if not death.hangs}

    async def play(root: Path, story: Story, toll: Toll, kills: int) -> None:
        await Pair(root, story, toll, ground, kills=kills).play()

    began = time.monotonic()
    wanted = len(toll.ahead)
    stories = await play_all(folder, toll, seed, kills_per_story=20, play=play, kind_for=kind_for)
    seconds = time.monotonic() - began
    died = toll.died.total() - toll.died["silent"]
    print(
        f"{died} kills at {len(toll.died)} steps in {stories} stories, {seconds:.0f} s; {toll.died['hangs']} hung"
    )
    assert died >= wanted
    assert steps <= toll.died.keys()


async def test_two_servers_on_a_file_killed_while_leases_move_lose_and_double_nothing(
    tmp_path: Path, seed: int
) -> None:
    print(f"MLDSERVER_CRASH_SEED={seed}")
    toll = fates(random.Random(seed), EVERY, instants=100 - len(EVERY), hangs=4)
    await play_pairs(tmp_path, seed, toll, Ground())
