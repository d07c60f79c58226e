"""The queue of jobs: whose turn it is."""

from __future__ import annotations

import asyncio
import random

import pytest

from mldserver.spark.slots import FairSlots

pytestmark = pytest.mark.quick


class Queue:
    """Jobs that hold a slot until the test ends them."""

    def __init__(self, count: int) -> None:
        self.slots = FairSlots(count)
        self.begun: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def add(self, *names: str) -> None:
        """Add jobs; the first letter is the function."""
        for name in names:
            self.tasks[name] = asyncio.ensure_future(self._run(name))

    async def _run(self, name: str) -> None:
        async with self.slots.hold(name[0]):
            self.begun.append(name)
            self.running[name] = asyncio.Event()
            try:
                await self.running[name].wait()
            finally:
                del self.running[name]

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def end(self, name: str) -> None:
        self.running[name].set()
        await self.settle()


async def test_functions_take_turns_however_many_jobs_one_of_them_has() -> None:
    it = Queue(1)
    it.add(*(f"a{number}" for number in range(5)))
    await it.settle()
    it.add("b0", "b1", "c0")
    await it.settle()
    while it.running:
        await it.end(it.begun[-1])
    assert it.begun == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]


async def test_a_slot_that_is_freed_early_is_freed_once() -> None:
    slots = FairSlots(1)
    async with slots.hold("a") as free:
        free()
        async with slots.hold("b"):
            free()
            waits = asyncio.ensure_future(slots.hold("c").__aenter__())
            await asyncio.sleep(0)
            assert not waits.done()
    await waits


async def test_a_cancelled_job_passes_its_turn_on() -> None:
    it = Queue(1)
    it.add("a0", "b0", "c0")
    await it.settle()
    it.tasks["b0"].cancel()
    await it.end("a0")
    assert it.begun == ["a0", "c0"]
    it.add("d0", "e0")
    await it.settle()
    # The slot comes in the very turn of the event loop in which its job is cancelled.
    it.running["c0"].set()
    await asyncio.sleep(0)
    it.tasks["d0"].cancel()
    await it.settle()
    assert it.begun == ["a0", "c0", "e0"]


async def test_no_slot_is_lost_or_made_whatever_is_cancelled_when() -> None:
    rng = random.Random(7)
    it = Queue(3)
    for number in range(600):
        match rng.randrange(4):
            case 0 | 1:
                it.add(f"{rng.choice('abcd')}{number}")
            case 2 if it.running:
                it.running[rng.choice(sorted(it.running))].set()
            case _ if it.tasks:
                it.tasks[rng.choice(sorted(it.tasks))].cancel()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
        assert len(it.running) <= 3
    while not all(task.done() for task in it.tasks.values()):
        for running in it.running.values():
            running.set()
        await asyncio.sleep(0)
    it.add("x0", "x1", "x2", "x3")
    await it.settle()
    assert sorted(it.running) == ["x0", "x1", "x2"]
    for task in it.tasks.values():
        task.cancel()


async def test_the_slots_are_idle_while_all_are_free() -> None:
    it = Queue(2)
    await it.slots.idle()
    it.add("a0", "a1", "b0")
    await it.settle()
    idle = asyncio.ensure_future(it.slots.idle())
    for name in ("a0", "a1"):
        await it.end(name)
        assert not idle.done()
    await it.end("b0")
    await idle
