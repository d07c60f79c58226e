"""Two servers on one ledger, killed and stopped while leases move between them; what comes out is always the same."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import aioboto3
import pytest
from crash.lives import Ground
from crash.pair import NEVER, SELDOM, Pair
from crash.stories import ONLY_IN, Story
from crash.world import Death, Toll, play_all

from mldserver.base.clock import SystemClock
from mldserver.base.kill_points import STEPS
from mldserver.config.locations import DynamoPlace
from mldserver.ledger.dynamodb import DynamoLedger

pytestmark = pytest.mark.timeout(1800)

EVERY = sorted(STEPS.keys() - NEVER.keys())
FEW = 10
"""How many of the steps a day's run draws. A server that is alone dies at each every day, pairs do in simulated worlds."""
ON_A_TABLE = 90
"""Deaths there: each costs 2.5 s of a processor, since the emulator computes each transaction over all that it holds."""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "emulated", "AWS_SECRET_ACCESS_KEY": "emulated"}


def fates(dice: random.Random, steps: Iterable[str], *, instants: int, hangs: int) -> Toll:
    """Return a death at each step, some at random instants, and some servers that hang."""
    deaths = [Death(step) for step in steps]
    deaths += [Death(after_seconds=0.02 + dice.random() * 0.7) for _ in range(instants)]
    deaths += [Death(times=number + 1, hangs=True) for number in range(hangs)]
    return Toll.of(deaths)


async def play_pairs(
    folder: Path,
    seed: int,
    toll: Toll,
    grounds: Callable[[], AbstractAsyncContextManager[Ground]],
    kind: str | None = None,
) -> None:
    """Play until every death was died, each story on a ground of its own, and tell what that took.

    ``kind``: of all stories; None: all kinds in turn.
    """

    async def play(root: Path, story: Story, toll: Toll, kills: int) -> None:
        async with grounds() as ground:
            if kind is not None:  # leases stay for as long as it takes to load a store
                ground = replace(ground, pace=3 * ground.pace)  # noqa: PLW2901  # the story's own
            await Pair(root, story, toll, ground, kills=kills).play()

    began = time.monotonic()
    steps = {death.step for death in toll.ahead if death.step} - SELDOM
    chosen = kind_for if kind is None else lambda *_: kind
    at_once = 2 if kind is None else 1
    stories = await play_all(
        folder, toll, seed, kills_per_story=20, at_once=at_once, play=play, kind_for=chosen
    )
    seconds = time.monotonic() - began
    died = toll.died.total() - toll.died["silent"]
    print(
        f"{died} kills at {len(toll.died)} steps in {stories} stories, {seconds:.0f} s; {toll.died['hangs']} hung"
    )
    print(f"seldom, and not met: {sorted(SELDOM - toll.died.keys())}")
    assert steps | {"hangs"} <= toll.died.keys()


def kind_for(toll: Toll, usual: str) -> str:
    """Return the kind of story that a step ahead needs."""
    kinds = next((ONLY_IN[each.step] for each in toll.ahead if each.step in ONLY_IN), (usual,))
    return usual if usual in kinds else kinds[0]


@contextlib.asynccontextmanager
async def a_file() -> AsyncIterator[Ground]:
    """Give a ledger in a file, as it is without any setting."""
    yield Ground()


async def test_two_servers_on_a_file_killed_while_leases_move_lose_and_double_nothing(
    tmp_path: Path, seed: int, long: bool
) -> None:
    dice = random.Random(seed)
    steps, instants, hangs = (EVERY, 100 - len(EVERY) - 4, 4) if long else (dice.sample(EVERY, FEW), 2, 1)
    toll = fates(dice, steps, instants=instants, hangs=hangs)
    await play_pairs(tmp_path, seed, toll, a_file)


@contextlib.asynccontextmanager
async def a_table() -> AsyncIterator[Ground]:
    """Give a ledger in DynamoDB.

    The emulator copies all that it holds at each transaction: every story has one, in a process of its own.
    """
    script = Path(__file__).parents[1] / "support" / "emulator.py"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        descriptor = listener.fileno()
        emulator = await asyncio.create_subprocess_exec(
            sys.executable, str(script), str(descriptor), pass_fds=(descriptor,), stderr=subprocess.DEVNULL
        )
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            place = DynamoPlace("positions", "us-east-1", url)
            await create(place)
            yield Ground(
                place, CREDENTIALS, {"flush_interval": 0.1}, pace=4.0, timeout_seconds=2.0, apart=True
            )
        finally:
            emulator.kill()
            await emulator.wait()


@pytest.mark.long
async def test_two_servers_on_a_table_killed_while_leases_move_lose_and_double_nothing(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    toll = fates(random.Random(seed), EVERY, instants=ON_A_TABLE - len(EVERY) - 2, hangs=2)
    await play_pairs(tmp_path, seed, toll, a_table)


async def create(place: DynamoPlace) -> None:
    """Make the table."""
    session = aioboto3.Session("emulated", "emulated", region_name=place.region)
    maker = DynamoLedger(
        place.table,
        pipeline="nobody",
        server_id="maker",
        clock=SystemClock(),
        endpoint_url=place.endpoint_url,
        session=session,
    )
    try:
        await maker.create_table()
        await maker.open()
        await maker.leave()
    finally:
        await maker.close()
