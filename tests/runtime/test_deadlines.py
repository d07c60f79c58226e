"""One watch for all calls: late ones are told or cancelled, whatever the clock does, and nobody is forgotten."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mldserver.base.threads import WorkerThread
from mldserver.handler.failure import describe
from mldserver.runtime.calls import BoundHook, Caller, CallWatch, Deadlines
from mldserver.testing.stand_ins import VirtualClock

pytestmark = pytest.mark.quick


class Bench:
    def __init__(self, clock: Any, seconds: float | None = 10.0) -> None:
        self.clock = clock
        self.deadlines = Deadlines(handler="mine", clock=clock, seconds=seconds)
        self.caller = Caller(thread=WorkerThread("unused"), deadlines=self.deadlines, clock=clock)

    async def call(self, function: Any) -> Any:
        return await self.caller.run(BoundHook("hook", function, is_async=True), [None], shard="s")


async def holds_on(_: Any) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.Event().wait()


async def test_with_the_end_of_the_watch_calls_end_that_hold_on_when_they_are_cancelled() -> None:
    bench = Bench(VirtualClock())
    watching = asyncio.create_task(bench.deadlines.run())
    calling = asyncio.create_task(bench.call(holds_on))
    await bench.clock.advance(0)
    calling.cancel()
    await bench.clock.advance(0)
    assert not calling.done()
    watching.cancel()
    await asyncio.wait({calling}, timeout=120)
    assert calling.cancelled()


async def test_a_clock_that_is_set_back_keeps_no_call_from_its_deadline() -> None:
    bench = Bench(VirtualClock())
    watching = asyncio.create_task(bench.deadlines.run())
    first = asyncio.create_task(bench.call(holds_on))
    await bench.clock.advance(1)
    bench.clock.step(-3600)
    await bench.clock.advance(9)
    assert bench.deadlines.running_ms() == 0, "it was cancelled just now"
    await bench.clock.advance(3)
    assert bench.deadlines.running_ms() == 3000
    watching.cancel()
    first.cancel()
    await asyncio.wait({first, watching})


async def test_a_call_that_is_given_up_is_watched_until_it_has_ended() -> None:
    bench = Bench(VirtualClock())
    watch = CallWatch("hook", "s")
    bench.deadlines.begin(watch)
    watch.started_ms = bench.clock.steady_ms()
    bench.deadlines.end(watch)
    await bench.clock.advance(7)
    assert bench.deadlines.running_ms() == 7000
    watch.started_ms = None
    assert bench.deadlines.running_ms() == 0
    other = CallWatch("hook", "s", started_ms=bench.clock.steady_ms())
    bench.deadlines.begin(other)
    bench.deadlines.end(other)
    assert bench.deadlines._watches == {other}


async def test_an_asynchronous_call_that_goes_on_after_its_cancellation_runs_from_then_on() -> None:
    bench = Bench(VirtualClock())
    watching = asyncio.create_task(bench.deadlines.run())
    calling = asyncio.create_task(bench.call(holds_on))
    await bench.clock.advance(9)
    assert bench.deadlines.running_ms() == 0, "it may well be waiting, and can be stopped"
    await bench.clock.advance(8)
    assert bench.deadlines.running_ms() == 7000
    calling.cancel()
    await asyncio.wait({calling})
    assert bench.deadlines.running_ms() == 0
    watching.cancel()
    await asyncio.wait({watching})


async def test_a_call_that_is_given_up_before_it_begins_does_not_begin() -> None:
    bench = Bench(VirtualClock())
    watch = CallWatch("hook", "s")
    steady_ms = bench.clock.steady_ms

    def given_up_meanwhile() -> int:
        # As the event loop may do at any moment: the thread has not written yet that the call begins.
        watch.abandoned = True
        return steady_ms()

    bench.clock.steady_ms = given_up_meanwhile
    called: list[Any] = []
    with bench.caller.in_hand(watch):
        returned = bench.caller.call_sync(BoundHook("hook", called.append, is_async=False), [1], watch)
    assert (called, returned.values, watch.started_ms) == ([], [], None)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
async def test_an_error_that_cannot_be_printed_in_any_way_is_told_by_its_name(error: BaseException) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise error

    assert describe(Odd()).error.endswith("Odd: (its message cannot be printed)")


def test_a_call_that_ends_while_another_thread_looks_is_not_told(logged: Any) -> None:
    class Ending(VirtualClock):
        def steady_ms(self) -> int:
            watch.started_ms = None
            return 10**6

    watch = CallWatch("process_record", "s", started_ms=0)
    deadlines = Deadlines(handler="mine", clock=Ending(), seconds=10_000)
    deadlines.here = watch
    deadlines.log_slow_call()
    assert logged == []
