"""Calls into user code: nothing that a hook does leaves as an exception, deadlines hold, cancellation passes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from mldserver.base.threads import WorkerThread
from mldserver.runtime.calls import BoundHook, Caller, Deadlines
from mldserver.testing.stand_ins import VirtualClock

pytestmark = pytest.mark.quick


class Bench:
    def __init__(self, thread: Any) -> None:
        self.clock = VirtualClock()
        self.thread = thread

    def caller(self, deadline: Any = 10.0) -> Any:
        deadlines = Deadlines(handler="mine", clock=self.clock, seconds=deadline)
        return Caller(thread=self.thread, deadlines=deadlines, clock=self.clock)

    async def run(self, function: Any, arguments: Any = (None,), deadline: Any = 10.0) -> Any:
        hook = BoundHook("hook", function, asyncio.iscoroutinefunction(function))
        caller = self.caller(deadline)
        watching = asyncio.create_task(caller.deadlines.run())
        try:
            return await caller.run(hook, arguments, shard="s")
        finally:
            watching.cancel()
            await asyncio.wait({watching})


@pytest.fixture
async def bench() -> Any:
    thread = WorkerThread("calls")
    thread.start()
    yield Bench(thread)
    assert await thread.close(600)


def both(function: Any) -> Any:
    """Return a hook in its two kinds."""

    async def coroutine(argument: Any) -> Any:
        return function(argument)

    return [function, coroutine]


def raising(error: Any) -> Any:
    def hook(argument: Any) -> None:
        raise error

    return hook


async def test_each_argument_is_one_call_in_order(bench: Any) -> None:
    for hook in both(lambda n: (n * 2,)):
        returned = await bench.run(hook, [1, 2, 3])
        assert (returned.values, returned.failure) == ([(2,), (4,), (6,)], None)


async def test_no_arguments_are_no_calls(bench: Any) -> None:
    for hook in both(raising(ValueError())):
        assert (await bench.run(hook, [])).values == []


async def test_the_first_failure_ends_the_run_and_keeps_what_came_before(bench: Any) -> None:
    for hook in both(lambda n: None if n else 1 // n):
        returned = await bench.run(hook, [1, 0, 1])
        assert returned.values == [None]
        assert returned.failure.error.startswith("ZeroDivisionError: ")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (StopIteration(), "StopIteration"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError(), "CancelledError"),
        (TimeoutError("mine"), "TimeoutError: mine"),
        (MemoryError(), "MemoryError"),
        (BaseException("odd"), "BaseException: odd"),
        (ExceptionGroup("many", [ValueError("x")]), "ExceptionGroup: many (1 sub-exception)"),
    ],
)
async def test_whatever_a_hook_raises_is_its_failure(bench: Any, error: Any, told: Any) -> None:
    for hook in both(raising(error)):
        returned = await bench.run(hook)
        # A coroutine cannot raise StopIteration: Python turns it into a RuntimeError.
        assert returned.failure.error in {told, "RuntimeError: coroutine raised StopIteration"}


async def test_an_interrupt_that_a_hook_raises_on_the_worker_thread_is_its_failure(bench: Any) -> None:
    assert (await bench.run(raising(KeyboardInterrupt()))).failure.error == "KeyboardInterrupt"


async def test_a_generator_is_run_to_its_end_inside_the_call(bench: Any) -> None:
    def rows(n: Any) -> Any:
        yield (n,)
        yield (n + 1,)

    def breaks(n: Any) -> Any:
        yield (n,)
        raise ValueError("late")

    for hook in both(rows):
        assert (await bench.run(hook, [5])).values == [[(5,), (6,)]]
    for hook in both(breaks):
        assert (await bench.run(hook, [5])).failure.error == "ValueError: late"


async def test_a_coroutine_that_a_plain_hook_returns_is_a_failure(bench: Any) -> None:
    async def forgotten() -> None:
        raise AssertionError

    for hook in both(lambda _: forgotten()):
        assert "declare the hook with `async def`" in (await bench.run(hook)).failure.error


async def test_other_return_values_pass_through(bench: Any) -> None:
    for hook in both(lambda _: 5):
        assert (await bench.run(hook)).values == [5]


async def test_an_asynchronous_call_beyond_its_deadline_is_cancelled_and_has_failed(
    bench: Any, logged: Any
) -> None:
    cancelled = []

    async def hook(argument: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(argument)

    running = asyncio.create_task(bench.run(hook, ["a", "b"]))
    await bench.clock.advance(9.9)
    assert not running.done()
    await bench.clock.advance(0.2)
    returned = await running
    assert returned.failure.error == "TimeoutError: it took longer than 10.0 s"
    assert "await asyncio.Event().wait()" in returned.failure.traceback
    assert (cancelled, logged) == (["a"], [])


async def test_each_call_has_a_deadline_of_its_own(bench: Any) -> None:
    gates = [asyncio.Event(), asyncio.Event()]

    async def hook(number: Any) -> None:
        await gates[number].wait()

    running = asyncio.create_task(bench.run(hook, [0, 1]))
    for gate in gates:
        await bench.clock.advance(8)
        gate.set()
    assert (await running).failure is None


async def test_asynchronous_calls_that_never_wait_let_the_loop_turn_between_them_when_they_take_long(
    bench: Any,
) -> None:
    turned: list[int] = []

    async def hook(number: int) -> Any:
        if number == 0:
            asyncio.get_running_loop().call_soon(turned.append, 1)
        bench.clock._now_ns += 6_000_000  # it was busy for 6 ms
        return (len(turned),)

    assert (await bench.run(hook, range(4))).values == [(0,), (0,), (1,), (1,)]


async def test_a_call_that_swallows_its_deadline_has_failed_all_the_same(bench: Any, logged: Any) -> None:
    gate = asyncio.Event()

    async def hook(argument: Any) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await gate.wait()
        return ("late",)

    running = asyncio.create_task(bench.run(hook, ["a", "b"]))
    await bench.clock.advance(25)
    assert [event["event"] for event in logged] == ["handler.slow"]
    gate.set()
    returned = await running
    assert (returned.values, returned.failure.error) == ([], "TimeoutError: it took longer than 10.0 s")


async def test_a_synchronous_call_beyond_its_deadline_is_told_for_as_long_as_it_runs(
    bench: Any, logged: Any
) -> None:
    begun, go = threading.Event(), threading.Event()

    def hook(argument: Any) -> Any:
        begun.set()
        go.wait()
        return ("done",)

    running = asyncio.create_task(bench.run(hook))
    await asyncio.to_thread(begun.wait)
    await bench.clock.advance(35)
    assert [(event["event"], event["hook"], event["seconds"]) for event in logged] == [
        ("handler.slow", "hook", 10.0),
        ("handler.slow", "hook", 20.0),
        ("handler.slow", "hook", 30.0),
    ]
    go.set()
    assert (await running).values == [("done",)]


async def test_a_synchronous_run_is_not_slow_while_each_of_its_calls_is_quick(
    bench: Any, logged: Any
) -> None:
    turns = [threading.Event() for _ in range(3)]
    begun = [threading.Event() for _ in range(3)]

    def hook(number: Any) -> None:
        begun[number].set()
        turns[number].wait()

    running = asyncio.create_task(bench.run(hook, [0, 1, 2]))
    for number in range(3):
        await asyncio.to_thread(begun[number].wait)
        await bench.clock.advance(7)
        turns[number].set()
    await running
    assert logged == []


async def test_without_a_deadline_nothing_is_slow(bench: Any, logged: Any) -> None:
    gate = asyncio.Event()

    async def hook(argument: Any) -> None:
        await gate.wait()

    running = asyncio.create_task(bench.run(hook, deadline=None))
    assert (await bench.run(lambda _: None, deadline=None)).failure is None
    await bench.clock.advance(100_000)
    gate.set()
    assert (await running).failure is None
    assert logged == []


async def test_a_cancelled_caller_passes_the_cancellation_on_to_an_asynchronous_hook(bench: Any) -> None:
    seen = []

    async def hook(argument: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append(argument)
            raise

    running = asyncio.create_task(bench.run(hook, ["a"]))
    await bench.clock.advance(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert seen == ["a"]


@pytest.mark.parametrize("outcome", [None, ValueError("instead")])
async def test_a_hook_that_swallows_the_cancellation_of_its_caller_does_not_keep_it(
    bench: Any, outcome: Any
) -> None:
    async def hook(argument: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if outcome is not None:
                raise outcome from None

    running = asyncio.create_task(bench.run(hook, ["a"]))
    await bench.clock.advance(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_cancelled_synchronous_run_stops_before_its_next_call(bench: Any) -> None:
    begun, go, seen = threading.Event(), threading.Event(), []

    def hook(number: Any) -> None:
        seen.append(number)
        begun.set()
        go.wait()

    running = asyncio.create_task(bench.run(hook, [0, 1]))
    await asyncio.to_thread(begun.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    go.set()
    await bench.thread.run(lambda: None)
    assert seen == [0]
