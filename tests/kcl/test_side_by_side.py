"""The daemons of several functions side by side, with supervisors that follow a script."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog

from mldserver.base.service import ServiceReport
from mldserver.errors import ConfigError, OperatorError
from mldserver.kcl.side_by_side import SideBySide
from mldserver.testing import VirtualClock

Logged = list[dict[str, Any]]


class Scripted:
    """In a supervisor's place: each run raises the next error; without one it runs until it is stopped."""

    def __init__(self, *errors: Exception, code: int = 0) -> None:
        self.errors, self.code = list(errors), code
        self.stopping = asyncio.Event()
        self.runs = self.stops = 0
        self.names: list[object] = []

    def stop(self) -> None:
        self.stops += 1
        self.stopping.set()

    def report(self) -> ServiceReport:
        return ServiceReport("the daemon runs", ready=True, stopping=self.stopping.is_set())

    async def run(self) -> int:
        self.runs += 1
        self.names.append(structlog.contextvars.get_contextvars().get("pipeline"))
        if self.errors:
            raise self.errors.pop(0)
        await self.stopping.wait()
        return self.code


def side_by_side(clock: VirtualClock, **supervisors: Any) -> SideBySide:
    return SideBySide(supervisors, clock)


async def test_a_supervisor_that_fails_starts_again_while_the_others_go_on(logged: Logged) -> None:
    clock, good = VirtualClock(), Scripted()
    bad = Scripted(ConfigError("It is not trusted.", advice="Look."), OperatorError("Gone."))
    both = side_by_side(clock, orders=bad, departures=good)
    async with asyncio.TaskGroup() as tasks:
        code = tasks.create_task(both.run())
        await clock.advance(0)
        assert both.report().text == "orders: failed: It is not trusted.; departures: the daemon runs"
        await clock.advance(1)
        assert (bad.runs, both.report().text) == (2, "orders: failed: Gone.; departures: the daemon runs")
        await clock.advance(2)
        assert (bad.runs, good.runs) == (3, 1)
        assert both.report() == ServiceReport(
            "orders: the daemon runs; departures: the daemon runs", ready=True
        )
        both.stop()
        assert both.report().stopping
    assert code.result() == 0
    failed = [event for event in logged if event["event"] == "kcl.failed"]
    assert [(event["pipeline"], event["what"]) for event in failed] == [
        ("orders", "It is not trusted."),
        ("orders", "Gone."),
    ]


async def test_each_function_has_its_name_in_its_events_and_the_worst_exit_code_counts() -> None:
    departures, orders = Scripted(code=3), Scripted(code=1)
    both = side_by_side(VirtualClock(), departures=departures, orders=orders)
    async with asyncio.TaskGroup() as tasks:
        code = tasks.create_task(both.run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        both.stop()
        both.stop()
    assert code.result() == 3
    assert (departures.names, orders.names) == (["departures"], ["orders"])
    assert (departures.stops, orders.stops) == (2, 2)


async def test_a_stop_ends_the_wait_of_a_failed_one() -> None:
    clock, bad = VirtualClock(), Scripted(OperatorError("Gone."))
    both = side_by_side(clock, orders=bad, departures=Scripted())
    async with asyncio.TaskGroup() as tasks:
        code = tasks.create_task(both.run())
        await clock.advance(0.5)
        both.stop()
    assert (code.result(), bad.runs) == (0, 1)


async def test_a_single_function_fails_as_its_supervisor_does() -> None:
    alone = side_by_side(VirtualClock(), orders=Scripted(OperatorError("Gone.")))
    assert alone.report().text == "the daemon runs"
    with pytest.raises(OperatorError, match="Gone"):
        await alone.run()
