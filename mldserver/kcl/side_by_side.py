"""Supervises the daemons of several functions at the same time: one that fails does not affect the others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import structlog

from mldserver.base.backoff import Backoff
from mldserver.base.clock import Clock
from mldserver.base.service import ServiceReport
from mldserver.children.supervise import ChildExit, supervise
from mldserver.errors import EXIT_CLEAN, MldserverError
from mldserver.kcl.supervisor import Supervisor

log = structlog.get_logger("mldserver")

LONGEST_DELAY_SECONDS: Final = 60.0
"""Between the failure of a supervisor and its next start, at most."""


class SideBySide:
    """Runs one supervisor for each function. With a single function it adds nothing to that supervisor."""

    def __init__(self, supervisors: Mapping[str, Supervisor], clock: Clock) -> None:
        """``supervisors``: by the function's name."""
        self._supervisors = supervisors
        self._clock = clock
        self._stopping = asyncio.Event()
        self._failures: dict[str, str] = {}
        """Functions whose supervisor has failed and waits for its next start, each with the reason."""

    def stop(self) -> None:
        """Stop every daemon in order; at a second call, kill them."""
        self._stopping.set()
        for supervisor in self._supervisors.values():
            supervisor.stop()

    def report(self) -> ServiceReport:
        """Return the state of all daemons in a line for systemd."""
        if len(self._supervisors) == 1:
            return next(iter(self._supervisors.values())).report()
        texts = {name: supervisor.report().text for name, supervisor in self._supervisors.items()}
        texts |= {name: f"failed: {reason}" for name, reason in self._failures.items()}
        text = "; ".join(f"{name}: {text}" for name, text in texts.items())
        return ServiceReport(text, ready=True, stopping=self._stopping.is_set())

    async def run(self) -> int:
        """Run until stopped; return the exit code: the worst of all daemons' codes.

        Raises what the supervisor of a single function raises. With several functions, each event has the function's name, and a
        supervisor that fails is logged and started again.
        """
        if len(self._supervisors) == 1:
            (supervisor,) = self._supervisors.values()
            return await supervisor.run()
        async with asyncio.TaskGroup() as tasks:
            runs = [
                tasks.create_task(self._run_one(name, supervisor), name=f"daemon {name}")
                for name, supervisor in self._supervisors.items()
            ]
        return max(run.result() for run in runs)

    async def _run_one(self, name: str, supervisor: Supervisor) -> int:
        """Run one function's supervisor until it is stopped; return its exit code."""
        structlog.contextvars.bind_contextvars(pipeline=name)
        exit_code = EXIT_CLEAN

        async def run_once() -> ChildExit | None:
            nonlocal exit_code
            self._failures.pop(name, None)
            try:
                exit_code = await supervisor.run()
            except MldserverError as error:
                self._failures[name] = error.what
                log.error(
                    "kcl.failed",
                    what=error.what,
                    did=f"The daemon of {name} starts again within {LONGEST_DELAY_SECONDS:g} s.",
                    advice=error.advice,
                )
                return ChildExit(lambda _delay: None)
            return None

        backoff = Backoff(base=1.0, cap=LONGEST_DELAY_SECONDS)
        await supervise(run_once, backoff=backoff, clock=self._clock, stopping=self._stopping)
        return exit_code
