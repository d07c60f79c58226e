"""The server: the process that hosts one function or several, with signals, admin endpoint and reports to systemd.

Each function has its own pipeline (``pipeline.py``) and life (``function.py``). The functions share the event loop, the log, the
Spark driver and the admin endpoint. They start and stop side by side. A server with one function ends when its pipeline does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from mldserver import __version__
from mldserver.admin.acts import carry_out
from mldserver.admin.endpoint import AdminEndpoint
from mldserver.admin.gather import EventTally, Gatherer
from mldserver.assembly import Dependencies, driver_of
from mldserver.base.clock import Clock, SystemClock
from mldserver.base.service import Service, ServiceReport, handling
from mldserver.config.settings import Settings
from mldserver.coordinator.progress import CoordinatorStatus
from mldserver.errors import EXIT_CLEAN, EXIT_FAULT, EXIT_FORCED, EXIT_OPERATOR, OperatorError, leaves
from mldserver.function import Function
from mldserver.function_commands import PREFIX, FunctionCommands, ReadSettings
from mldserver.jobs.engine import Engine
from mldserver.observe.logging import hide_more, reopen
from mldserver.sources.listing import MakeKinesis
from mldserver.sources.source import MakeSource
from mldserver.status_document import Status

log = structlog.get_logger("mldserver")

_OWN_FILES: Final = 448
"""For each function, in addition to its connections: workers, segments that are written, the ledger, Spark, clients of the admin
endpoint."""


class Server:
    """One process with its functions. ``run`` is its whole life."""

    def __init__(
        self,
        settings: Settings | Sequence[Settings],
        *,
        engine: Engine | None = None,
        kinesis: MakeKinesis | None = None,
        source: MakeSource | None = None,
        clock: Clock | None = None,
        seed: int | None = None,
        drain: bool = False,
        endpoint: AdminEndpoint | None = None,
        service: Service | None = None,
        tally: EventTally | None = None,
        read_settings: ReadSettings | None = None,
    ) -> None:
        """Create a server; ``run`` starts it. ``settings``: of each function; they agree on all that belongs to the server.

        Tests and simulations replace parts: ``engine`` replaces Spark; ``kinesis`` returns a client that replaces AWS's;
        ``source`` returns a source of shards that replaces the listener; ``seed`` fixes the jitter of retries.

        With ``drain`` the server only drains its pipeline, next to servers that run. It then ignores ``server_id`` of the
        settings, because one of those servers has that name.

        ``endpoint`` shows the server's status and accepts steering commands. ``service`` reports to systemd. ``tally``
        counts logged events. ``read_settings`` serves packages (``FunctionCommands``).
        """
        every = [settings] if isinstance(settings, Settings) else list(settings)
        every = [replace(each, server_id=None) for each in every] if drain else every
        self.settings = every[0]
        """Of the first function: what belongs to the server is the same in all."""
        self._clock = clock or SystemClock()
        self._driver = None if engine is not None else driver_of(every, clock=self._clock)
        around = Dependencies(
            engine=engine,
            kinesis=kinesis,
            source=source,
            clock=self._clock,
            rng=random.Random(seed).random,  # noqa: S311  # jitter needs no cryptography
            drain=drain,
            driver=self._driver,
            functions=frozenset(each.pipeline for each in every),
            published={},
        )
        begun = None if endpoint is None else endpoint.open_steering
        make = partial(Function, around=around, begun=begun, forced=self._on_forced)
        self.functions = {each.pipeline: make(each, alone=len(every) == 1) for each in every}
        self._commands = FunctionCommands(
            self.functions,
            self._clock,
            make=partial(make, alone=False),
            start=self._add,
            read_settings=read_settings,
        )
        self._lives: list[asyncio.Task[int]] = []
        """Of all functions, while they run in ``_group``."""
        self._group: asyncio.TaskGroup
        self._service = service or Service({}, clock=self._clock)
        self._stop = asyncio.Event()
        self.forced = asyncio.Event()
        """Set once the stop is forced: pending work is cancelled then, which may not end it. Read only."""
        self._hung_up = asyncio.Event()
        self._endpoint = endpoint
        self._gatherer = Gatherer(clock=self._clock, tally=tally or EventTally())

    # Life.

    async def run(self) -> int:
        """Serve until stopped; return the exit code. Logs errors, and does not raise them."""
        began_ms = self._clock.steady_ms()
        signals: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGHUP: self._hang_up,
            signal.SIGUSR1: reopen,
        }
        signals |= {number: partial(self.stop, number.name) for number in (signal.SIGTERM, signal.SIGINT)}
        context = {"pipeline": self.settings.pipeline} if len(self.functions) == 1 else {}
        with structlog.contextvars.bound_contextvars(**context), handling(signals):
            code = await self._live()
        if code == EXIT_CLEAN and self.forced.is_set():
            code = EXIT_FORCED
        log.info("server.stopped", exit_code=code, seconds=(self._clock.steady_ms() - began_ms) / 1000)
        return code

    def _begin(self, function: Function) -> None:
        """Start a function's life."""
        settings = function.settings
        log.info(
            "server.starting",
            version=__version__,
            pid=os.getpid(),
            handler=settings.handler,
            out=str(settings.out),
            settings=settings.given(),
        )
        self._lives.append(self._group.create_task(function.run(), name=f"function {function.name}"))

    def _add(self, function: Function) -> None:
        """Add a function to the server while it runs."""
        hide_more(function.settings.secrets())
        for each in self.functions.values():
            each.alone = False
        self.functions[function.name] = function
        self._raise_open_files()
        self._begin(function)

    def _raise_open_files(self) -> None:
        """Raise this process's limit of open files to what its settings need; if the system allows less, log that limit."""
        connections = sum(function.settings.connection_limit for function in self.functions.values())
        needed = connections + _OWN_FILES * len(self.functions)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if resource.RLIM_INFINITY != soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < needed:
            log.warning(
                "server.few_files",
                limit=most,
                needed=needed,
                what=f"This process may have {most} files open; {connections} connections and its own need {needed}.",
                did="The server goes on. Without descriptors connections are refused, and no segment can be written.",
                advice="Raise LimitNOFILE (systemd), the container's nofile limit or `ulimit -Hn`; or lower connection_limit.",
            )

    async def _live(self) -> int:
        """Run all functions until they have stopped, with the endpoint open; return the exit code."""
        code = EXIT_FAULT
        self._raise_open_files()
        try:
            async with asyncio.TaskGroup() as always, contextlib.AsyncExitStack() as ends:
                ends.callback(always.create_task(self._read_again()).cancel)
                if self._endpoint is not None:
                    await ends.enter_async_context(
                        self._endpoint.serving(self.document, self.carry_out, self._gatherer.pause)
                    )
                if self._driver is not None:
                    ends.callback(always.create_task(self._driver.run(), name="spark").cancel)
                async with asyncio.TaskGroup() as self._group:
                    for function in self.functions.values():
                        self._begin(function)
                code = max(life.result() for life in self._lives)
        except* OperatorError as group:  # the endpoint's own
            errors = list(leaves(group))
            code = EXIT_OPERATOR if any(error.lasting for error in errors) else EXIT_FAULT
            for error in errors:
                log.critical("server.failed", exit_code=code, **error.told())
        except* Exception:
            log.critical("server.failed", exit_code=EXIT_FAULT, exc_info=True)
        return code

    # Stopping.

    def stop(self, reason: str) -> None:
        """Begin an orderly stop; a second call forces it."""
        if self._stop.is_set():
            self.force()
            return
        self._stop.set()
        for function in self.functions.values():
            function.stop(reason)

    def force(self) -> None:
        """Stop now, without waiting for pending work. The ledger makes that safe."""
        self._stop.set()
        self.forced.set()
        for function in self.functions.values():
            function.force()

    def _on_forced(self) -> None:
        """Force the server if the stop of a function was forced: at the server's stop, or of its only function."""
        if self._stop.is_set() or len(self.functions) == 1:
            self.forced.set()

    def _hang_up(self) -> None:
        reopen()
        self._hung_up.set()

    async def _read_again(self) -> None:
        """Read the certificates again after SIGHUP, until cancelled.

        Signals that arrive while the files are read cause one more reading, also if there are several.
        """
        while await self._hung_up.wait():
            self._hung_up.clear()
            with self._service.reloading():
                for owner in (
                    *(function.pipeline.parts for function in self.functions.values()),
                    self._endpoint,
                ):
                    if owner is not None and owner.tls is not None:
                        await owner.tls.read_again()

    # Watching.

    @property
    def only(self) -> Function:
        """The server's first function, which is the only one in most servers."""
        return next(iter(self.functions.values()))

    def report(self) -> ServiceReport:
        """Return the state of the server for systemd: the stage, the most urgent reason not to be ready, or ``ready``.

        A function that failed does not hold up systemd's start of the server and of units after it.
        """
        texts = {name: function.report() for name, function in self.functions.items()}
        troubles = [f"{name}: {text}" for name, text in texts.items() if text != "ready"]
        text = self.only.report() if len(texts) == 1 else next(iter(troubles), "ready")
        is_settled = all(function.is_settled for function in self.functions.values())
        return ServiceReport(text, is_settled, self._stop.is_set())

    async def listening(self) -> str:
        """Wait until shards can connect, and return the address: ``host:port`` with the real port, or ``unix:/path``."""
        return await (await self.only.pipeline.assembled()).source.listening()

    async def ready(self) -> None:
        """Return once every part works and Spark is warm."""
        for function in self.functions.values():
            await function.pipeline.readiness.green.wait()

    async def finished(self) -> None:
        """Return once every known shard has ended and every window is published (or set aside)."""
        for function in self.functions.values():
            await function.pipeline.finished()

    def status(self) -> CoordinatorStatus:
        """Return a snapshot of the only function. Raises RuntimeError before the parts are built."""
        if self.only.parts is None:
            raise RuntimeError("the server has not started yet")
        return self.only.parts.coordinator.status()

    def document(self, failure: str = "") -> Status:
        """Return the server's status, in any stage. If ``failure`` says why its parts cannot be read, it omits them."""
        functions = {
            name: function.status(self._gatherer, failure) for name, function in self.functions.items()
        }
        all_parts = [function.parts for function in self.functions.values()]
        engines = [parts.engine for parts in all_parts if parts is not None and parts.engine is not None]
        engine = (self._driver or engines[0]) if engines and not failure else None
        return self._gatherer.status(functions, engine=engine, stopping=self._stop.is_set())

    async def carry_out(self, act: str, argument: str, function: str = "") -> tuple[bool, str]:
        """Carry out an act on a function, or the only one; return whether it is done, and a sentence for the caller."""
        if self._stop.is_set():
            return False, "The server is stopping and cannot be steered now."
        if act.startswith(PREFIX):
            return await self._commands.carry_out(act.removeprefix(PREFIX), argument, function)
        return await carry_out(self.functions, self._clock, act, argument, function)

    async def fire_timers(self) -> None:
        """Fire pending timers without waiting for their due times; for simulations. See ``Firing.fire_all``. Raises LedgerError."""
        for function in self.functions.values():
            if function.parts is not None and function.parts.firing is not None:
                await function.parts.firing.fire_all()

    @property
    def is_ready(self) -> bool:
        """Whether readiness is green in every function."""
        return all(function.is_ready for function in self.functions.values())
