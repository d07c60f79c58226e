"""What a driver's death counts for, and what goes on beside a window whose hook hangs."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from coordinator.pipeline import named
from jobs.test_runner import W, make, three_windows

from mldserver.engine_jobs import WindowJob, WindowResult
from mldserver.errors import DriverLost, WindowFailed
from mldserver.ledger.contract import WindowState
from mldserver.testing import LocalEngine
from mldserver.windows import time_window_id

pytestmark = pytest.mark.quick


def lost(blame: Any) -> DriverLost:
    error = DriverLost("The Spark driver is gone.")
    error.blame = blame
    return error


class Mortal(LocalEngine):
    """An engine whose driver dies of windows, and takes along what runs beside them."""

    def __init__(self, deadly: set[str], **settings: Any) -> None:
        super().__init__(**settings)
        self.deadly = deadly
        self.by_signal = False
        self.running: list[tuple[WindowJob, asyncio.Future[None]]] = []
        self.deaths: Counter[str] = Counter()
        self.company: list[set[str]] = []

    async def compute_group(self, jobs: tuple[WindowJob, ...]) -> tuple[WindowResult, ...]:
        died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        mine = [(job, died) for job in jobs]
        self.running += mine
        self.company.append({job.window.id for job, _ in self.running})
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if not died.done() and self.deadly & {job.window.id for job in jobs}:
                many = len(self.running) > 1
                blame = "others" if many else "outside" if self.by_signal else "window"
                self.deaths[blame] += 1
                for _, each in self.running:
                    if not each.done():
                        each.set_exception(lost(blame))
            if died.done():
                died.result()
            return await super().compute_group(jobs)
        finally:
            died.cancel()
            self.running = [one for one in self.running if one not in mine]

    async def compute(self, job: WindowJob) -> WindowResult:
        return (await self.compute_group((job,)))[0]


@pytest.mark.parametrize("limit", [1, 8])
async def test_a_death_counts_against_the_window_that_was_alone_and_never_against_its_neighbours(
    tmp_path: Path, limit: int
) -> None:
    pipeline = make(
        tmp_path,
        engine=lambda: Mortal({W[1]}, group_limit=limit),
        concurrency=3,
        on_failure="dead_letter",
        attempts=2,
    )
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(60)
        assert list(pipeline.published())[:2] == [W[0], W[2]]
        assert pipeline.state().windows[W[1]].state is WindowState.SET_ASIDE
        assert pipeline.runner.set_aside == 1
        engine = pipeline.engine
        assert isinstance(engine, Mortal)
        assert engine.deaths == {"others": 1, "window": 2}
        assert [there for there in engine.company if W[1] in there][-2:] == [{W[1]}, {W[1]}]


async def test_a_signal_from_outside_counts_for_none_unless_a_window_meets_one_whenever_it_runs(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    deaths = [4, 1000]

    def fail(job: WindowJob) -> Exception | None:
        if job.window.id != W[0] or not deaths[0]:
            return None
        deaths[0] -= 1
        return lost("outside")

    pipeline = make(tmp_path, fail=fail, on_failure="dead_letter", attempts=2)
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(120)
        assert (list(pipeline.published())[:3], pipeline.runner.set_aside) == (W[:3], 0)
    assert [event["attempt"] for event in named(logged, "window.failed")] == [1, 2, 3, 4]
    deaths[0] = 1000
    pipeline = make(tmp_path / "again", fail=fail, on_failure="dead_letter", attempts=2)
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(600)
        assert (list(pipeline.published())[:2], pipeline.runner.set_aside) == (W[1:3], 1)
    assert deaths[0] == 1000 - 6


async def test_deaths_by_the_servers_own_doing_count_for_none(tmp_path: Path) -> None:
    deaths = [20]

    def fail(_: WindowJob) -> Exception | None:
        deaths[0] -= 1
        return lost("server") if deaths[0] > 0 else None

    pipeline = make(tmp_path, fail=fail, on_failure="dead_letter", attempts=1, longest_wait=1.0)
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(60)
        assert (list(pipeline.published())[:3], pipeline.runner.set_aside) == (W[:3], 0)


class Hanging(LocalEngine):
    """An engine in which a window hangs until it is let go."""

    def __init__(self, hangs: set[str], **settings: Any) -> None:
        super().__init__(**settings)
        self.hangs = hangs
        self.go = asyncio.Event()

    async def compute_group(self, jobs: tuple[WindowJob, ...]) -> tuple[WindowResult, ...]:
        if len(jobs) > 1 and self.hangs & {job.window.id for job in jobs}:
            raise WindowFailed("on_window of one runs for 60 s", window=W[0])
        return await super().compute_group(jobs)

    async def compute(self, job: WindowJob) -> WindowResult:
        if job.window.id in self.hangs:
            assert self.slow is not None
            self.slow(job.window.id)
            self.slow(job.window.id)
            await self.go.wait()
        return await super().compute(job)


async def test_of_a_group_the_window_whose_hook_is_slow_comes_last(tmp_path: Path) -> None:
    pipeline = make(tmp_path, engine=lambda: Hanging({W[0]}, group_limit=8))
    async with pipeline.life():
        engine = pipeline.engine
        assert isinstance(engine, Hanging)
        await three_windows(pipeline)
        assert [job.window.id for job in engine.jobs] == W[1:3]
        assert pipeline.runner._slow_windows == {W[0]}


@pytest.mark.parametrize("limit", [1, 8])
async def test_others_go_on_beside_a_window_whose_hook_is_slow(tmp_path: Path, limit: int) -> None:
    pipeline = make(tmp_path, engine=lambda: Hanging({W[0]}, group_limit=limit))
    async with pipeline.life():
        engine = pipeline.engine
        assert isinstance(engine, Hanging)
        await three_windows(pipeline)
        assert list(pipeline.published()) == W[1:3]
        assert set(pipeline.runner.unfinished) == {(W[0], 1)}
        engine.hangs.clear()
        engine.go.set()
        await pipeline.clock.advance(1)
        assert list(pipeline.published()) == W[:3]
        session = await pipeline.open("b")
        await pipeline.give(session, [(1, 40_000), (2, 50_000)])
        await pipeline.clock.advance(1)
    assert not pipeline.runner._slow_windows
    pipeline.runner.add_worker_beside(W[0])
    assert not pipeline.runner._slow_windows, "nobody works any more"


class Killed(LocalEngine):
    """An engine whose driver dies with the first job of ``first``, while the windows ``with_it`` run in it.

    After that the hook of ``hangs`` is slow, and hangs until it is let go. ``deadly``: it kills its driver after 5 s instead,
    while each of the others takes 10 s.
    """

    def __init__(self, with_it: set[str], hangs: str, *, deadly: bool = False) -> None:
        super().__init__()
        self.with_it = with_it
        self.hangs = hangs
        self.deadly = deadly
        self.running: dict[str, asyncio.Future[None]] = {}
        self.go = asyncio.Event()
        self.blames: list[Any] = []

    async def compute(self, job: WindowJob) -> WindowResult:
        name = job.window.id
        died = self.running[name] = asyncio.get_running_loop().create_future()
        try:
            if self.with_it:
                if self.with_it <= self.running.keys():
                    self.with_it = set()
                    self.die()
                await died
            if name == self.hangs:
                assert self.slow is not None
                self.slow(name)
                if not self.deadly:
                    await self.go.wait()
            if self.deadly:
                await self.run_for(5 if name == self.hangs else 10, died)
                if name == self.hangs:
                    self.die()
                    await died
            return await super().compute(job)
        finally:
            died.cancel()
            del self.running[name]

    async def run_for(self, seconds: float, died: asyncio.Future[None]) -> None:
        timer = asyncio.ensure_future(self.clock.sleep(seconds))
        await asyncio.wait({died, timer}, return_when=asyncio.FIRST_COMPLETED)
        timer.cancel()
        if died.done():
            died.result()

    def die(self) -> None:
        self.blames.append("others" if len(self.running) > 1 else "window")
        for died in self.running.values():
            if not died.done():
                died.set_exception(lost(self.blames[-1]))


async def test_others_go_on_beside_a_window_that_must_run_alone_and_hangs(tmp_path: Path) -> None:
    """Also those that must run alone themselves: two were there when the driver died."""
    pipeline = make(tmp_path, engine=lambda: Killed({W[0], W[1]}, W[0]), concurrency=2)
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(10)
        engine = pipeline.engine
        assert isinstance(engine, Killed)
        assert engine.blames == ["others"]
        assert list(pipeline.published()) == W[1:3]
        engine.go.set()
        await pipeline.clock.advance(1)
        assert list(pipeline.published())[:3] == W[:3]


async def test_a_window_that_hangs_does_not_hold_those_that_must_run_alone(tmp_path: Path) -> None:
    pipeline = make(tmp_path, engine=lambda: Killed({W[1], W[2]}, W[0]), concurrency=3)
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(10)
        assert list(pipeline.published()) == W[1:3]


async def test_a_window_that_kills_its_driver_when_others_were_let_in_runs_alone_to_its_end_the_next_time(
    tmp_path: Path,
) -> None:
    """Else its deaths would never count against it."""
    pipeline = make(
        tmp_path,
        engine=lambda: Killed({W[0], W[1]}, W[0], deadly=True),
        concurrency=2,
        on_failure="dead_letter",
        attempts=2,
    )
    async with pipeline.life():
        engine = pipeline.engine
        assert isinstance(engine, Killed)
        engine.clock = pipeline.clock
        await three_windows(pipeline)
        session = await pipeline.open("b")
        for number in range(4, 100):  # more than are computed meanwhile
            await pipeline.give(session, [(number, 10_000 * number)])
            await pipeline.clock.advance(3)
        assert len(pipeline.runner.unfinished) > 10
        assert pipeline.runner.set_aside == 1
        assert pipeline.state().windows[W[0]].state is WindowState.SET_ASIDE
        assert list(pipeline.published())[:2] == W[1:3]
        assert engine.blames.count("window") == 2


class HangsAWhile(LocalEngine):
    """An engine in which the one window of a group that is left to compute hangs for a while."""

    async def compute_group(self, jobs: tuple[WindowJob, ...]) -> tuple[WindowResult, ...]:
        assert self.slow is not None
        self.slow(jobs[0].window.id)
        return await super().compute_group(jobs)


async def test_when_the_job_of_a_group_was_slow_and_ends_its_relief_ends_too(tmp_path: Path) -> None:
    pipeline = make(tmp_path, engine=lambda: HangsAWhile(group_limit=8))
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(1)
        assert list(pipeline.published()) == W[:3]
        assert not pipeline.runner._slow_windows
        session = await pipeline.open("b")
        await pipeline.give(session, [(1, 40_000), (2, 50_000)])
        await pipeline.clock.advance(1)
        assert [task.get_name() for task in asyncio.all_tasks()].count("windows") == 1


async def test_no_more_than_one_is_computed_beside_each_that_may_hang(tmp_path: Path) -> None:
    pipeline = make(tmp_path, engine=lambda: Hanging(set(W)))
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(5)
        assert pipeline.published() == {}
        assert pipeline.runner._slow_windows == {W[0]}


async def test_the_oldest_window_is_told_and_one_that_is_worked_on_for_too_long_is_overdue(
    tmp_path: Path,
) -> None:
    pipeline = make(tmp_path, engine=lambda: Hanging({W[0], W[1]}), deadline_seconds=100.0)
    async with pipeline.life():
        runner = pipeline.runner
        assert (runner.oldest_seconds(), runner.overdue()) == (None, None)
        await three_windows(pipeline)
        await pipeline.clock.advance(98)
        assert (runner.oldest_seconds(), runner.overdue()) == (99, None)
        await pipeline.clock.advance(2)
        assert (runner.oldest_seconds(), runner.overdue()) == (101, (W[0], 101, None))
        engine = pipeline.engine
        assert isinstance(engine, Hanging)
        engine.go.set()
        await pipeline.clock.advance(1)
        assert (runner.oldest_seconds(), runner.overdue()) == (None, None)


async def test_a_window_that_runs_far_longer_than_those_before_it_is_named_with_their_time(
    tmp_path: Path,
) -> None:
    hangs = time_window_id(60_000)
    pipeline = make(tmp_path, engine=lambda: Hanging({hangs}))
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(number + 1, 10_000 * number) for number in range(9)])
        for _ in range(2):
            await pipeline.cycle()
        await pipeline.clock.advance(59)
        runner = pipeline.runner
        assert (hangs not in pipeline.published(), runner.overdue()) == (True, None)
        await pipeline.clock.advance(2)
        assert runner.overdue() == (hangs, 61, 0.0)
        pipeline.engine._ready.clear()
        assert runner.overdue() is None, "it waits for Spark, which is told by itself"
        pipeline.engine._ready.set()
        # Larger windows may take longer, and so may those of a pipeline whose windows take long.
        runner._runs.extend([(3.0, 1)] * 200)
        assert runner.overdue() is None
        runner._runs.extend([(6.0, 10**9)] * 200)
        assert runner.overdue() == (hangs, 61, 6.0)
        engine = pipeline.engine
        assert isinstance(engine, Hanging)
        engine.go.set()
        await pipeline.clock.advance(1)
        assert runner.overdue() is None


async def test_what_waits_in_the_queue_is_not_overdue(tmp_path: Path) -> None:
    failing = {W[0]}
    pipeline = make(
        tmp_path,
        fail=lambda job: WindowFailed("no") if job.window.id in failing else None,
        deadline_seconds=100.0,
        attempts=1,
        longest_wait=500.0,
    )
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(199)
        assert pipeline.runner.overdue() == (W[0], 200, None)
        failing.clear()
        pipeline.runner.halted[W[0]].decided.set()
        await pipeline.clock.advance(1)
        assert (pipeline.runner.overdue(), list(pipeline.published())[:3]) == (None, W[:3])
