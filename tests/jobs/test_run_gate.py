"""The lock that the windows of all functions share on one driver."""

from __future__ import annotations

import asyncio

import pytest

from mldserver.jobs.run_gate import RunGate

pytestmark = pytest.mark.quick


class Attempts:
    """Attempts at windows of several functions, which run until the test ends them."""

    def __init__(self) -> None:
        self.gate = RunGate()
        self.inside: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    def begin(self, function: str, window: str, *, alone: bool = False) -> None:
        name = f"{function}/{window}"
        self._ends[name] = asyncio.Event()

        async def run() -> None:
            async with self.gate.enter([(function, window)], alone=alone):
                self.inside.append(name)
                await self._ends[name].wait()
                self.inside.remove(name)

        self._ends[f"task of {name}"] = asyncio.ensure_future(run())  # type: ignore[assignment]  # keeps it alive

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


async def test_a_window_that_must_be_alone_is_alone_among_all_functions() -> None:
    it = Attempts()
    it.begin("a", "w")
    it.begin("b", "w")
    await it.settle()
    it.begin("a", "suspect", alone=True)
    it.begin("b", "later")
    await it.settle()
    assert it.inside == ["a/w", "b/w"]
    await it.end("a/w")
    assert it.inside == ["b/w"]
    await it.end("b/w")
    assert it.inside == ["a/suspect"]
    await it.end("a/suspect")
    assert it.inside == ["b/later"]
    await it.end("b/later")


async def test_a_slow_window_lets_others_in_and_not_the_window_of_that_id_of_another_function() -> None:
    it = Attempts()
    it.begin("a", "w", alone=True)
    it.begin("b", "w", alone=True)
    await it.settle()
    assert it.inside == ["a/w"]
    it.gate.release(("b", "w"))
    await it.settle()
    assert it.inside == ["a/w"]
    it.gate.release(("a", "w"))
    await it.settle()
    assert it.inside == ["a/w", "b/w"]
    await it.end("a/w")
    await it.end("b/w")
