"""The servers of a world: each is started again whenever it is gone, as its supervisor does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from simulation.oracles import Progress, Violated, WatchedStream, leaves
from simulation.plan import Plan
from support.virtual_loop import LoopClock
from support.virtual_process import VirtualProcess

from mldserver.config.settings import Settings
from mldserver.coordinator.core.lineage import Presence
from mldserver.errors import HandlerError, LedgerError, OperatorError
from mldserver.server import EXIT_CLEAN, Server
from mldserver.testing import LocalEngine
from mldserver.testing.fake_kinesis import FakeKinesis
from mldserver.windows import Window

if TYPE_CHECKING:
    from simulation.faults import Faults

_WATCH_SECONDS = 0.5
_RESTART_SECONDS = 1.0
_EXPECTED = (OperatorError, HandlerError, LedgerError, asyncio.CancelledError)
"""How a server may end: told to an operator, or expired by others (a LedgerError too)."""


class TotalsEngine(LocalEngine):
    """Gives each row the number of rows in all windows up to its own, from the result of the window before."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(self.add, **fields)

    def add(self, rows: pa.Table, window: Window) -> pa.Table:
        job = next(job for job in reversed(self.jobs) if job.window.id == window.id)
        before = 0
        for file in () if job.previous is None else job.previous.paths:
            before = pq.ParquetFile(file).read(["total"])["total"][0].as_py()
        return rows.append_column("total", pa.array([before + len(rows)] * len(rows), pa.int64()))


class WatchedServer(Server):
    """A server that may not end by an error which it does not know."""

    broken: list[str]
    process: VirtualProcess

    async def run(self) -> int:
        pipeline = self.only.pipeline
        run_pipeline = pipeline.run

        async def run_watched() -> bool:
            with self._watched():
                return await run_pipeline()

        pipeline.run = run_watched  # type: ignore[method-assign]  # the only run of the only function
        return await super().run()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except (Exception, BaseExceptionGroup) as error:
            if not self.process.dead:
                self.broken += [
                    f"{self.process.name} failed: {each!r}"
                    for each in leaves(error)
                    if not isinstance(each, _EXPECTED)
                ]
            raise


@dataclass
class Supervised:
    """One server, in all its lives."""

    name: str
    plan: Plan
    settings: Settings
    clock: LoopClock
    """Its host's."""
    faults: Faults
    stream: WatchedStream
    lives: int = 0
    stopping: bool = False
    """It shall not come back."""
    process: VirtualProcess | None = None
    server: Server | None = None
    asked: Server | None = None
    """The latest that was asked to stop."""
    unread: tuple[float, int] | None = None
    """Since when no daemon runs, and in which life that was; None: one does."""
    address: str | None = None
    """Where it listens; None while it does not."""

    async def run(self) -> None:
        """Live until cancelled, or until ``stop`` was asked and is done. Raises Violated."""
        while True:
            self.lives += 1
            process = self.process = VirtualProcess(f"{self.name}-{self.lives}", self.faults)
            with process.entered():
                code = await self._live(process)
            self.faults.note(f"{process.name} exited with {code}")
            self.address = None
            self.faults.kill(process)
            if self.stopping and code != EXIT_CLEAN:
                raise Violated(f"{process.name} was stopped in order and exited with {code}")
            if self.stopping:
                return
            await self.clock.sleep(_RESTART_SECONDS)
            if self.stopping:
                return

    def restart(self) -> None:
        """Stop it in order; its supervisor starts it again."""
        self._stop("a new version comes")

    def stop(self) -> None:
        """Stop it in order, for good."""
        assert self.server is not None
        self.stopping = True
        self._stop("the world is over")

    async def hold(self, seconds: float) -> None:
        """Pause all of its shards for some time, as an operator does."""
        server, process = self.server, self.process
        if server is None or process is None:
            return
        self.faults.tell("paused", f"{process.name} for {seconds} s")
        with process.entered():
            await server.carry_out("pause", "")
        await self.clock.sleep(seconds)
        # The pause outlives the server: if it is dead, its next life is asked.
        while not (self.stopping or await self._resumes()):
            await self.clock.sleep(_RESTART_SECONDS)

    async def _resumes(self) -> bool:
        """Ask the present life to resume; False: it cannot be asked, or refuses."""
        server, process = self.server, self.process
        if server is None or process is None or process.dead:
            return False
        with process.entered():
            return (await server.carry_out("resume", ""))[0]

    def _stop(self, reason: str) -> None:
        # Once a life: a second word would force it.
        if self.server is not None and self.server is not self.asked:
            self.asked = self.server
            self.server.stop(reason)

    async def _live(self, process: VirtualProcess) -> int | None:
        """Live once; return the exit code, None for a sudden death."""
        engine = (TotalsEngine if self.plan.handler == "Ordered" else LocalEngine)(
            fail=self.faults.fail_job,
            delay_seconds=self.plan.engine_seconds,
            group_limit=self.plan.windows_a_job,
            clock=self.clock,
        )
        kinesis = FakeKinesis(self.stream, self.stream.clock, latency=self.plan.latency)
        server = self.server = WatchedServer(
            self.settings,
            engine=engine,
            kinesis=kinesis.make,
            clock=self.clock,
            seed=self.plan.seed,
        )
        server.broken, server.process = self.faults.positions.broken, process
        async with asyncio.TaskGroup() as group:
            life = group.create_task(server.run())
            watched = [
                group.create_task(self._watch(server)),
                group.create_task(self._announce(server)),
            ]
            died = group.create_task(process.died.wait())
            await asyncio.wait({life, died}, return_when=asyncio.FIRST_COMPLETED)
            for task in (died, *watched, life):
                task.cancel()
        return None if life.cancelled() else life.result()

    async def _announce(self, server: Server) -> None:
        with contextlib.suppress(OperatorError):  # it was stopped before it listened
            self.address = await server.listening()

    async def _watch(self, server: Server) -> None:
        progress, positions = Progress(), self.faults.positions
        while True:
            broken = list(positions.broken)
            with contextlib.suppress(RuntimeError):  # it has not started yet
                broken += progress.look(server.status())
                broken += self._is_red(server)
            if broken:
                raise Violated("; ".join(broken))
            await self.clock.sleep(_WATCH_SECONDS)

    def _is_red(self, server: Server) -> list[str]:
        """Once no daemon has run for longer than shards may be missing, readiness is red, unless the server stalls itself."""
        positions, plan = self.faults.positions, self.plan
        if self.unread is None or self.unread[1] != self.lives or plan.stalls:
            return []
        now, parts = asyncio.get_running_loop().time(), server.only.pipeline.parts
        nodes = {} if parts is None else parts.coordinator.lineage.nodes
        if any(node.presence is Presence.ELSEWHERE for node in nodes.values()):
            self.unread = (
                now,
                self.lives,
            )  # another server could not release its shards yet, as the ledger refused
        seconds = now - self.unread[0]
        unread = sorted(positions.durable.keys() - positions.ended)
        if seconds < plan.outage - 4 or not unread or not server.is_ready:
            return []
        return [f"{self.name} is ready, {seconds:.1f} s after the daemon of {unread} has died"]

    async def finished(self) -> None:
        """Return when everything is published, in whichever life that is."""
        while True:
            server, process = self.server, self.process
            assert server is not None
            assert process is not None
            async with asyncio.TaskGroup() as group:
                done = group.create_task(server.finished())
                died = group.create_task(process.died.wait())
                await asyncio.wait({done, died}, return_when=asyncio.FIRST_COMPLETED)
                for task in (done, died):
                    task.cancel()
            if not done.cancelled():
                return
            await self.clock.sleep(_RESTART_SECONDS * 2)
