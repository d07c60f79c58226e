"""A life of a server that costs a fraction of a second: forked from a warm process, without Spark."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from crash.lives import Plan
from crash.stories import TABLE
from support.serving import quick
from support.sqlite_table import TableEngine

from mldserver.base.kill_points import arm
from mldserver.function import Function
from mldserver.ledger.contract import WindowState
from mldserver.observe.logging import logging_to
from mldserver.server import Server
from mldserver.testing.fake_kinesis import FakeKinesis

SHOWN: Final = "shown"
"""A request for the state of the first function."""
_OVER: Final = "over"
_WARM: Final = [
    "aioboto3",
    "asyncio",
    "pandas",  # arrow does, for the first array of a process
    "pyarrow.parquet",
    "pytest",
    "mldserver.assembly",
    "mldserver.observe.logging",
    "mldserver.server",
    "mldserver.ledger.dynamodb",
    "mldserver.testing.stand_ins",
]
"""What every life needs: imported once, by the process that all of them are forked from."""


class LocalLife:
    """A server with a small engine in Spark's place."""

    def __init__(self, plan: Plan, step: str | None, *more: Plan) -> None:
        """Prepare a life that ends at ``step`` (as in ``arm``: ``name``, ``name:n``, or several), or nowhere.

        ``more``: of further functions of the same server, which read the same stream.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_WARM)
        self._ours, theirs = context.Pipe()
        self.met: str | None = None
        """The step at which it ended, or hung, once it is gone."""
        self._process = context.Process(target=_live, args=((plan, *more), step, theirs), daemon=True)
        self._theirs = theirs

    async def start(self) -> None:
        """Fork."""
        await asyncio.to_thread(self._process.start)
        self._theirs.close()

    def stream_is_over(self) -> None:
        """Let it end in good order once all is published."""
        with contextlib.suppress(BrokenPipeError):  # it has just died
            self._ours.send(_OVER)

    def kill(self) -> None:
        """Kill it from outside."""
        self._process.kill()

    def stop(self) -> None:
        """Let it hang."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End its hanging."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        # It may have ended: the pid is not another's, for who forked it has not been told yet.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    @property
    def hangs(self) -> bool:
        """Whether it was stopped."""
        try:
            told = Path(f"/proc/{self._process.pid}/stat").read_text("utf-8", "replace")
        except OSError:  # it has ended
            return False
        return told.rpartition(")")[2].split()[0] == "T"

    async def act(self, act: str, argument: str) -> tuple[bool, str] | None:
        """Carry out an operator's request in the server; return (whether it is done, the result), or None if the server ended.

        One request at a time.
        """
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        try:
            self._ours.send((act, argument))
            while True:
                loop.add_reader(self._ours.fileno(), readable.set)
                try:
                    await readable.wait()
                finally:
                    loop.remove_reader(self._ours.fileno())
                readable.clear()  # it may have been a step
                if (result := self._note(self._ours.recv())) is not None:
                    return result
        except (OSError, EOFError):
            return None

    def _note(self, told: str | tuple[bool, str]) -> tuple[bool, str] | None:
        """Note the step that a life has met, or return the result of a request."""
        if isinstance(told, tuple):
            return told
        self.met = told
        return None

    async def ended(self) -> int:
        """Return its exit code (minus the signal's number) once it is gone."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(self._process.sentinel, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        self._process.join()
        with contextlib.suppress(EOFError, ConnectionResetError):  # it came to none
            while self._ours.poll():
                self._note(self._ours.recv())
        loop.remove_reader(self._ours.fileno())  # of a request that waits for its result
        self._ours.close()
        assert self._process.exitcode is not None
        return self._process.exitcode


def _live(plans: tuple[Plan, ...], step: str | None, told: Connection) -> None:
    plan = plans[0]
    arm(step, signal.SIGSTOP if plan.hangs else signal.SIGKILL, told.send)
    os.environ.update(plan.environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path.insert(0, plan.python_path)
    settings = [quick(each.out, each.handler, **each.settings) for each in plans]
    engine = TableEngine(plan.out / TABLE)
    with logging_to(*settings):
        kinesis = None if plan.stream is None else FakeKinesis(plan.stream).make
        code = asyncio.run(_serve(Server(settings, engine=engine, kinesis=kinesis), told))
    sys.exit(code)


async def _serve(server: Server, told: Connection) -> int:
    async with asyncio.TaskGroup() as group:
        life = group.create_task(server.run())
        ending = group.create_task(_do_as_told(server, told))
        await asyncio.wait({life})
        ending.cancel()
    return life.result()


async def _do_as_told(server: Server, told: Connection) -> None:
    """Carry out requests, and end the server once it is told that the stream is over."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    while True:
        loop.add_reader(told.fileno(), readable.set)
        await readable.wait()
        loop.remove_reader(told.fileno())
        readable.clear()
        try:
            request = told.recv()
        except EOFError:  # the test is gone
            server.force()
            return
        if request == _OVER:
            break
        shown = (True, f"{server.only.shown}") if request[0] == SHOWN else None
        told.send(shown or await server.carry_out(*request, function=server.only.name))
    await server.finished()
    # The stream also looked over when a shard's children were slow to come.
    while not await _all_out(server):  # noqa: ASYNC110  # what a ledger holds has no event to wait on
        await asyncio.sleep(0.02)
    server.stop("the stream is over")


async def _all_out(server: Server) -> bool:
    return all([await _is_out(function) for function in server.functions.values()])


async def _is_out(function: Function) -> bool:
    parts = function.parts
    assert parts is not None
    state = await parts.ledger.peek()
    done = all(each.state is WindowState.PUBLISHED and not each.pending for each in state.windows.values())
    timers = any(store.next_due_ms is not None for store in state.stores.values() if not store.closed)
    return done and not (timers or state.late_segments or parts.coordinator.status().buffered_bytes)
