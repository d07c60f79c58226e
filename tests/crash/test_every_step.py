"""The server is killed at every named step, and at random instants; what comes out is always the same."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from crash.stories import OF_COMMANDS, OF_LAKES, OF_LETTERS, OF_STATE, OF_TIMERS
from crash.world import Death, Toll, play_all

from mldserver.base.kill_points import STEPS

ALONE = sorted(
    STEPS.keys() - {"windows.adopted"} - OF_COMMANDS - OF_LAKES - OF_LETTERS - OF_STATE - OF_TIMERS
)
"""What a server that is alone on its ledger comes to, except the steps of ``test_keyed.py``, ``test_timed.py`` and ``test_pause.py``."""


async def test_a_server_killed_at_every_step_loses_and_doubles_nothing(
    tmp_path: Path, seed: int, long: bool
) -> None:
    rounds = 4 if long else 1
    dice = random.Random(seed)
    deaths = [Death(step, 1 if turn == 0 else dice.randint(2, 6)) for turn in range(rounds) for step in ALONE]
    dice.shuffle(deaths)
    toll = Toll.of(deaths)
    began = time.monotonic()
    stories = await play_all(tmp_path, toll, seed)
    seconds = time.monotonic() - began
    print(f"{toll.died.total()} kills at {len(toll.died)} steps in {stories} stories, {seconds:.0f} s")
    print(f"{toll.with_workers} of them had a worker process")
    assert [step for step in ALONE if toll.died[step] < rounds] == []
    assert toll.with_workers


@pytest.mark.long
async def test_a_server_killed_at_random_instants_loses_and_doubles_nothing(
    tmp_path: Path, seed: int
) -> None:
    instants = 160
    dice = random.Random(seed)
    toll = Toll.of(Death(after_seconds=0.02 + dice.random() * 0.7) for _ in range(instants))
    began = time.monotonic()
    stories = await play_all(tmp_path, toll, seed)
    print(f"{toll.died.total()} kills in {stories} stories, {time.monotonic() - began:.0f} s")
    print(f"{toll.with_workers} of them had a worker process")
    assert toll.died.total() >= instants
