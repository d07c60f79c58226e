"""Cycle: at every interval, at once when asked, again after a failure, and never two at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mldserver.coordinator.coordinator import Cycle
from mldserver.errors import LedgerError, ServerExpired, told_of
from mldserver.testing import VirtualClock

pytestmark = pytest.mark.quick

FULL = OSError(28, "No space left on device")


class Cycles:
    """A cycle that takes as long as a gate is shut, and fails as it is told to."""

    def __init__(self, interval_ms: int = 1000) -> None:
        self.clock = VirtualClock(0)
        self.turns = Cycle(self.cycle, after=self.after, interval_ms=interval_ms, clock=self.clock)
        self.reasons: list[str] = []
        self.began_ms: list[int] = []
        self.failed = ""
        self.errors: list[Exception] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def cycle(self, reason: str) -> None:
        self.reasons.append(reason)
        self.began_ms.append(self.clock.now_ms())
        await self.gate.wait()
        self.failed = told_of(self.errors[0])["what"] if self.errors else ""
        if self.failed:
            raise self.errors.pop(0)

    async def after(self) -> None:
        assert self.turns.failing == self.failed

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Cycles]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.turns.tick()), group.create_task(self.turns.run())]
            await self.clock.advance(0)
            yield self
            for task in tasks:
                task.cancel()


async def test_a_cycle_runs_at_every_interval() -> None:
    async with Cycles().running() as cycles:
        await cycles.clock.advance(3.5)
        assert cycles.began_ms == [1000, 2000, 3000]
        assert set(cycles.reasons) == {"interval"}


async def test_a_cycle_that_is_wanted_soon_follows_at_once() -> None:
    async with Cycles().running() as cycles:
        cycles.turns.soon()
        await cycles.clock.advance(0.5)
        assert cycles.began_ms == [0]


async def test_who_asks_for_a_whole_cycle_waits_for_one_that_begins_afterwards() -> None:
    async with Cycles().running() as cycles:
        cycles.gate.clear()
        cycles.turns.soon()
        await cycles.clock.advance(0)
        asking = [asyncio.create_task(cycles.turns.whole(reason)) for reason in ("shutdown", "lease_lost")]
        await cycles.clock.advance(0)
        assert cycles.reasons == ["interval"], "one at a time"
        cycles.gate.set()
        await asyncio.gather(*asking)
        assert cycles.reasons == ["interval", "shutdown"], "one for both"


async def test_who_gives_up_waiting_stops_nobody_else() -> None:
    async with Cycles().running() as cycles:
        cycles.gate.clear()
        gone, there = (asyncio.create_task(cycles.turns.whole(reason)) for reason in ("redrive", "shutdown"))
        await cycles.clock.advance(0)
        gone.cancel()
        await asyncio.wait({gone})
        cycles.gate.set()
        await there
        assert cycles.reasons == ["redrive"]


async def test_a_cycle_that_failed_is_tried_again_after_longer_and_longer_pauses(
    logged: list[dict[str, Any]],
) -> None:
    cycles = Cycles()
    cycles.errors = [FULL, LedgerError("out of reach"), *[FULL] * 5]
    async with cycles.running():
        asking = asyncio.create_task(cycles.turns.whole("shutdown"))
        await cycles.clock.advance(90)
        assert cycles.turns.failing
        assert not asking.done()
        await cycles.clock.advance(5)
        assert asking.done()
        assert not cycles.turns.failing
        cycles.errors = [FULL]
        await cycles.clock.advance(2)
    pauses = [entry["delay_seconds"] for entry in logged if entry["event"] == "flush.failed"]
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 1]
    assert cycles.reasons[:8] == ["shutdown"] * 8, "it is still for the same"


async def test_a_failure_that_says_nothing_is_named_by_its_class() -> None:
    cycles = Cycles()
    cycles.errors = [TimeoutError()]
    async with cycles.running():
        cycles.turns.soon()
        await cycles.clock.advance(0.5)
        assert cycles.turns.failing == "TimeoutError"


async def test_a_ledger_that_is_away_for_half_a_day_is_waited_for(logged: list[dict[str, Any]]) -> None:
    cycles = Cycles(interval_ms=3_600_000)
    cycles.errors = [FULL] * 1400
    async with cycles.running():
        cycles.turns.soon()
        await cycles.clock.advance(12 * 3600)
    assert not cycles.turns.failing
    assert [entry["delay_seconds"] for entry in logged if entry["event"] == "flush.failed"][5:] == [
        30.0
    ] * 1395


@pytest.mark.parametrize("error", [ServerExpired("dead"), ZeroDivisionError("a bug")], ids=["expired", "bug"])
async def test_what_no_other_try_can_mend_ends_it(error: Exception) -> None:
    cycles = Cycles()
    cycles.errors = [error]

    async def live() -> None:
        async with cycles.running():
            cycles.turns.soon()
            await cycles.clock.advance(60)

    with pytest.raises(ExceptionGroup) as found:
        await live()
    assert found.value.subgroup(type(error)) is not None
    assert len(cycles.reasons) == 1
