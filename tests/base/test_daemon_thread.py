from __future__ import annotations

import asyncio
import threading

import pytest

from mldserver.base.threads import run_in_daemon_thread

pytestmark = pytest.mark.quick


async def test_a_call_runs_on_a_thread_of_its_own_and_its_result_comes_back() -> None:
    assert await run_in_daemon_thread(lambda: threading.current_thread().name, name="beside") == "beside"


async def test_its_error_comes_back_too() -> None:
    with pytest.raises(ZeroDivisionError):
        await run_in_daemon_thread(lambda: 1 // 0, name="beside")


async def test_a_call_that_hangs_is_left_behind_on_a_thread_that_holds_up_nothing() -> None:
    began, go = threading.Event(), threading.Event()
    called: list[threading.Thread] = []

    def hang() -> None:
        called.append(threading.current_thread())
        began.set()
        go.wait()

    calling = asyncio.create_task(run_in_daemon_thread(hang, name="beside"))
    await asyncio.to_thread(began.wait)
    calling.cancel()
    async with asyncio.timeout(800):
        with pytest.raises(asyncio.CancelledError):
            await calling
    assert called[0].is_alive()
    assert called[0].daemon, "the interpreter does not wait for it"
    go.set()
    await asyncio.to_thread(called[0].join)
    assert not called[0].is_alive()
