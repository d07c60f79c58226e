"""A server whose records set timers is killed at the steps of timers and of flushes: each timer fires once, as the model says."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from crash.stories import OF_TIMERS
from crash.test_keyed import OF_RECORDS, RUNTIMES, a_file, play_keyed
from crash.test_two_servers import CREDENTIALS, a_table, fates, play_pairs
from crash.world import Death, Toll

pytestmark = pytest.mark.timeout(1800)

MORE = (*OF_RECORDS, "state.written", "state.loaded", *OF_TIMERS)
"""Steps at which servers die in the long lane beside those of timers."""


def deaths(dice: random.Random, *, rounds: int) -> list[Death]:
    """Return a death at each step of timers, and in the long lane so many at all steps."""
    steps = (*sorted(OF_TIMERS), *(MORE if rounds > 1 else ()))
    found = [Death(step, 1 if turn == 0 else dice.randint(2, 8)) for turn in range(rounds) for step in steps]
    dice.shuffle(found)
    return found


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_a_server_killed_over_a_file_fires_each_timer_once(
    runtime: str, tmp_path: Path, seed: int, long: bool
) -> None:
    toll = Toll.of(deaths(random.Random(seed), rounds=4 if long else 1))
    await play_keyed(tmp_path, seed, toll, a_file, RUNTIMES[runtime], "timed")


@pytest.mark.long
@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_a_server_killed_over_a_table_fires_each_timer_once(
    runtime: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    toll = Toll.of(deaths(random.Random(seed), rounds=3))
    await play_keyed(tmp_path, seed, toll, a_table, RUNTIMES[runtime], "timed")


@pytest.mark.long
async def test_two_servers_killed_over_a_table_fire_each_timer_once(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    toll = fates(random.Random(seed), (*OF_TIMERS, *OF_TIMERS, *OF_RECORDS), instants=6, hangs=2)
    await play_pairs(tmp_path, seed, toll, a_table, "timed")
