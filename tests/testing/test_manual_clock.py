from __future__ import annotations

import asyncio

import pytest

from mldserver.base.clock import Clock
from mldserver.testing import VirtualClock


def test_it_is_a_clock() -> None:
    clock: Clock = VirtualClock(5)
    assert clock.now_ms() == 5


async def test_the_time_of_day_is_set_apart_from_the_time_that_passes() -> None:
    clock = VirtualClock(5000)
    await clock.advance(1)
    clock.step(-3600)
    assert (clock.now_ms(), clock.steady_ms()) == (6000 - 3_600_000, 1000)


async def test_sleepers_wake_in_order_at_their_own_times(virtual_clock: VirtualClock) -> None:
    woken: list[tuple[str, int]] = []
    start = virtual_clock.now_ms()

    async def sleeper(name: str, seconds: float) -> None:
        await virtual_clock.sleep(seconds)
        woken.append((name, virtual_clock.now_ms() - start))

    async with asyncio.TaskGroup() as group:
        for name, seconds in (("c", 3), ("a", 1), ("b", 1), ("z", 9)):
            group.create_task(sleeper(name, seconds))
        await virtual_clock.advance(3)
        assert woken == [("a", 1000), ("b", 1000), ("c", 3000)]
        assert virtual_clock.sleepers == 1
        await virtual_clock.advance(6)
    assert woken[-1] == ("z", 9000)


async def test_a_task_that_sleeps_again_inside_the_span_is_woken_again(virtual_clock: VirtualClock) -> None:
    ticks = 0

    async def ticker() -> None:
        nonlocal ticks
        for _ in range(5):
            await virtual_clock.sleep(1)
            ticks += 1

    async with asyncio.TaskGroup() as group:
        group.create_task(ticker())
        await virtual_clock.advance(4.5)
        assert ticks == 4
        await virtual_clock.advance(1)
    assert ticks == 5


async def test_cancelled_sleepers_are_passed_over(virtual_clock: VirtualClock) -> None:
    task = asyncio.ensure_future(virtual_clock.sleep(1))
    await virtual_clock.advance(0)
    task.cancel()
    await virtual_clock.advance(2)
    assert task.cancelled()
    assert virtual_clock.sleepers == 0


async def test_a_sleep_of_zero_only_gives_way(virtual_clock: VirtualClock) -> None:
    await virtual_clock.sleep(0)
    await virtual_clock.sleep(-1)


async def test_time_does_not_go_back(virtual_clock: VirtualClock) -> None:
    with pytest.raises(ValueError, match="does not go back"):
        await virtual_clock.advance(-1)


async def test_drive_advances_until_the_work_is_done(virtual_clock: VirtualClock) -> None:
    async def work() -> str:
        await virtual_clock.sleep(100)
        return "done"

    before = virtual_clock.now_ms()
    assert await virtual_clock.drive(work(), step=10) == "done"
    assert virtual_clock.now_ms() - before >= 100_000
