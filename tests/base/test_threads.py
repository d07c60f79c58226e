"""The worker thread: one job at a time, cancellation, and what hangs for ever."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import pytest

from mldserver.base.threads import WorkerThread

pytestmark = pytest.mark.quick


@pytest.fixture
async def thread() -> Any:
    worker = WorkerThread("test-worker")
    worker.start()
    yield worker
    assert await worker.close(600)


async def test_jobs_run_on_one_thread_that_is_not_the_loops(thread: Any) -> None:
    first = await thread.run(threading.current_thread)
    second = await thread.run(threading.current_thread)
    assert first is second
    assert first is not threading.current_thread()
    assert (first.name, first.daemon) == ("test-worker", True)


async def test_results_and_errors_come_back(thread: Any) -> None:
    assert await thread.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 // 0)


async def test_an_error_that_a_future_refuses_comes_back_as_another(thread: Any) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await thread.run(lambda: next(iter(())))


async def test_jobs_see_the_context_of_their_caller(thread: Any) -> None:
    variable = contextvars.ContextVar("variable", default="none")
    variable.set("mine")
    assert await thread.run(variable.get) == "mine"


async def test_a_cancelled_caller_leaves_at_once_and_what_had_not_begun_is_not_begun(thread: Any) -> None:
    begun, go, ran = threading.Event(), threading.Event(), []

    def slow() -> None:
        begun.set()
        go.wait()
        ran.append("slow")

    def fails() -> None:
        ran.append("never")

    running = asyncio.create_task(thread.run(slow))
    queued = asyncio.create_task(thread.run(fails))
    await asyncio.to_thread(begun.wait)
    for task in (running, queued):
        task.cancel()
    await asyncio.gather(running, queued, return_exceptions=True)
    assert ran == []
    go.set()
    await thread.run(lambda: None)
    assert ran == ["slow"]


async def test_the_late_error_of_a_job_that_nobody_waits_for_is_dropped(thread: Any) -> None:
    begun, go = threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        go.wait()
        raise ValueError

    running = asyncio.create_task(thread.run(fail))
    await asyncio.to_thread(begun.wait)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    go.set()
    assert await thread.run(lambda: 1) == 1


async def test_closing_does_not_wait_for_a_job_that_hangs() -> None:
    worker, go = WorkerThread("hangs"), threading.Event()
    worker.start()
    hanging = asyncio.create_task(worker.run(go.wait))
    await asyncio.sleep(0)
    assert await worker.close(0.01) is False
    go.set()
    assert await hanging is True


async def test_a_thread_that_was_never_started_is_closed_already() -> None:
    assert await WorkerThread("unused").close(0) is True


def test_a_job_that_ends_after_its_loop_was_closed_harms_nobody() -> None:
    worker, begun, go = WorkerThread("left-behind"), threading.Event(), threading.Event()
    worker.start()

    def hang() -> None:
        begun.set()
        go.wait()

    async def leave() -> None:
        task = asyncio.create_task(worker.run(hang))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    go.set()
    assert asyncio.run(worker.run(lambda: "alive")) == "alive"
    assert asyncio.run(worker.close(600))


@pytest.mark.parametrize("finishing", [False, True])
async def test_it_is_settled_when_what_was_queued_has_run_also_when_it_is_to_finish(
    thread: Any, finishing: bool
) -> None:
    begun, go, ran = threading.Event(), threading.Event(), []

    def job() -> None:
        begun.set()
        go.wait()
        ran.append(1)

    running = asyncio.create_task(thread.run(job))
    await asyncio.to_thread(begun.wait)
    if finishing:
        thread.finish()
    settled = asyncio.create_task(thread.settled())
    await asyncio.sleep(0)
    assert not settled.done()
    go.set()
    await settled
    assert ran == [1]
    await running


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), asyncio.CancelledError()])
async def test_errors_that_would_end_the_loop_or_the_task_that_waits_come_back_as_others(
    thread: Any, error: Any
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__):
        await thread.run(fail)
