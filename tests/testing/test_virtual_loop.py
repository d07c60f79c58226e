"""The virtual loop: time that jumps, threads that are none, the same order every time."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from support.virtual_loop import IdleLoop, LoopClock, Stuck, VirtualLoop


def play(work: Coroutine[Any, Any, Any], latency: float = 0.5) -> tuple[Any, float]:
    """Return what ``work`` returns, and when it was done."""
    loop = VirtualLoop(lambda: latency)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work), loop.time()


def test_a_long_sleep_takes_no_time() -> None:
    began = time.monotonic()
    _, seconds = play(asyncio.sleep(86_400))
    assert seconds == pytest.approx(86_400)
    assert time.monotonic() - began < 300


def test_timers_fire_in_their_order() -> None:
    async def work() -> list[str]:
        woken: list[str] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append(name)

        async with asyncio.TaskGroup() as group:
            for name, seconds in (("c", 3), ("a", 1), ("b", 2)):
                group.create_task(sleeper(name, seconds))
        return woken

    assert play(work()) == (["a", "b", "c"], pytest.approx(3))


def test_a_thread_call_takes_effect_and_is_told_later() -> None:
    seen: list[float] = []

    async def work() -> float:
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(lambda: seen.append(loop.time()))
        return loop.time()

    assert play(work())[0] == pytest.approx(1.0)
    assert seen == [pytest.approx(0.5)]


def test_what_a_thread_call_raises_is_raised_to_its_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        play(asyncio.to_thread(lambda: 1 // 0))


def test_a_call_that_is_given_up_before_it_begins_never_begins() -> None:
    seen: list[int] = []

    async def work() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await asyncio.to_thread(seen.append, 1)
        await asyncio.sleep(10)

    play(work())
    assert seen == []


def test_a_call_that_is_given_up_after_it_began_has_its_effect() -> None:
    seen: list[int] = []

    async def work() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.7):
                await asyncio.to_thread(seen.append, 1)
        await asyncio.sleep(10)

    play(work())
    assert seen == [1]


def test_waiting_for_what_cannot_come_is_noticed() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    loop = VirtualLoop(lambda: 0.5)
    with asyncio.Runner(loop_factory=lambda: loop) as runner, pytest.raises(Stuck, match="cannot come"):
        runner.run(work())


def test_spinning_without_any_time_passing_is_noticed() -> None:
    async def work() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    loop = VirtualLoop(lambda: 0.5)
    with asyncio.Runner(loop_factory=lambda: loop) as runner, pytest.raises(Stuck, match="without any time"):
        runner.run(work())


def test_sets_of_tasks_have_the_order_in_which_they_were_made() -> None:
    async def work() -> tuple[list[str], list[str]]:
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(asyncio.sleep(1), name=str(n)) for n in range(50)]
        futures = [loop.create_future() for _ in range(5)]
        assert len({*futures}) == 5
        done, _ = await asyncio.wait(tasks)
        hashes = [hash(task) for task in tasks]
        assert hashes == list(range(hashes[0], hashes[0] + 50))
        return [task.get_name() for task in set(tasks)], [task.get_name() for task in done]

    (made, done), _ = play(work())
    assert sorted(made, key=int) == sorted(done, key=int)


def test_no_signals_are_taken() -> None:
    async def work() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)

    with pytest.raises(RuntimeError, match="no signals"):
        play(work())


def test_other_threads_are_not_needed_to_call_soon() -> None:
    async def work() -> int:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.call_soon_threadsafe(future.set_result, 7)
        return await future

    assert play(work()) == (7, 0.0)


def test_the_clock_is_the_loops_and_its_time_of_day_may_be_set() -> None:
    async def work() -> tuple[int, int, int]:
        clock = LoopClock(asyncio.get_running_loop(), start_ms=1000)
        before = clock.now_ms()
        clock.step(10)
        await clock.sleep(2.5)
        return before, clock.now_ms(), clock.steady_ms()

    assert play(work())[0] == (1000, 13_500, 2500)


def test_over_unix_sockets_time_passes_only_while_nobody_has_anything_to_do(tmp_path: Path) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    async def work() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        async with await asyncio.start_unix_server(echo, tmp_path / "s"):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            for number in range(100):
                writer.write(b"%d\n" % number)
                async with asyncio.timeout(0.001):
                    assert int(await reader.readline()) == number
            busy = loop.time()
            await asyncio.sleep(86_400)
            writer.close()
            await writer.wait_closed()
        return busy, loop.time()

    with asyncio.Runner(loop_factory=IdleLoop) as runner:
        assert runner.run(work()) == (0.0, pytest.approx(86_400))
