"""A worker's process as the server holds it; what answers here is the test, in the place of the worker's program."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support.serving import until
from workers.kit import START

from mldserver.children.channel import send_now
from mldserver.testing import VirtualClock
from mldserver.workers import wire
from mldserver.workers.process import WorkerGone, WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def workers_ends(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """The workers' ends of the sockets, one for each process: the processes themselves only sleep."""
    ends: list[socket.socket] = []
    spawn = asyncio.create_subprocess_exec

    async def asleep(*_: str, pass_fds: tuple[int], **options: Any) -> asyncio.subprocess.Process:
        ends.append(socket.socket(fileno=os.dup(pass_fds[0])))
        return await spawn(sys.executable, "-c", "import time; time.sleep(600)", **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", asleep)
    return ends


async def test_an_answer_of_a_process_that_was_closed_reaches_nobody_whatever_has_the_same_number_now(
    workers_ends: list[socket.socket],
) -> None:
    old = await WorkerProcess.start(START, VirtualClock())
    lost = asyncio.create_task(old.ask(wire.Forget(next(old.ids), "s")))
    await until(lambda: old.in_hand == 1)
    await old.close()
    with pytest.raises(WorkerGone):
        await lost
    new = await WorkerProcess.start(START, VirtualClock())
    asked = asyncio.create_task(new.ask(wire.Forget(next(new.ids), "s")))
    await until(lambda: new.in_hand == 1)
    late, present = workers_ends
    answer = wire.Finished(1)
    assert _sent(lambda: send_now(late, answer)) is False, "its channel is closed with it"
    await asyncio.sleep(0.05)
    assert (new.in_hand, asked.done()) == (1, False)
    assert _sent(lambda: send_now(present, answer)) is True
    assert await asked == wire.Finished(1)
    await new.close()
    for end in workers_ends:
        end.close()


def _sent(send: Callable[[], bool]) -> bool:
    try:
        return send()
    except OSError:
        return False
