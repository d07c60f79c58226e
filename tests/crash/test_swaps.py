"""Versions change while batches arrive and servers die: each record counts once and each timer fires once, whichever version runs."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from crash.lives import Ground
from crash.local_life import LocalLife
from crash.pair import NEVER, Pair
from crash.stories import OF_COMMANDS, OF_STATE, OF_TIMERS, Story
from crash.test_keyed import OF_RECORDS, a_file
from crash.test_two_servers import CREDENTIALS, a_table, fates
from crash.world import Death, Toll, World, play_all

pytestmark = pytest.mark.timeout(1800)

SLOW = """
import time

_at_once = process_record


def process_record(record, ctx):
    time.sleep(0.005)
    return _at_once(record, ctx)


"""
"""So that a story lasts for several versions."""
WORKERS = {"workers": 1}


def write_versions(root: Path, kind: str) -> Path:
    """Slow a story's handler down, write a second version of it, and return the folder of that one."""
    first, second = root / f"rows_{kind}.py", root / "second"
    text = first.read_text() + SLOW
    first.write_text(text + 'version = "1"\n')
    second.mkdir()
    (second / first.name).write_text(text + 'version = "2"\n')
    return second


async def exchange(life: LocalLife, second: Path, pause_seconds: float) -> None:
    """Exchange the versions of a function for as long as its server lives."""
    stage = json.dumps({"path": str(second)})
    while (result := await life.act("functions.rollback", "{}")) is not None:
        if not result[0]:  # it starts, or has had one version so far
            await life.act("functions.stage", stage)
            await life.act("functions.deploy", "{}")
        await asyncio.sleep(pause_seconds)


class SwappedWorld(World):
    """A story whose server changes versions all the time."""

    def __init__(self, root: Path, story: Story, toll: Toll, *, kills: int, ground: Ground) -> None:
        super().__init__(root, story, toll, kills=kills, settings=WORKERS, ground=ground)
        self._second = write_versions(root, story.kind)
        self._pause = pause_on(ground)

    async def operate(self, life: Any) -> None:
        await exchange(life, self._second, self._pause)


class SwappedPair(Pair):
    """A story whose two servers change versions, each at any time."""

    never: ClassVar = {step: why for step, why in NEVER.items() if step not in OF_COMMANDS}

    def __init__(self, root: Path, story: Story, toll: Toll, *, kills: int, ground: Ground) -> None:
        # Leases stay for as long as it takes to load a store.
        ground = replace(ground, settings=ground.settings | WORKERS, pace=4 * ground.pace)
        super().__init__(root, story, toll, ground, kills=kills)
        self._second = write_versions(root, story.kind)
        self._pause = pause_on(ground)

    async def operate(self, life: LocalLife) -> None:
        await exchange(life, self._second, self._pause)


def pause_on(ground: Ground) -> float:
    """Return how many seconds pass between two exchanges: the emulator of a table is slow."""
    return 0.02 if ground.dynamodb is None else 2.0


def swaps(folder: Path) -> int:
    """Count the changes of versions that the servers of all stories have logged."""
    return sum(log.read_text("utf-8", "replace").count('"function.swapped"') for log in folder.glob("*/*log"))


async def play(
    folder: Path,
    seed: int,
    toll: Toll,
    kind: str,
    grounds: Callable[[], AbstractAsyncContextManager[Ground]],
    world: type[SwappedWorld | SwappedPair] = SwappedWorld,
) -> None:
    """Play stories of a kind until every death was died."""

    async def play_one(root: Path, story: Story, toll: Toll, kills: int) -> None:
        async with grounds() as ground:
            await world(root, story, toll, kills=kills, ground=ground).play()

    steps = {death.step for death in toll.ahead if death.step}
    stories = await play_all(
        folder,
        toll,
        seed,
        kills_per_story=6,
        at_once=2 if world is SwappedWorld else 1,
        play=play_one,
        kind_for=lambda *_: kind,
    )
    print(
        f"{toll.died.total()} kills at {len(toll.died)} steps and {swaps(folder)} swaps in {stories} stories"
    )
    assert steps <= toll.died.keys()
    assert swaps(folder) >= stories


def deaths(dice: random.Random, kind: str, *, rounds: int) -> list[Death]:
    """Return deaths at the steps of commands, and in the long lane so many at each step of records, state and timers."""
    steps = sorted(OF_COMMANDS) * 2
    more = (*OF_RECORDS, *OF_STATE, *(OF_TIMERS if kind == "timed" else ()))
    found = [Death(step, dice.randint(1, 3)) for step in [*steps, *(more * rounds)]]
    dice.shuffle(found)
    return found


@pytest.mark.parametrize("kind", [pytest.param("keyed", marks=pytest.mark.long), "timed"])
async def test_versions_change_over_a_file_while_the_server_dies(
    kind: str, tmp_path: Path, seed: int, *, long: bool
) -> None:
    toll = Toll.of(deaths(random.Random(seed), kind, rounds=2 if long else 0))
    await play(tmp_path, seed, toll, kind, a_file)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["keyed", "timed"])
async def test_versions_change_over_a_table_while_the_server_dies(
    kind: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    await play(tmp_path, seed, Toll.of(deaths(random.Random(seed), kind, rounds=1)), kind, a_table)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["keyed", "timed"])
@pytest.mark.parametrize("place", ["a file", "a table"])
async def test_versions_change_at_two_servers_while_both_die(
    kind: str, place: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    toll = fates(random.Random(seed), [*OF_COMMANDS] * 3, instants=8, hangs=2)
    await play(tmp_path, seed, toll, kind, {"a file": a_file, "a table": a_table}[place], SwappedPair)
