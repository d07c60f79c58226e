"""One worker and the processes it goes through, which here are made up, on a clock that the tests move."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mldserver.testing import VirtualClock
from mldserver.workers.wire import BeatMessage as Beat
from mldserver.workers.worker import Limits, WorkerSlot

LIMITS = Limits(worker_kill_after_ms=5_000, worker_memory=100)


class Process:
    """A process as a worker sees it; it ends when it is killed, or when a test says so."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.beat: Beat | None = Beat(0, 0, 10)
        self.silent_ms = 0
        self.beats_wait = False
        self.in_hand = 0
        self.is_busy = True
        self.done = 0
        self.lost: Counter[str] = Counter()
        self.last_words = ""
        self.closed = False
        self._ended = asyncio.Event()
        self.blamed = True
        self.code = "exit code 1"

    @property
    def is_open(self) -> bool:
        return not self._ended.is_set()

    @is_open.setter
    def is_open(self, value: bool) -> None:
        if not value:
            self._ended.set()

    async def ended(self) -> None:
        await self._ended.wait()

    def send(self, message: object) -> None:
        """Take note of which worker it is."""

    def end(self, *lost: str) -> None:
        self.lost = Counter(lost)
        self._ended.set()

    def kill(self) -> None:
        if self.is_open:
            self.code = "killed by signal 9 (SIGKILL)"
        self._ended.set()

    async def close(self) -> None:
        self.kill()
        self.closed = True

    def drain(self) -> None:
        self.silent_ms = 0 if self.beats_wait else self.silent_ms

    async def stacks(self) -> str:
        return "File handler.py, line 7"

    async def ending(self) -> str:
        return self.code


class Stage:
    """A worker that runs, and all its processes so far."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.processes: list[Process] = []
        self.worker = WorkerSlot(0, fresh=self._fresh, limits=LIMITS, clock=self.clock)  # type: ignore[arg-type]  # see Process
        self.life: asyncio.Task[None] | None = None

    async def _fresh(self) -> Any:
        assert all(process.closed for process in self.processes), "restarts overlap"
        self.processes.append(Process(len(self.processes) + 1))
        return self.processes[-1]

    @property
    def process(self) -> Process:
        return self.processes[-1]

    async def later(self, seconds: float = 0.3) -> None:
        await self.clock.advance(seconds)
        assert self.life is not None
        if self.life.done():
            self.life.result()

    async def die(self, times: int = 1, *, wait: float = 20.0) -> None:
        for _ in range(times):
            self.process.end()
            await self.later(wait)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage()
    made.life = asyncio.create_task(made.worker.run())
    await made.later()
    yield made
    made.life.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await made.life
    assert all(process.closed for process in made.processes), "a process is left"


def named(logged: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in logged if event["event"] == name]


async def test_a_process_that_ends_is_followed_by_another_of_the_next_generation(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    assert (stage.worker.generation, stage.worker.present) == (1, stage.process)
    stage.process.last_words = "Segmentation fault"
    stage.process.end("shard-1")
    await stage.later()
    assert (stage.worker.generation, stage.worker.suspects) == (2, {"shard-1"})
    assert await stage.worker.process() is stage.process  # type: ignore[comparison-overlap]  # see Process
    (lost,) = named(logged, "worker.lost")
    assert (lost["reason"], lost["stacks"], lost["batches"]) == ("exit code 1", "Segmentation fault", 1)


async def test_one_that_hangs_is_killed_and_it_is_told_where(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    stage.process.beat = Beat(5_001, 0, 10)
    await stage.later(1)
    (lost,) = named(logged, "worker.lost")
    assert (lost["reason"], lost["stacks"]) == (
        "a call of the handler takes too long",
        "File handler.py, line 7",
    )


async def test_one_that_has_grown_finishes_what_it_has_in_hand_and_takes_nothing_new(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    grown = stage.process
    grown.beat, grown.in_hand, grown.done = Beat(0, 0, 120), 1, 1
    await stage.later()
    asking = asyncio.create_task(stage.worker.process())
    await stage.later()
    assert grown.is_open
    assert not asking.done()
    grown.in_hand = 0
    await stage.later(1)
    assert await asking is stage.process is not grown  # type: ignore[comparison-overlap]  # see Process
    (replaced,) = named(logged, "worker.replaced")
    assert (replaced["bytes"], replaced["limit_bytes"], replaced["delay_seconds"]) == (120, 100, 0)
    assert named(logged, "worker.lost") == []


async def test_one_that_has_grown_is_not_waited_for_without_end_when_what_it_has_in_hand_waits_itself(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    grown = stage.process
    grown.beat, grown.in_hand, grown.lost = Beat(0, 0, 120), 1, Counter({"shard-1": 1})
    await stage.later(60)
    assert grown.is_open, "a call is under way"
    grown.is_busy = False
    await stage.later(1)
    assert stage.process is not grown
    assert [lost["reason"] for lost in named(logged, "worker.lost")] == [
        "it has grown beyond its memory limit"
    ]


async def test_a_suspect_passes_requests_that_only_wait_while_the_handler_is_idle(stage: Stage) -> None:
    gate = stage.worker.gate
    await gate.enter(alone=False)
    suspect = asyncio.create_task(gate.enter(alone=True))
    await stage.later(60)
    assert not suspect.done(), "the handler works on the request inside"
    stage.process.is_busy = False
    await stage.later(2)
    assert not suspect.done()
    await stage.later(1)
    assert suspect.done()


async def test_one_that_shrinks_again_before_it_is_replaced_goes_on(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    stage.process.beat, stage.process.in_hand = Beat(0, 0, 120), 1
    await stage.later()
    asking = asyncio.create_task(stage.worker.process())
    await stage.later()
    stage.process.beat = Beat(0, 0, 90)
    await stage.later()
    assert await asking is stage.processes[0]  # type: ignore[comparison-overlap]  # see Process
    assert len(stage.processes) == 1
    assert named(logged, "worker.replaced") == []


async def test_replacements_between_batches_are_no_deaths(stage: Stage) -> None:
    for _ in range(10):
        stage.process.done = 1
        stage.process.beat = Beat(0, 0, 120)
        await stage.later()
    assert len(stage.processes) > 10
    assert not stage.worker.failed


async def test_one_that_grows_on_while_it_finishes_is_killed(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    stage.process.beat, stage.process.in_hand = Beat(0, 0, 120), 1
    await stage.later()
    stage.process.beat = Beat(0, 0, 200)
    await stage.later(1)
    assert [lost["reason"] for lost in named(logged, "worker.lost")] == ["it takes too much memory"]


async def test_a_limit_below_what_an_idle_process_takes_makes_the_worker_fail_instead_of_spinning(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    for _ in range(100):
        stage.process.beat = Beat(0, 0, 120)
        await stage.later(1)
    assert stage.worker.failed
    assert len(named(logged, "worker.failed")) == 1
    assert len(stage.processes) < 20


async def test_lives_that_come_to_nothing_make_it_fail_until_one_does_something(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    await stage.die(7)
    assert not stage.worker.failed
    await stage.die()
    assert stage.worker.trouble == "worker 0 died 8 times in a row: see worker.lost"
    await stage.die(2)
    assert [lost["delay_seconds"] for lost in named(logged, "worker.lost")] == [
        *(0, 0, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 15)
    ]
    assert len(named(logged, "worker.failed")) == 1
    stage.process.done = 1
    assert not stage.worker.failed
    await stage.die()
    assert not stage.worker.failed


async def test_one_that_completes_batches_between_its_deaths_never_waits_and_never_fails(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    for _ in range(20):
        stage.process.done = 1
        await stage.die(wait=0.1)
    assert not stage.worker.failed
    assert {lost["delay_seconds"] for lost in named(logged, "worker.lost")} == {0}


async def test_deaths_while_a_culprit_is_looked_for_are_no_reason_to_wait(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    stage.worker.searches = 1
    await stage.die(20, wait=0.1)
    assert {lost["delay_seconds"] for lost in named(logged, "worker.lost")} == {0}
    assert not stage.worker.failed
    stage.worker.searches = 0
    await stage.die(8)
    assert stage.worker.failed, "nor are they a sign that the handler works"


async def test_a_process_is_not_taken_for_silent_whose_beats_wait_behind_a_loop_that_stood_still(
    stage: Stage,
) -> None:
    stage.process.silent_ms, stage.process.beats_wait = 6_000, True
    await stage.later()
    assert (stage.worker.generation, stage.worker.present) == (1, stage.process)


async def test_another_process_takes_over_at_once_and_the_end_of_the_present_one_is_no_death(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    stage.process.in_hand = 1
    stage.process.lost["waits"] = 1
    stage.worker.opened = {"gone": 1}
    new = Process(99)
    assert stage.worker.take_over(new, {"s"})  # type: ignore[arg-type]  # see Process
    assert stage.worker.ready is None
    assert stage.worker.present is new  # type: ignore[comparison-overlap]  # see Process
    await stage.worker.taken_over()
    assert (stage.worker.ready, stage.worker.generation, stage.worker.opened) == (new, 2, {"s": 2})
    assert (stage.worker.suspects, stage.process.blamed, stage.process.closed) == (set(), False, True)
    assert named(logged, "worker.lost") == []
    stage.processes.append(new)
    await stage.die()
    assert stage.worker.generation == 3


async def test_where_there_is_no_process_none_can_take_over_and_one_that_has_not_come_to_it_is_ended() -> (
    None
):
    worker, new = Stage().worker, Process(1)
    assert not worker.take_over(new, ())  # type: ignore[arg-type]  # see Process
    worker._next = new  # type: ignore[assignment]  # see Process
    await worker.close()
    assert new.closed
