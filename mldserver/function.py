"""One function of a server: what is wanted of it, and the runs of its pipeline that follow from that.

The ledger holds what is wanted (``FunctionLife``). Before each run the function reads it, so that a restart in any state goes on.
A deployed or paused function runs its pipeline, and runs it again after a failure. An undeploy drains the pipeline; then a run
that only drains cuts and publishes every window, and the ledger forgets positions, keyed state, timers and dead letters, unless
they are kept. Where nothing runs, the function looks into the ledger each flush interval, and follows what is wanted then.

A server with several functions goes on when one of them ends with an error. An error that may pass (``lasting`` is False) is
retried after a back-off of 1 s to 1 min. After any other error the function is *failed*: it waits until what is wanted changes,
an operator asks again, or the server restarts. The only function of a server ends with an error, and so does the server.

A drain that no undeploy asked for (``mldserver drain``) ends the only function of a server; one of several waits for a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import structlog

from mldserver.admin.gather import Gatherer
from mldserver.assembly import Dependencies, Parts, ledger_of
from mldserver.base.backoff import Backoff
from mldserver.base.clock import first_of, in_time
from mldserver.base.kill_points import kill_point
from mldserver.base.threads import run_in_daemon_thread
from mldserver.config.settings import Settings
from mldserver.coordinator.core.lineage import DRAIN
from mldserver.errors import (
    EXIT_CLEAN,
    EXIT_FAULT,
    EXIT_FORCED,
    EXIT_OPERATOR,
    HandlerError,
    InternalError,
    LedgerError,
    LedgerMissing,
    OperatorError,
    leaves,
)
from mldserver.functions.lifecycle import Command, Shown, decide, shown
from mldserver.ledger.contract import FunctionLife, LedgerState, Wanted, WindowState
from mldserver.ledger.operations import Ledger
from mldserver.pipeline import Pipeline
from mldserver.status_document import FunctionStatus, VersionRow

log = structlog.get_logger("mldserver")

_RETRY_SECONDS: Final = (1.0, 60.0)
"""The first and the longest wait between two runs of a function that failed."""
_PATIENCE_SECONDS: Final = 4.0
"""How long a command waits until this server follows it. If the ledger cannot be read, the next cycle that can follows."""


@dataclass(frozen=True, slots=True)
class _RunEnd:
    """How a run ended, and what follows."""

    code: int
    """The exit code, if the server stops now."""
    reason: str = ""
    """Why nothing runs, in a sentence."""
    wait: float | None = 0.0
    """Seconds until the next run; None: until something is asked or what is wanted changes."""
    rest: Shown | None = None
    """What the status shows meanwhile, if that is not the state of a function that runs."""
    ends_server: bool = False
    """Whether the server ends too, if this was its only function."""


class Function:
    """A function with its life. ``run`` lasts as long as the server."""

    def __init__(
        self,
        settings: Settings,
        around: Dependencies,
        *,
        alone: bool,
        begun: Callable[[Settings], Awaitable[None]] | None = None,
        forced: Callable[[], None] | None = None,
    ) -> None:
        """Prepare the function. ``alone``: it is the server's only one. ``begun`` and ``forced``: see ``Pipeline``."""
        self.settings = settings
        self.name = settings.pipeline
        self.alone = alone
        self._around, self._on_begun, self._on_forced = around, begun, forced
        self._backoff = Backoff(*_RETRY_SECONDS)
        self.pipeline = Pipeline(settings, around, begun=begun, forced=self._report_forced)
        """The present run, or the last one."""
        self._ran = self._only_drains = False
        """Whether ``pipeline`` was run; whether it is the last step of an undeploy."""
        self._life = FunctionLife()
        """What was wanted when the ledger was read last."""
        self._ended: _RunEnd | None = None
        """How the last run ended; None while one works."""
        self._stopping, self._asked = asyncio.Event(), asyncio.Event()

    # Its state.

    @property
    def parts(self) -> Parts | None:
        """The parts of the present run, once its start is complete; None after it."""
        return self.pipeline.begun if self._ended is None else None

    @property
    def life(self) -> FunctionLife:
        """What is wanted of the function, as this server knows it."""
        return self._life if self.parts is None else self.parts.coordinator.ledger_view.state.life

    @property
    def shown(self) -> Shown:
        """The state of the function at this server."""
        return self._shown_for(self.life)

    def _shown_for(self, life: FunctionLife) -> Shown:
        parts, rest = self.parts, None if self._ended is None else self._ended.rest
        if rest is Shown.UNDEPLOYED:
            return rest
        holds = parts is not None and parts.coordinator.is_paused
        return shown(life, runs=True, started=parts is not None, holds=holds, failed=rest is not None)

    @property
    def is_ready(self) -> bool:
        """Whether the function runs, and readiness is green; or it is undeployed."""
        runs = self.parts is not None and self.pipeline.readiness.green.is_set()
        return runs or self.shown is Shown.UNDEPLOYED

    @property
    def is_settled(self) -> bool:
        """Whether the function is ready, or waits after a failure."""
        return self.is_ready or self._ended is not None

    # Its runs.

    async def run(self) -> int:
        """Run the function until it is stopped, and return the exit code. Logs errors, and does not raise them."""
        with structlog.contextvars.bound_contextvars(pipeline=self.name):
            while True:
                self._asked.clear()
                end = await self._run_once()
                if self._stopping.is_set() or (self.alone and end.ends_server):
                    return end.code
                self._ended = end
                await self._wait(end)
                if self._stopping.is_set():
                    return EXIT_CLEAN  # it was not running

    async def _run_once(self) -> _RunEnd:
        """Do what is wanted once: run the pipeline, drain it, or complete an undeploy. Logs errors."""
        code = EXIT_FAULT
        try:
            undeployed = asyncio.ensure_future(self._is_undeployed())
            await first_of(undeployed, self._stopping.wait())
            if not undeployed.cancelled() and undeployed.result():
                return _RunEnd(EXIT_CLEAN, "the function is undeployed", wait=None, rest=Shown.UNDEPLOYED)
            self._ended = None
            return await self._run_pipeline()
        except* (OperatorError, HandlerError, LedgerError) as group:
            errors = list(leaves(group))
            code = EXIT_OPERATOR if any(error.lasting for error in errors) else EXIT_FAULT
            for error in errors:
                self._report_failure(code, **error.told())
            reason = str(errors[0])
        except* Exception as group:  # noqa: BLE001  # it is logged; a bug in one function must not end the others
            self._report_failure(code, exc_info=True)
            reason = f"an internal error: {next(leaves(group))!r}"
        if code == EXIT_OPERATOR and self._life.wanted is not Wanted.UNDEPLOYED:
            return _RunEnd(code, reason, wait=None, rest=Shown.FAILED, ends_server=True)
        if self.pipeline.readiness.green.is_set():
            self._backoff.worked()
        return _RunEnd(code, reason, wait=self._backoff.failed(self._around.rng()), ends_server=True)

    async def _is_undeployed(self) -> bool:
        """Read what is wanted. Complete an undeploy whose windows are all published; return whether it is complete.

        Raises LedgerError.
        """
        async with self._ledger() as ledger:
            state = await _state_of(ledger)
            self._life = state.life
            if self._life.wanted is not Wanted.UNDEPLOYED or self._around.drain or not _is_drained(state):
                return False
            return self._life.keep or await ledger.forget()

    async def _run_pipeline(self) -> _RunEnd:
        """Run the pipeline. If an undeploy is wanted it only publishes windows. Raises what ``Pipeline.run`` raises."""
        around, settings = self._around, self.settings
        only_drains = self._life.wanted is Wanted.UNDEPLOYED and not around.drain
        if only_drains:
            around, settings = around._replace(drain=True), replace(settings, server_id=None)
        if self._ran or only_drains:
            if self._stopping.is_set():
                return _RunEnd(EXIT_CLEAN)
            begun, forced = self._on_begun, self._report_forced
            self.pipeline = Pipeline(settings, around, begun=begun, forced=forced, undeploys=only_drains)
        self.pipeline.code_path = self._life.deployed.path
        self._ran, self._only_drains = True, only_drains
        durable = await self.pipeline.run()
        code = EXIT_CLEAN if durable or only_drains else EXIT_FORCED
        if self.pipeline.undeploys:
            return _RunEnd(code)
        reason = "the pipeline was drained: deploy it, or restart the server, to serve it again"
        return _RunEnd(code, reason, wait=None, rest=Shown.UNDEPLOYED, ends_server=True)

    def _report_forced(self) -> None:
        """Tell the server of a forced stop, unless an undeploy goes on after it."""
        if self._on_forced is not None and not self.pipeline.undeploys:
            self._on_forced()

    def _report_failure(self, code: int, **fields: object) -> None:
        """Log an error that has ended the pipeline."""
        if self.alone:
            log.critical("server.failed", exit_code=code, **fields)
        else:
            log.error("function.failed", lasting=code == EXIT_OPERATOR, **fields)

    async def _wait(self, end: _RunEnd) -> None:
        """Wait for the next run. A command, or another server's, ends the wait at once or within a flush interval."""
        clock = self._around.clock
        left = math.inf if end.wait is None else end.wait
        if end.rest is not None and self._on_begun is not None:
            await self._on_begun(self.settings)  # commands need it while nothing runs
        async with self._ledger() as ledger:
            while left > 0:
                step = min(left, self.settings.flush_interval_ms / 1000)
                await first_of(self._stopping.wait(), self._asked.wait(), clock.sleep(step))
                if self._stopping.is_set() or self._asked.is_set():
                    return
                left -= step
                with contextlib.suppress(LedgerError):  # the next look may find it
                    if (await _state_of(ledger)).life != self._life:
                        return

    @contextlib.asynccontextmanager
    async def _ledger(self) -> AsyncIterator[Ledger]:
        """Give the ledger of the parts; where there are none, one of its own, to a tool."""
        if (parts := self.parts) is not None and not (pipeline := self.pipeline).has_closed_ledger:
            try:
                yield parts.ledger
            except InternalError as error:
                if not pipeline.has_closed_ledger:
                    raise
                raise OperatorError(
                    f"The function {self.name} stopped before the command was carried out.",
                    did="Perhaps nothing was changed.",
                    advice="Look at the function's state (`mldserver functions list`), and repeat the command if needed.",
                ) from error
            return
        # In a thread, because a ledger in DynamoDB imports a large part of AWS's client.
        make = partial(ledger_of, self.settings, server_id=f"tool:{self.name}", clock=self._around.clock)
        ledger = await run_in_daemon_thread(make, name="mldserver-ledger")
        try:
            yield ledger
        finally:
            await ledger.close()

    # Commands.

    async def command(self, command: Command, *, keep: bool = False) -> bool:
        """Carry out a command of the life cycle, in any state. False: nothing was to be changed.

        ``keep``: see ``decide``. Raises OperatorError if the state does not allow the command, or another command was faster;
        LedgerError.
        """
        before, after = await self.plan(command, keep=keep)
        if after is not None:
            await self.change_life(before, after)
        return after is not None

    async def plan(self, command: Command, *, keep: bool = False) -> tuple[FunctionLife, FunctionLife | None]:
        """Return what is wanted now, and what the command changes that to; None: nothing changes. Raises as ``command``."""
        life = (await self.read_state()).life
        return life, decide(command, life, self._shown_for(life), name=self.name, keep=keep)

    async def read_state(self) -> LedgerState:
        """Return what the function's ledger holds; nothing, if it was never made. Raises LedgerError."""
        async with self._ledger() as ledger:
            return await _state_of(ledger)

    async def change_life(self, before: FunctionLife, after: FunctionLife) -> None:
        """Change what is wanted, and follow it. Raises OperatorError if it is not ``before`` any more; LedgerError."""
        async with self._ledger() as ledger:
            try:
                await ledger.peek()
            except LedgerMissing:  # the function has never run
                await ledger.open()
                await ledger.leave()
            if not await ledger.change_life(before, after):
                raise OperatorError(
                    f"Another command for the function {self.name} came at the same time.",
                    did="This one changed nothing.",
                    advice="Look at the function's state (`mldserver functions list`), and repeat the command if it is still "
                    "wanted.",
                )
        kill_point("function.wanted")
        await self.look()

    async def look(self) -> None:
        """Follow at once what the ledger says is wanted."""
        if self.parts is None:
            self._asked.set()
        else:
            await in_time(self.parts.coordinator.flush("operator"), self._around.clock, _PATIENCE_SECONDS)

    def stop(self, reason: str) -> None:
        """Begin an orderly stop. The next start continues an undeploy.

        A drain that runs goes on, except that of the only function, which is forced if no undeploy asked for it.
        """
        self._stopping.set()
        pipeline = self.pipeline
        if self._only_drains:
            pipeline.force()
        elif not pipeline.is_stopping or (self.alone and not pipeline.undeploys):
            pipeline.stop(reason)

    def force(self) -> None:
        """Stop now, without waiting for pending work."""
        self._stopping.set()
        self.pipeline.force()

    # Watching.

    def report(self) -> str:
        """Return what the function waits for or why it is not ready; ``ready`` if it is."""
        return self._reason or self.pipeline.report()

    def status(self, gatherer: Gatherer, failure: str = "") -> FunctionStatus:
        """Return the function's status, in any stage. ``failure``: why its parts cannot be read, if they cannot."""
        return gatherer.function(
            self.settings,
            self.parts,
            stage=self.pipeline.stage,
            failure=failure or self._reason,
            lifecycle=self.shown,
            versions=_version_rows(self.life),
        )

    @property
    def _reason(self) -> str:
        return "" if self._ended is None else self._ended.reason


def _version_rows(life: FunctionLife) -> tuple[VersionRow, ...]:
    """Return the versions that the ledger names; none while the code has always been that on the Python path."""
    versions = {"deployed": life.deployed}
    if life.other is not None:
        versions["previous" if life.other_is_previous else "staged"] = life.other
    rows = [
        VersionRow(id=version.id or "Python path", role=role, staged_ms=version.staged_ms or None)
        for role, version in versions.items()
    ]
    return tuple(rows) if any(version.path for version in versions.values()) else ()


async def _state_of(ledger: Ledger) -> LedgerState:
    """Return what the ledger holds: nothing, if it was never made. Raises LedgerError."""
    try:
        return await ledger.peek()
    except LedgerMissing:
        return LedgerState()


def _is_drained(state: LedgerState) -> bool:
    """Whether no server serves the function, and its windows and late rows are published or set aside."""
    done = (
        window.state is WindowState.SET_ASIDE
        or (window.state is WindowState.PUBLISHED and not window.pending)
        for window in state.windows.values()
    )
    return all(done) and not state.late_segments and all(server.startswith(DRAIN) for server in state.servers)
