"""One watch for all that owe an answer: each is asked at its deadline, whatever others do and however the clock is set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mldserver.consumer.deadlines import AnswerDeadlines
from mldserver.testing.stand_ins import VirtualClock

pytestmark = pytest.mark.quick


class One:
    """Owes an answer since it was made, and may be asked for it."""

    def __init__(self, bench: Bench, *, refuses: int = 0) -> None:
        self.bench = bench
        self.refuses = refuses
        self.owed_since_ms: int | None = bench.clock.steady_ms()
        self.asked: list[float] = []
        bench.deadlines.watch(self)

    def acknowledge_late(self) -> None:
        assert self.owed_since_ms is not None
        self.asked.append((self.bench.clock.steady_ms() - self.owed_since_ms) / 1000)
        if len(self.asked) > self.refuses:
            self.owed_since_ms = None
            self.bench.deadlines.waiting.discard(self)


class Bench:
    def __init__(self, deadline: float | None = 20) -> None:
        self.clock: Any = VirtualClock()
        self.deadlines = AnswerDeadlines(clock=self.clock, seconds=deadline)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    watching = asyncio.create_task(bench.deadlines.run())
    yield bench
    watching.cancel()
    await asyncio.wait({watching})


async def test_each_is_asked_at_its_own_deadline(bench: Bench) -> None:
    first = One(bench)
    await bench.clock.advance(7)
    second = One(bench)
    await bench.clock.advance(100)
    assert (first.asked, second.asked) == ([20], [20])


async def test_whoever_has_answered_is_not_asked(bench: Bench) -> None:
    one = One(bench)
    await bench.clock.advance(5)
    bench.deadlines.waiting.discard(one)
    await bench.clock.advance(100)
    assert one.asked == []


async def test_whoever_cannot_answer_yet_is_asked_again_each_second(bench: Bench) -> None:
    one = One(bench, refuses=2)
    await bench.clock.advance(100)
    assert one.asked == [20, 21, 22]


async def test_after_all_have_answered_the_next_one_is_watched_again(bench: Bench) -> None:
    One(bench)
    await bench.clock.advance(100)
    again = One(bench)
    await bench.clock.advance(100)
    assert again.asked == [20]


async def test_a_clock_that_is_set_back_keeps_nobody_from_being_asked(bench: Bench) -> None:
    first = One(bench)
    await bench.clock.advance(1)
    bench.clock.step(-3600)
    await bench.clock.advance(1)
    later = One(bench)
    await bench.clock.advance(45)
    assert (first.asked, later.asked) == ([20], [20])


async def test_without_a_deadline_nobody_is_asked_and_nothing_runs() -> None:
    bench = Bench(None)
    one = One(bench)
    async with asyncio.timeout(800):
        await bench.deadlines.run()
    assert one.asked == []
