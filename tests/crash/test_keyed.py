"""A handler that keeps state is killed at the steps of state and of flushes: each record counts once, with either runtime and ledger."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from crash.lives import Ground
from crash.stories import OF_STATE, Story
from crash.test_two_servers import CREDENTIALS, a_table
from crash.world import Death, Toll, World, play_all

pytestmark = pytest.mark.timeout(1800)

OF_RECORDS = (
    "shard.opening",
    "shard.opened",
    "batch.received",
    "batch.handled",
    "batch.buffered",
    "flush.registering",
    "flush.registered",
    "flush.done",
    "batch.answered",
    "checkpoint.stored",
    "shard.end_durable",
    "shard.end_stored",
    "ledger.written",
    "ledger.committed",
    "recovery.swept",
)
"""Other steps on which it depends whether a record counts."""
RUNTIMES = {"inside the server": {}, "in a worker process": {"workers": 1}}


@contextlib.asynccontextmanager
async def a_file() -> AsyncIterator[Ground]:
    """Give a ledger in a file."""
    yield Ground()


def deaths(dice: random.Random, *, rounds: int) -> list[Death]:
    """Return a death at each step of state, and at others in the long lane, so many times each."""
    steps = [*sorted(OF_STATE), *(OF_RECORDS if rounds > 1 else ())]
    found = [Death(step, 1 if turn == 0 else dice.randint(2, 8)) for turn in range(rounds) for step in steps]
    dice.shuffle(found)
    return found


async def play_keyed(
    folder: Path,
    seed: int,
    toll: Toll,
    grounds: Callable[[], AbstractAsyncContextManager[Ground]],
    settings: dict[str, Any],
    kind: str = "keyed",
) -> None:
    """Play stories of a kind until every death was died."""

    async def play(root: Path, story: Story, toll: Toll, kills: int) -> None:
        async with grounds() as ground:
            await World(root, story, toll, kills=kills, settings=settings, ground=ground).play()

    wanted = len(toll.ahead)
    stories = await play_all(folder, toll, seed, play=play, kind_for=lambda *_: kind)
    print(f"{toll.died.total()} kills at {len(toll.died)} steps in {stories} stories")
    assert toll.died.total() >= wanted


@pytest.mark.parametrize(
    "runtime",
    # By day servers with the handler inside are killed in simulated worlds, and in dynamodb_streams/test_kills.py.
    [pytest.param("inside the server", marks=pytest.mark.long), "in a worker process"],
)
async def test_a_counting_server_killed_over_a_file_counts_each_record_once(
    runtime: str, tmp_path: Path, seed: int, long: bool
) -> None:
    toll = Toll.of(deaths(random.Random(seed), rounds=4 if long else 1))
    await play_keyed(tmp_path, seed, toll, a_file, RUNTIMES[runtime])


@pytest.mark.long
@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_a_counting_server_killed_over_a_table_counts_each_record_once(
    runtime: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    toll = Toll.of(deaths(random.Random(seed), rounds=3))
    await play_keyed(tmp_path, seed, toll, a_table, RUNTIMES[runtime])
