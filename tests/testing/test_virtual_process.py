"""Processes that die between two calls, their virtual threads, and stand-ins."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.virtual_loop import VirtualLoop
from support.virtual_process import (
    Call,
    ProcessDied,
    VirtualExecutor,
    VirtualProcess,
    VirtualWorker,
    stand_ins,
)

from mldserver.base.threads import WorkerThread
from mldserver.runtime import inline


def play(work: Any) -> Any:
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda: 0.5)) as runner:
        return runner.run(work)


class Disk:
    """Takes writes."""

    def __init__(self) -> None:
        self.written: list[int] = []

    def write(self, value: int) -> int:
        self.written.append(value)
        return value

    def close(self) -> None:
        self.written.append(-1)


class Moody:
    """An observer that fails calls as it is told."""

    def __init__(self, *, before: bool = False, after: bool = False) -> None:
        self._before = before
        self._after = after
        self.seen: list[tuple[str, str, Any]] = []

    def before(self, process: VirtualProcess, call: Call) -> None:
        self.seen.append((process.name, f"{call.owner}.{call.name}", call.args))
        if self._before:
            raise OSError("before")

    def after(self, process: VirtualProcess, call: Call, result: object) -> None:
        if self._after:
            raise OSError("after")


def test_a_call_is_known_through_its_wrappers() -> None:
    disk = Disk()
    wrapped = functools.partial(contextvars.copy_context().run, disk.write, 7)
    assert Call.of(wrapped, ()) == Call(disk, "write", (7,))
    assert Call.of(wrapped, ()).owner == "Disk"
    assert Call.of(functools.partial(wrapped), ()).name == "write"
    assert Call.of(functools.partial(print), (1,)).name == "print"


@pytest.mark.parametrize(("moment", "written"), [("before", []), ("after", [7])])
def test_an_observer_fails_a_call_before_or_after_its_effect(moment: str, written: list[int]) -> None:
    disk, moody = Disk(), Moody(**{moment: True})
    outcome = VirtualProcess("p", moody).attempt(disk.write, 7)
    assert str(outcome.error) == moment
    assert disk.written == written
    assert moody.seen == [("p", "Disk.write", (7,))]


def test_what_a_dead_process_tries_has_no_effect_but_its_files_are_closed() -> None:
    disk, process = Disk(), VirtualProcess("p")
    assert process.attempt(disk.write, 1).result == 1
    process.kill()
    assert isinstance(process.attempt(disk.write, 2).error, ProcessDied)
    assert process.attempt(disk.close).error is None
    assert disk.written == [1, -1]


def test_code_outside_of_any_process_cannot_be_observed() -> None:
    process = VirtualProcess("p")
    assert VirtualProcess.current().name == "outside"
    with process.entered():
        assert VirtualProcess.current() is process
    assert VirtualProcess.current() is not process


def test_an_executor_makes_one_call_after_the_other() -> None:
    async def work() -> tuple[list[int], float]:
        disk, executor = Disk(), VirtualExecutor(max_workers=1, thread_name_prefix="x")
        jobs = [executor.submit(disk.write, value=n) for n in range(3)]
        jobs[1].cancel()
        results = await asyncio.gather(*map(asyncio.wrap_future, (jobs[0], jobs[2])))
        executor.shutdown()
        assert results == [0, 2]
        return disk.written, asyncio.get_running_loop().time()

    written, seconds = play(work())
    assert written == [0, 2]
    assert seconds == pytest.approx(3.0, abs=0.01)


def test_an_executor_with_more_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="one thread"):
        VirtualExecutor(max_workers=2)


def test_a_worker_returns_and_raises_and_passes_over_what_is_given_up() -> None:
    async def work() -> list[int]:
        worker, seen = VirtualWorker("w"), list[int]()
        worker.start()
        assert await worker.run(lambda: 5) == 5
        with pytest.raises(ZeroDivisionError):
            await worker.run(lambda: 1 // 0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await worker.run(lambda: seen.append(1))
        await worker.run(lambda: seen.append(2))
        assert await worker.close(1)
        return seen

    assert play(work()) == [2]


def test_a_call_whose_caller_is_gone_is_not_told() -> None:
    async def work() -> list[int]:
        worker, seen = VirtualWorker("w"), list[int]()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.7):
                await worker.run(lambda: seen.append(1))
        await asyncio.sleep(5)
        return seen

    assert play(work()) == [1]


def test_calls_of_a_stalled_process_wait() -> None:
    async def work() -> list[float]:
        loop, process = asyncio.get_running_loop(), VirtualProcess("p", stalled_until=20.0)
        with process.entered():
            await asyncio.to_thread(int)
            first = loop.time()
            process.stalled_until = 50.0
            await VirtualWorker("w").run(int)
        return [first, loop.time()]

    assert play(work()) == [pytest.approx(21.0), pytest.approx(51.0)]


def test_classes_stand_in_for_others_where_these_are_used() -> None:
    with stand_ins({WorkerThread: VirtualWorker, ThreadPoolExecutor: VirtualExecutor}):
        assert inline.WorkerThread is VirtualWorker  # type: ignore[comparison-overlap]  # that is the point
        assert WorkerThread is not VirtualWorker  # type: ignore[comparison-overlap]  # see above
    assert inline.WorkerThread is WorkerThread
