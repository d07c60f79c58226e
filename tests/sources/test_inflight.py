"""Batches under way: in order, answered when they are done or when their deadline is over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.virtual_loop import LoopClock, VirtualLoop

from mldserver.sources.inflight import EarlyAnswers, InflightBatch, UnderWay

if TYPE_CHECKING:
    Act = Callable[["Bench"], Awaitable[None]]

pytestmark = pytest.mark.quick


class Bench:
    """Work that takes as many seconds as the line says, holds for what follows a comma, and may fail."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deadline: float | None) -> None:
        self.clock = LoopClock(loop)
        self.began_ms = self.clock.now_ms()
        self.told: list[Any] = []
        self.begun: list[str] = []
        self.freed: list[int] = []
        self.room = True
        self.working = 0
        self.early = EarlyAnswers(clock=self.clock, deadline_seconds=deadline)
        self.under_way: UnderWay[str] = UnderWay(
            self.work,
            late=lambda batch, result: self.note("late", result),
            failed=lambda error: self.note("failed", str(error)),
            hold=lambda change: self.freed.append(-change),
            has_room=lambda: self.room,
            goes_on=lambda: None,
            early=self.early,
            clock=self.clock,
        )

    def note(self, *what: Any) -> None:
        self.told.append((self.seconds(), *what))

    def seconds(self) -> float:
        return (self.clock.now_ms() - self.began_ms) / 1000

    async def work(self, batch: InflightBatch[str]) -> str:
        assert self.working == 0, "batches of one shard never overlap"
        self.working += 1
        try:
            text = batch.line.decode()
            self.begun.append(text)
            handling, _, held = text.removesuffix("!").partition(",")
            await self.clock.sleep(float(handling))
            if text.endswith("!"):
                raise ValueError(text)
            batch.handled = True
            await self.clock.sleep(float(held or 0))
            return text
        finally:
            self.working -= 1

    async def submit(self, *lines: str) -> None:
        """Do as a daemon does: the next batch comes when the last is answered."""
        for line in lines:
            self.note("answer", await self.under_way.submit(line.encode(), self.clock.steady_ms()))


def play(act: Act, *, deadline: float | None = 20) -> Bench:
    async def scene() -> Bench:
        bench = Bench(asyncio.get_running_loop(), deadline)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(each.run()) for each in (bench.under_way, bench.early)]
            await act(bench)
            for task in running:
                task.cancel()
        return bench

    work: Coroutine[Any, Any, Bench] = scene()
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda: 0.0)) as runner:
        return runner.run(work)


def submitted(*lines: str, deadline: float | None = 20) -> list[Any]:
    async def act(bench: Bench) -> None:
        await bench.submit(*lines)
        await bench.under_way.idle.wait()

    return play(act, deadline=deadline).told


def test_a_batch_that_is_done_in_time_is_answered_with_what_it_came_to() -> None:
    assert submitted("3", "0", "19") == [(3, "answer", "3"), (3, "answer", "0"), (22, "answer", "19")]


def test_a_batch_beyond_its_deadline_is_answered_while_it_goes_on() -> None:
    assert submitted("50") == [(20, "answer", None), (50, "late", "50")]


def test_the_next_batch_waits_its_turn_and_is_answered_after_a_deadline_of_its_own() -> None:
    assert submitted("50", "1", "2") == [
        (20, "answer", None),
        (40, "answer", None),
        (50, "late", "50"),
        (51, "late", "1"),
        (53, "answer", "2"),
    ]


def test_a_batch_that_becomes_done_behind_another_is_answered_with_its_result() -> None:
    assert submitted("25", "1") == [(20, "answer", None), (25, "late", "25"), (26, "answer", "1")]


def test_without_a_deadline_nothing_is_answered_early() -> None:
    assert submitted("500", deadline=None) == [(500, "answer", "500")]


def test_a_shard_that_is_held_back_is_not_answered_early() -> None:
    assert submitted("5,100") == [(105, "answer", "5,100")]


def test_without_room_for_more_the_answer_waits_until_there_is_some() -> None:
    async def act(bench: Bench) -> None:
        bench.room = False
        async with asyncio.TaskGroup() as group:
            group.create_task(bench.submit("100"))
            await bench.clock.sleep(60.5)
            bench.room = True
        await bench.under_way.idle.wait()

    assert play(act).told == [(61, "answer", None), (100, "late", "100")]


def test_a_failure_is_raised_where_the_answer_is_waited_for() -> None:
    with pytest.raises(BaseExceptionGroup) as raised:
        submitted("3!")
    assert raised.group_contains(ValueError, match="3!")


def test_a_failure_after_the_answer_is_told() -> None:
    assert submitted("30!") == [(20, "answer", None), (30, "failed", "30!")]


def test_nothing_is_worked_on_behind_a_batch_that_failed() -> None:
    async def act(bench: Bench) -> None:
        assert not bench.under_way.incomplete
        with pytest.raises(ValueError, match="30!"):
            await bench.submit("30!", "0", "0")
        await bench.under_way.idle.wait()
        assert bench.under_way.incomplete
        with pytest.raises(RuntimeError, match="none may follow"):
            await bench.submit("0")

    bench = play(act)
    assert [each[1:] for each in bench.told] == [("answer", None), ("failed", "30!")]
    assert bench.begun == ["30!"]
    assert sorted(bench.freed) == [1, 1, 3]


def test_after_a_failure_nothing_is_worked_on_that_was_answered_already() -> None:
    async def act(bench: Bench) -> None:
        await bench.submit("50!", "0")
        await bench.under_way.idle.wait()
        assert bench.under_way.incomplete

    bench = play(act)
    assert bench.begun == ["50!"]
    assert sorted(bench.freed) == [1, 3]


def test_each_line_is_given_back_once_however_its_batch_leaves() -> None:
    async def act(bench: Bench) -> None:
        await bench.submit("1", "50")
        bench.under_way.free(bench.under_way.batches[0])
        await bench.submit("600")
        await bench.under_way.drop()
        assert bench.under_way.incomplete

    assert sorted(play(act).freed) == [1, 2, 3]


def test_what_is_under_way_can_be_dropped_and_then_none_may_follow() -> None:
    async def act(bench: Bench) -> None:
        await bench.submit("100", "1")
        assert (len(bench.under_way.batches), bench.under_way.bytes) == (2, 4)
        assert await bench.under_way.drop() == 2
        assert (bench.seconds(), bench.working, len(bench.under_way.batches)) == (40, 0, 0)
        await bench.under_way.idle.wait()
        with pytest.raises(RuntimeError, match="none may follow"):
            await bench.under_way.submit(b"1", 0)

    assert [each[1:] for each in play(act).told] == [("answer", None), ("answer", None)]


def test_dropping_cancels_an_answer_that_somebody_waits_for() -> None:
    async def act(bench: Bench) -> None:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(bench.submit("10"))
            await bench.clock.sleep(1)
            assert await bench.under_way.drop() == 1
        assert waiting.cancelled()

    assert play(act).told == []


def test_without_a_deadline_too_what_is_under_way_can_be_dropped() -> None:
    async def act(bench: Bench) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(bench.submit("10"))
            await bench.clock.sleep(1)
            assert await bench.under_way.drop() == 1

    assert play(act, deadline=None).told == []


def test_dropping_before_anything_runs_drops_nothing() -> None:
    async def scene() -> int:
        return await Bench(asyncio.get_running_loop(), 20).under_way.drop()

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda: 0.0)) as runner:
        assert runner.run(scene()) == 0


def test_whoever_waits_for_idleness_is_not_left_waiting_when_the_work_is_cancelled() -> None:
    async def scene() -> None:
        bench = Bench(asyncio.get_running_loop(), 20)
        running = asyncio.get_running_loop().create_task(bench.under_way.run())
        await bench.submit("100")
        running.cancel()
        await bench.under_way.idle.wait()
        with pytest.raises(asyncio.CancelledError):
            await running

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda: 0.0)) as runner:
        runner.run(scene())


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_batches_are_done_in_order_and_answered_in_time(seconds: list[int]) -> None:
    deadline = 20.137  # never the very moment at which something is done
    told = submitted(*map(str, seconds), deadline=deadline)
    answers = [each for each in told if each[1] == "answer"]
    asked, free = 0.0, 0.0
    for (at, _, result), takes in zip(answers, seconds, strict=True):
        done = max(free, asked) + takes
        free = done
        assert at == pytest.approx(min(done, asked + deadline), abs=0.01)
        assert (result is not None) == (done < asked + deadline)
        asked = at
    late = [int(each[2]) for each in told if each[1] == "late"]
    assert late == [takes for (_, _, result), takes in zip(answers, seconds, strict=True) if result is None]
