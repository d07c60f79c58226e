"""A child process that is kept running: how long the next start waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from mldserver.base.backoff import Backoff
from mldserver.children.supervise import HEALTHY_SECONDS, ChildExit, supervise
from mldserver.testing import VirtualClock


class Child:
    """Plays lives: how many seconds each lasts, and whether it was useful; None: its exit was intended."""

    def __init__(self, lives: Iterable[tuple[float, bool | None]]) -> None:
        self.clock = VirtualClock()
        self.lives: Iterator[tuple[float, bool | None]] = iter(lives)
        self.delays: list[float] = []
        self.stopping = asyncio.Event()

    async def run_once(self) -> ChildExit | None:
        seconds, useful = next(self.lives, (0.0, None))
        if (seconds, useful) == (0.0, None):
            self.stopping.set()
        await self.clock.sleep(seconds)
        return None if useful is None else ChildExit(self.delays.append, useful)

    async def supervised(self, seconds: float = 3600) -> list[float]:
        backoff = Backoff(base=1.0, cap=8.0)
        task = asyncio.create_task(
            supervise(self.run_once, backoff=backoff, clock=self.clock, stopping=self.stopping)
        )
        await self.clock.advance(seconds)
        assert task.done()
        await task
        return self.delays


async def test_starts_wait_longer_and_longer_until_a_run_was_useful_or_long() -> None:
    lives = [*[(1, False)] * 5, (1, True), (1, False), (HEALTHY_SECONDS, False), (1, False)]
    assert await Child(lives).supervised() == [1, 2, 4, 8, 8, 1, 2, 1, 2]


async def test_an_intended_exit_does_not_count_and_is_followed_at_once() -> None:
    assert await Child([(1, False), (1, None), (1, None), (1, False)]).supervised(8) == [1, 2]


async def test_it_ends_with_the_run_or_the_wait_in_which_it_is_told_to_stop() -> None:
    child = Child([(1, False)] * 9)
    task = asyncio.create_task(
        supervise(child.run_once, backoff=Backoff(60.0, 60.0), clock=child.clock, stopping=child.stopping)
    )
    await child.clock.advance(2)
    assert child.delays == [60]
    child.stopping.set()
    await child.clock.advance(0.1)
    assert task.done()
