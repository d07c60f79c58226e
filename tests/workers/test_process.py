"""A worker's process as the server holds it; what answers here is the test, in the place of the worker's program."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.serving import until
from workers.kit import START, descriptors, named, no_descriptor

from mldserver.children.channel import Message, pair, send_now
from mldserver.children.process import ChildProcess
from mldserver.errors import HandlerInvalid
from mldserver.handler.inspection import load_spec
from mldserver.testing import VirtualClock
from mldserver.workers import wire
from mldserver.workers.child import STACKS_SIGNAL
from mldserver.workers.shared_memory import Arena
from mldserver.workers.worker_process import WorkerGone, WorkerProcess, _RawOutput


@pytest.fixture
def workers_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """The workers' ends of the sockets, one for each process: the processes themselves only sleep."""
    ends: list[socket.socket] = []
    spawn = asyncio.create_subprocess_exec

    async def asleep(*_: str, pass_fds: tuple[int], **options: Any) -> asyncio.subprocess.Process:
        ends.append(socket.socket(fileno=os.dup(pass_fds[0])))
        return await spawn(sys.executable, "-c", "import time; time.sleep(600)", **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", asleep)
    yield ends
    for end in ends:
        end.close()


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


@pytest.mark.usefixtures("workers_ends")
async def test_what_has_a_processs_number_after_its_end_is_not_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = await WorkerProcess.start(START, VirtualClock())
    await process.close()
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: killed.append(group))
    process._child.kill()
    assert killed == []


async def test_without_descriptors_no_process_is_started_and_none_is_left_open(
    workers_ends: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    for module, name in ((os, "dup"), (mmap, "mmap"), (os, "pipe")):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, no_descriptor)
            with pytest.raises(OSError, match="Too many"):
                await WorkerProcess.start(START, VirtualClock())
    assert (workers_ends, descriptors()) == ([], before)


async def test_a_worker_that_cannot_take_what_the_server_says_ends_and_tells_why() -> None:
    process = await WorkerProcess.start(START, VirtualClock())
    process._channel.flush()
    process._channel._socket.send(b"\xff")
    await process.ended()
    await process.close()
    assert await process.ending() == "exit code 1"
    assert "The server's messages cannot be taken: 1 bytes are no messages" in process.last_words


class Child:
    """A process that ends when it is told to, or killed; what it has sent is read when somebody looks."""

    pid = 7
    exit_code = -9

    def __init__(self) -> None:
        self.end, self.own = pair()
        self.over = asyncio.Event()
        self.read_on = False
        self.outputs = [SimpleNamespace(go_on=lambda: setattr(self, "read_on", True))]
        self.signalled: list[Callable[[], object]] = []

    def says(self, *messages: Message) -> None:
        for message in messages:
            send_now(self.own, message)

    def signal(self, number: int) -> None:
        assert number == STACKS_SIGNAL
        for answer in self.signalled:
            answer()
        self.own.close()

    async def wait(self) -> int:
        await self.over.wait()
        return self.exit_code

    async def close(self) -> None:
        self.over.set()


@pytest.fixture
async def child() -> AsyncIterator[Child]:
    child = Child()
    yield child
    child.own.close()


@pytest.fixture
async def process(child: Child) -> AsyncIterator[WorkerProcess]:
    process = WorkerProcess(cast("ChildProcess", child), _RawOutput(), Arena(1 << 16), VirtualClock())
    yield process
    await process.close()


def done(number: int, **fields: Any) -> wire.BatchDone:
    return wire.BatchDone(number, 1, 0, None, None, None, None, **fields)


async def test_when_the_rows_of_an_answer_cannot_be_read_nobody_waits_for_ever(
    process: WorkerProcess, child: Child, logged: list[dict[str, Any]]
) -> None:
    asked = [asyncio.create_task(process.ask(wire.Forget(number, "s"))) for number in (1, 2)]
    await until(lambda: process.in_hand == 2)
    child.says(done(1, rows=b"not arrow"))
    await process.ended()
    await process.close()
    for request in asked:
        with pytest.raises(WorkerGone):
            await request
    assert "the rows of an answer cannot be read" in named(logged, "worker.garbled")[0]["what"]


async def test_an_answer_that_nobody_asked_for_is_the_end_of_a_process(
    process: WorkerProcess, child: Child, logged: list[dict[str, Any]]
) -> None:
    child.says(wire.Finished(5))
    await process.ended()
    await process.close()
    assert named(logged, "worker.garbled")[0]["what"] == "a message cannot be taken: KeyError: 5"


async def test_what_a_process_said_last_is_heard(
    process: WorkerProcess, child: Child, logged: list[dict[str, Any]]
) -> None:
    answer = process.post(wire.Forget(1, "s"))
    child.says(wire.ForwardedLog("info", "handler.output", {"text": "x"}), wire.Finished(1))
    await process.close()
    assert await answer == wire.Finished(1)
    assert (process.lost.total(), len(named(logged, "handler.output"))) == (0, 1)


async def test_a_process_that_ends_while_it_loads_is_not_waited_for_though_another_holds_its_socket(
    process: WorkerProcess, child: Child
) -> None:
    loading = asyncio.create_task(process.loaded())
    child.over.set()
    with pytest.raises(WorkerGone):
        await loading


async def test_why_a_handler_cannot_be_loaded_is_told_though_the_process_has_ended(
    process: WorkerProcess, child: Child
) -> None:
    child.says(wire.failed(0, HandlerInvalid("No.", advice="Mend it.")))
    await process.close()
    with pytest.raises(HandlerInvalid):
        await process.loaded()


async def test_how_long_a_handler_took_to_load_is_no_silence(process: WorkerProcess, child: Child) -> None:
    await cast("VirtualClock", process._clock).advance(600)
    child.says(wire.loaded_of(load_spec("handlers.raw")))
    await process.loaded()
    assert process.silent_ms == 0


async def test_a_worker_that_beats_is_not_silent(process: WorkerProcess, child: Child) -> None:
    await cast("VirtualClock", process._clock).advance(600)
    assert process.silent_ms == 600_000
    child.says(wire.BeatMessage(running_ms=0, blocked_ms=0, resident_bytes=0))
    process.drain()
    assert process.silent_ms == 0


async def test_after_stacks_were_asked_for_lines_are_kept_and_not_logged(
    process: WorkerProcess, child: Child, logged: list[dict[str, Any]]
) -> None:
    taken: list[bool] = []
    process._printed.log_lines(["before"])
    child.signalled.append(
        lambda: taken.append(process._printed.log_lines(["y"] * 2000 + ["File a.py, line 1"]))
    )
    stacks = await process.stacks()
    assert [event["text"] for event in named(logged, "handler.output")] == ["before"]
    assert stacks.endswith("y\nFile a.py, line 1")
    assert "before" not in stacks
    assert (taken, child.read_on) == ([True], True)


async def test_a_line_that_cannot_be_logged_costs_nothing_else(process: WorkerProcess, child: Child) -> None:
    answer = process.post(wire.Forget(1, "s"))
    child.says(wire.ForwardedLog("info", "handler.output", {"event": "twice"}), wire.Finished(1))
    assert await answer == wire.Finished(1)


def _sent(send: Callable[[], bool]) -> bool:
    try:
        return send()
    except OSError:
        return False
