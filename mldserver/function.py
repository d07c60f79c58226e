"""One function of a server: runs its pipeline, and runs it again after a failure.

A server with several functions goes on when one of them ends with an error. An error that may pass (``lasting`` is False) is
retried after a back-off of 1 s to 1 min. After any other error the function is *failed*: it waits for the server's restart. So
does a function that was drained. The only function of a server ends with its pipeline, and so does the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from mldserver.admin.gather import Gatherer
from mldserver.assembly import Dependencies, Parts
from mldserver.base.backoff import Backoff
from mldserver.base.clock import first_of
from mldserver.config.settings import Settings
from mldserver.errors import (
    EXIT_CLEAN,
    EXIT_FAULT,
    EXIT_FORCED,
    EXIT_OPERATOR,
    HandlerError,
    LedgerError,
    OperatorError,
    leaves,
)
from mldserver.functions.lifecycle import shown
from mldserver.pipeline import Pipeline
from mldserver.status_document import FunctionStatus

log = structlog.get_logger("mldserver")

_RETRY_SECONDS: Final = (1.0, 60.0)
"""The first and the longest wait between two runs of a function that failed."""


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
        self._around, self._alone, self._on_begun, self._on_forced = around, alone, begun, forced
        self._backoff = Backoff(*_RETRY_SECONDS)
        self.pipeline = self._new_pipeline()
        """The present run, or the last one."""
        self._stopping = asyncio.Event()
        self._failure = ""
        """Why the last run failed, or why there is none, in a sentence; empty while a run works."""
        self._lifecycle = "deploying"
        """What the status shows of a function whose start is not complete."""

    def _new_pipeline(self) -> Pipeline:
        return Pipeline(self.settings, self._around, begun=self._on_begun, forced=self._on_forced)

    @property
    def parts(self) -> Parts | None:
        """The parts of the present run, once its start is complete; None after a run that failed or was drained."""
        return None if self._failure else self.pipeline.begun

    @property
    def is_ready(self) -> bool:
        """Whether the function runs, and readiness is green."""
        return self.parts is not None and self.pipeline.readiness.green.is_set()

    async def run(self) -> int:
        """Run the function until it is stopped, and return the exit code. Logs errors, and does not raise them."""
        with structlog.contextvars.bound_contextvars(pipeline=self.name):
            while True:
                code = await self._run_once()
                if self._alone or self._stopping.is_set():
                    return code
                await self._wait_after(code)
                if self._stopping.is_set():
                    return EXIT_CLEAN  # it was not running
                self.pipeline = self._new_pipeline()

    async def _run_once(self) -> int:
        """Run the pipeline once, and return the exit code. Logs its errors."""
        code = EXIT_FAULT
        self._failure, self._lifecycle = "", "deploying"
        try:
            code = EXIT_CLEAN if await self.pipeline.run() else EXIT_FORCED
        except* (OperatorError, HandlerError, LedgerError) as group:
            errors = list(leaves(group))
            code = EXIT_OPERATOR if any(error.lasting for error in errors) else EXIT_FAULT
            for error in errors:
                self._report_failure(code, **error.told())
            self._failure = str(errors[0])
        except* Exception as group:  # noqa: BLE001  # it is logged; a bug in one function must not end the others
            self._report_failure(code, exc_info=True)
            self._failure = f"an internal error: {next(leaves(group))!r}"
        return code

    def _report_failure(self, code: int, **fields: object) -> None:
        """Log an error that has ended the pipeline."""
        if self._alone:
            log.critical("server.failed", exit_code=code, **fields)
        else:
            log.error("function.failed", lasting=code == EXIT_OPERATOR, **fields)

    async def _wait_after(self, code: int) -> None:
        """Wait until the pipeline may run again: for the back-off; after a lasting error or a drain, for the server's stop."""
        waits: list[Awaitable[object]] = [self._stopping.wait()]
        if code == EXIT_OPERATOR:
            self._lifecycle = "failed"
        elif not self._failure:  # nothing but a drain ends a pipeline without an error
            self._lifecycle = "undeployed"
            self._failure = "the pipeline was drained: restart the server to serve it again"
        else:
            if self.pipeline.readiness.green.is_set():
                self._backoff.worked()
            waits.append(self._around.clock.sleep(self._backoff.failed(self._around.rng())))
        await first_of(*waits)

    def stop(self, reason: str) -> None:
        """Begin an orderly stop. A drain that runs goes on, except that of the only function, which is then forced."""
        self._stopping.set()
        if self._alone or not self.pipeline.is_stopping:
            self.pipeline.stop(reason)

    def force(self) -> None:
        """Stop now, without waiting for pending work."""
        self._stopping.set()
        self.pipeline.force()

    def report(self) -> str:
        """Return what the function waits for or why it is not ready; ``ready`` if it is."""
        return self._failure or self.pipeline.report()

    def status(self, gatherer: Gatherer, failure: str = "") -> FunctionStatus:
        """Return the function's status, in any stage. ``failure``: why its parts cannot be read, if they cannot."""
        return gatherer.function(
            self.settings,
            self.parts,
            stage=self.pipeline.stage,
            failure=failure or self._failure,
            lifecycle=self._lifecycle if self.parts is None else _lifecycle_of(self.parts),
        )


def _lifecycle_of(parts: Parts) -> str:
    """Return what the status shows of a function that runs."""
    coordinator = parts.coordinator
    life = coordinator.ledger_view.state.life
    return shown(life, runs=True, started=True, holds=coordinator.is_paused, failed=False)
