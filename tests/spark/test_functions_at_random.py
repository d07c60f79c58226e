"""Functions that come, go, change, hang and kill their driver at random: at the end every one of them computes its windows."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
from spark.bench import job
from spark.test_several_functions import Shared, plan

from mldserver.base.clock import SystemClock
from mldserver.errors import DriverLost, MldserverError, WindowFailed
from mldserver.spark import shared_driver
from mldserver.spark.client import SparkEngine


class Quick(SystemClock):
    """No wait is longer than some milliseconds, except those for user code that hangs."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(0.1 if seconds == GRACE else min(seconds, 0.02))


GRACE = 33.0
NAMES = "abc"


class Chaos:
    def __init__(self, tmp_path: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        concurrency = self.rng.choice((1, 2))
        self.it = Shared(tmp_path, concurrency=concurrency, clock=Quick(), cancel_grace=GRACE, stop_grace=5)
        self.engines: dict[str, SparkEngine] = {}
        self.texts: dict[str, str] = {}

    async def live(self, name: str) -> None:
        """Run a function, again after each of its ends: with other code, as its author would."""
        while name in self.texts:
            engine = self.engines[name] = self.it.engine(name, self.texts[name])
            with contextlib.suppress(MldserverError):
                await engine.run()
            await asyncio.sleep(0.01)

    async def step(self) -> None:
        name = self.rng.choice(NAMES)
        engine = self.engines[name]
        match self.rng.choice(("compute", "compute", "hang", "kill", "renew", "refuse", "close", "wait")):
            case "compute":
                await self.attempt(engine, f"w{self.rng.random()}", 0.05)
            case "hang":
                await self.attempt(engine, self.rng.choice(("hangs", "hangs for good", "slow")), 0.1)
            case "kill":
                await self.attempt(engine, self.rng.choice(("dies", "is killed", "jvm dies")), 0.1)
            case "renew":
                self.texts[name] = f"version {self.rng.random()} of {name}"
                engine.renew(plan(self.texts[name]))
            case "refuse":
                engine.renew(plan(f"fails:{self.rng.choice(('handler', 'spark', 'operator'))}"))
            case "close":
                await engine.close()
            case "wait":
                await asyncio.sleep(self.rng.random() / 5)

    async def attempt(self, engine: SparkEngine, window: str, seconds: float) -> None:
        with contextlib.suppress(DriverLost, WindowFailed, TimeoutError):
            async with asyncio.timeout(seconds):
                await engine.compute(job(window))


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_functions_do_in_the_end_each_computes_its_windows_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, *, long: bool
) -> None:
    monkeypatch.setattr(shared_driver, "has_room_beside", lambda _: chaos.rng.random() < 0.7)
    chaos = Chaos(tmp_path, seed)
    # One module of a name for all functions would exclude them: each has a plan of its own.
    monkeypatch.setattr("mldserver.spark.driver_functions.conflict", own_plans)
    async with chaos.it.running(), asyncio.TaskGroup() as tasks, asyncio.timeout(120):
        chaos.texts = {name: f"version 0 of {name}" for name in NAMES}
        lives = [tasks.create_task(chaos.live(name)) for name in NAMES]
        await asyncio.sleep(0)
        for _ in range(60 if long else 15):
            await chaos.step()
        for name in NAMES:
            chaos.texts[name] = f"last of {name}"
            chaos.engines[name].renew(plan(chaos.texts[name]))
        for name in NAMES:
            while True:
                with contextlib.suppress(DriverLost):
                    assert (await chaos.engines[name].compute(job("w"))).rows == 5
                    break
                await asyncio.sleep(0.01)
        chaos.texts.clear()
        for engine in chaos.engines.values():
            await engine.close()
        await asyncio.wait(lives)


def own_plans(one: Any, other: Any) -> str:
    """Say that a driver which has imported a function's module cannot import another one of the function."""
    return "another module" if one.name == other.name and one.code != other.code else ""
