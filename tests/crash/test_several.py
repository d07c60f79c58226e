"""A server with two functions is killed at every step: both read one stream, and each counts each record of its own once."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from crash.lives import Life, Plan
from crash.local_life import LocalLife
from crash.stories import OF_STATE, Story
from crash.test_keyed import OF_RECORDS
from crash.world import Death, Toll, World, play_all

STEPS = (
    "recovery.opened",
    "server.joined",
    "window.cut",
    "window.committed",
    "window.visible",
    "server.left",
)
"""Steps of windows, starts and stops, in addition to those of records and state."""
FEW = 6
"""How many steps a day's run draws."""


class Neighbours(World):
    """A story that two functions of one server read, each with a daemon, a folder and a ledger of its own."""

    def __init__(self, root: Path, story: Story, toll: Toll, *, kills: int) -> None:
        """Die at most ``kills`` times of what ``toll`` holds."""
        super().__init__(root, story, toll, kills=kills, life=self._both, settings={"pipeline": "first"})
        (root / "second").mkdir()
        shared = {"pipeline": "second", "log_file": root / "log"}
        self._second = World(root / "second", story, Toll.of(()), kills=0, settings=shared)

    def _both(self, plan: Plan, step: str | None) -> Life:
        return LocalLife(plan, step, self._second._plan)

    async def play(self) -> None:
        """Play the story to its end, and compare what either function made of it."""
        worlds = (self, self._second)
        with self._sockets, self._second._sockets:
            async with asyncio.TaskGroup() as group:
                daemons = group.create_task(_all(worlds), name="daemons")
                while not await self._live(daemons):
                    pass
        for world in worlds:
            await world.compare()


async def _all(worlds: tuple[World, ...]) -> int:
    return max(await asyncio.gather(*(world._mld.run() for world in worlds)))


async def test_a_server_with_two_functions_killed_at_every_step_counts_each_record_once_in_both(
    tmp_path: Path, seed: int, long: bool
) -> None:
    dice = random.Random(seed)
    every = [*OF_RECORDS, *sorted(OF_STATE), *STEPS]
    steps = every * 3 if long else dice.sample(every, FEW)
    deaths = [Death(step, dice.randint(1, 8) if long else 1) for step in steps]
    dice.shuffle(deaths)
    toll = Toll.of(deaths)

    async def play(root: Path, story: Story, toll: Toll, kills: int) -> None:
        await Neighbours(root, story, toll, kills=kills).play()

    stories = await play_all(tmp_path, toll, seed, play=play, kind_for=lambda *_: "keyed")
    print(f"{toll.died.total()} kills at {len(toll.died)} steps in {stories} stories")
    assert toll.died.total() >= len(deaths)
