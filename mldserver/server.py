"""The server: builds the parts of one pipeline, starts them in order, stops them in reverse.

Order of start: ledger and recovery, handler, then together the listener and the engine. Connections are accepted, rows
flushed and checkpoints sent while Spark still starts; windows wait for it.

Order of stop: no new connections; each shard finishes its request; one last cycle makes everything durable and cuts
what may close; windows that are being computed get what is left of the grace (they are cut: the next start computes
them all the same, or another server on the ledger does); engine; ledger. A stop that comes before the start is over
gives it up: nothing was accepted yet, so that is a clean end. A second one ends all waiting, in whatever stage.

A drain stops every server on the ledger, as above, once the ledger asks for it. ``mldserver drain`` asks, and is the last
server: it does not listen, and waits until the others have left or expired. Then no row is on its way any more, so
it cuts every window that is open, whatever the watermark says, and ends when the ledger has none to publish.

A server that others on its ledger took for dead (it hung for longer than ``server_timeout``, say) exits with a fault, so
that its supervisor starts it afresh: its shards and windows may have gone on elsewhere, and all that it holds in memory
is delivered again. Its connections end with it, and the daemons come back with theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

import structlog

from mldserver import __version__
from mldserver.admin.acts import carry_out
from mldserver.admin.endpoint import AdminEndpoint
from mldserver.admin.gather import EventTally, Gatherer, Readiness, unready
from mldserver.assembly import Dependencies, Parts, assemble, exposed
from mldserver.base.aws import require_aws
from mldserver.base.clock import Clock, SystemClock
from mldserver.base.service import Service, ServiceReport, handling
from mldserver.base.threads import run_in_daemon_thread
from mldserver.config.settings import Settings
from mldserver.coordinator.coordinator import Coordinator
from mldserver.coordinator.progress import CoordinatorStatus
from mldserver.errors import (
    EXIT_CLEAN,
    EXIT_FAULT,
    EXIT_FORCED,
    EXIT_OPERATOR,
    HandlerError,
    LedgerError,
    OperatorError,
    folder_error,
    leaves,
)
from mldserver.jobs.engine import Engine
from mldserver.ledger.contract import WindowState
from mldserver.observe.logging import reopen
from mldserver.sources.listing import MakeKinesis
from mldserver.sources.source import MakeSource
from mldserver.status_document import Status

log = structlog.get_logger("mldserver")
T = TypeVar("T")

_LET_GO_SECONDS: Final = 1.0
"""How long connections may take to end, at the very end, while the runtime still runs; after a forced stop each part."""
_OWN_FILES: Final = 448
"""In addition to connections: workers, segments that are written, the ledger, Spark, clients of the admin endpoint."""
_DRAIN: Final = "drain"
"""The reason of a stop."""
_REPORT_SECONDS: Final = 5.0
"""Between two log events about what a start or a stop waits for."""


class Server:
    """One pipeline, from sockets to published windows. ``run`` is its whole life."""

    def __init__(
        self,
        settings: Settings,
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
    ) -> None:
        """Create a server; ``run`` starts it.

        Tests and simulations replace parts: ``engine`` replaces Spark; ``kinesis`` returns a client that replaces AWS's;
        ``source`` returns a source of shards that replaces the listener; ``seed`` fixes the jitter of retries.

        With ``drain`` the server only drains the pipeline, next to servers that run. It then ignores ``server_id`` of the
        settings, because one of those servers has that name.

        ``endpoint`` shows the server's status and accepts steering commands. ``service`` reports to systemd. ``tally``
        counts logged events.
        """
        self.settings = replace(settings, server_id=None) if drain else settings
        self._clock = clock or SystemClock()
        self._around = Dependencies(
            engine=engine,
            kinesis=kinesis,
            source=source,
            clock=self._clock,
            rng=random.Random(seed).random,  # noqa: S311  # jitter needs no cryptography
            unique=lambda: uuid.uuid4().hex[:12],
            drain=drain,
        )
        self._service = service or Service({}, clock=self._clock)
        self._parts: Parts | None = None
        self._begun: Parts | None = None
        """The parts, once the start is complete; None before."""
        self._built = asyncio.Event()
        self._stop = asyncio.Event()
        self.forced = asyncio.Event()
        """Set once the stop is forced: pending work is cancelled then, which may not end it. Read only."""
        self._hung_up = asyncio.Event()
        self._reason = ""
        self._step = ""
        """What the start waits for."""
        self._readiness = Readiness()
        self._drain = drain
        self._endpoint = endpoint
        self._gatherer = Gatherer(clock=self._clock, tally=tally or EventTally())
        self._to_compute = asyncio.Event()
        """Set when the engine is needed: a drain may find nothing left to compute."""
        if not drain:
            self._to_compute.set()

    # Life.

    async def run(self) -> int:
        """Serve until stopped; return the exit code. Logs errors, and does not raise them."""
        began_ms = self._clock.steady_ms()
        log.info(
            "server.starting",
            version=__version__,
            pid=os.getpid(),
            handler=self.settings.handler,
            out=str(self.settings.out),
            settings=self.settings.given(),
        )
        self._raise_open_files()
        signals: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGHUP: self._hang_up,
            signal.SIGUSR1: reopen,
        }
        signals |= {number: partial(self.stop, number.name) for number in (signal.SIGTERM, signal.SIGINT)}
        with structlog.contextvars.bound_contextvars(pipeline=self.settings.pipeline), handling(signals):
            code = await self._live()
        if code == EXIT_CLEAN and self.forced.is_set():
            code = EXIT_FORCED
        log.info("server.stopped", exit_code=code, seconds=(self._clock.steady_ms() - began_ms) / 1000)
        return code

    def _raise_open_files(self) -> None:
        """Raise this process's limit of open files to what its settings need; if the system allows less, log that limit."""
        needed = self.settings.connection_limit + _OWN_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if resource.RLIM_INFINITY != soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < needed:
            log.warning(
                "server.few_files",
                limit=most,
                needed=needed,
                what=f"This process may have {most} files open; {self.settings.connection_limit} connections and its own need {needed}.",
                did="The server goes on. Without descriptors connections are refused, and no segment can be written.",
                advice="Raise LimitNOFILE (systemd), the container's nofile limit or `ulimit -Hn`; or lower connection_limit.",
            )

    async def _live(self) -> int:
        """Start, work until stopped, close everything, with the endpoint open; return the exit code."""
        code = EXIT_FAULT
        try:
            async with asyncio.TaskGroup() as always, contextlib.AsyncExitStack() as ends:
                ends.callback(always.create_task(self._read_again()).cancel)
                if self._endpoint is not None:
                    await ends.enter_async_context(
                        self._endpoint.serving(self.document, self.carry_out, self._gatherer.pause)
                    )
                ends.push_async_callback(self._close)
                async with self._until(self._stop, self._start(), lambda: {"start": self._step}) as starting:
                    if not starting.done():
                        log.info("server.stopping", reason=self._reason or "forced", connections=0)
                # ``_begun`` is None if the stop came before the start was complete.
                code = EXIT_CLEAN if self._begun is None else await self._work(self._begun)
        except* (OperatorError, HandlerError, LedgerError) as group:
            errors = list(leaves(group))
            code = EXIT_OPERATOR if any(error.lasting for error in errors) else EXIT_FAULT
            for error in errors:
                log.critical("server.failed", exit_code=code, **error.told())
        except* Exception:
            log.critical("server.failed", exit_code=EXIT_FAULT, exc_info=True)
        return code

    async def _start(self) -> None:
        """Build and start the parts, as far as connections can be accepted; ``_work`` starts Spark.

        Raises OperatorError, HandlerError or LedgerError if a part cannot start.
        """
        if self.settings.stream is not None and self._around.kinesis is None:
            self._begin("AWS credentials")
            await require_aws(self.settings.stream, region=self.settings.region)
        parts = self._parts = await assemble(self.settings, self._around, step=self._begin)
        await parts.runtime.start()
        self._begin("ledger and recovery")
        try:
            await parts.coordinator.start()
        except OSError as error:
            raise folder_error(error)(
                f"The output folder {self.settings.out} cannot be used: {error.strerror or error}.",
                advice="Check its path, its rights and the room on its disk, or name another with --out.",
                path=str(error.filename or self.settings.out),
            ) from error
        for path, holds in (
            await run_in_daemon_thread(partial(exposed, self.settings), name="mldserver-rights")
        ).items():
            log.warning(
                "file.exposed",
                path=str(path),
                what=f"Every user of this host can read {path}: {holds}.",
                advice=f"Run `chmod o= {path}`.",
            )
        if self._endpoint is not None:
            await self._endpoint.open_steering(self.settings)
        if self._drain:
            await parts.ledger.drain()
        self._begun = parts
        self._built.set()
        if self._drain:
            self.stop(_DRAIN)

    def _begin(self, step: str) -> None:
        """Record the step that the start waits for."""
        self._step = step

    async def _work(self, parts: Parts) -> int:
        """Run all parts until a stop is requested, stop them in order, and return the exit code.

        The order of the stop: finish the shards' requests and make rows durable; windows; Spark; connections and dead
        letters; the handler's runtime last.
        """
        async with asyncio.TaskGroup() as group:
            works = {
                "coordinator": parts.coordinator.run(),
                "runtime": parts.runtime.run(),
                "readiness": self._readiness.watch(parts, self._clock, self._stop),
                "dead letters": parts.redriver.run(),
                "drain": self._watch_drain(parts.coordinator),
            }
            if parts.firing is not None:
                works["timers"] = parts.firing.run()
            if parts.engine is not None and parts.runner is not None:
                works |= {"engine": self._run_engine(parts.engine), "windows": parts.runner.run()}
            if parts.polling is not None:
                works["shards"] = parts.polling.run(parts.coordinator.shards.add_listing)
            background = {name: group.create_task(work, name=name) for name, work in works.items()}
            # A drain accepts no connections.
            accepting = asyncio.sleep(0) if self._drain else parts.source.run()
            source = group.create_task(accepting, name="source")
            await self._stop.wait()
            # Do not wait for dead letters that run again, or for timers: the next start continues with them.
            visitors = {background[name] for name in ("dead letters", "timers") if name in background}
            for task in visitors:
                task.cancel()
            log.info("server.stopping", reason=self._reason or "forced", connections=parts.source.connections)
            unfinished = partial(self._unfinished, parts)
            async with self._until(self.forced, self._finish(parts), unfinished) as finishing:
                durable = finishing.done() and finishing.result()
            if parts.engine is not None and "windows" in background:
                # Cancel the windows, then close Spark while its task still runs: cancelling that task would kill Spark.
                background["windows"].cancel()
                await asyncio.wait({background["windows"]}, timeout=_LET_GO_SECONDS)
                await self._end("engine", parts.engine.close)
            runtime = background.pop("runtime")
            for task in (source, *background.values()):
                task.cancel()
            # Cancel the runtime after the batches: it ends handler calls that ignore their cancellation.
            await asyncio.wait({source, *visitors}, timeout=_LET_GO_SECONDS)
            runtime.cancel()
        return EXIT_CLEAN if durable else EXIT_FORCED

    async def _run_engine(self, engine: Engine) -> None:
        """Run Spark, once a window may need it."""
        await self._to_compute.wait()
        await engine.run()

    async def _watch_drain(self, coordinator: Coordinator) -> None:
        """Stop this server when the ledger asks all servers to drain."""
        await coordinator.draining.wait()
        if not self._stop.is_set():
            self.stop(_DRAIN)

    async def _close(self) -> None:
        """Close the parts that were built, in the order of the stop. An error of a part does not keep others open."""
        parts = self._parts
        if parts is None:
            return
        async with contextlib.AsyncExitStack() as closing:  # the stack closes in reverse order
            closing.push_async_callback(self._end, "ledger", parts.ledger.close)
            if parts.letters is not None:
                closing.push_async_callback(self._end, "dead letters", parts.letters.close)
            closing.push_async_callback(self._end, "leaving the ledger", parts.coordinator.leave)
            closing.push_async_callback(self._end, "handler", parts.runtime.close)
            if parts.engine is not None:
                closing.push_async_callback(self._end, "engine", parts.engine.close)

    async def _end(self, part: str, close: Callable[[], Coroutine[None, None, None]]) -> None:
        """Close a part and wait for it; after a forced stop at most ``_LET_GO_SECONDS``."""
        async with self._until(self.forced, close(), lambda: {"end": part}) as closing:
            await asyncio.wait({closing}, timeout=_LET_GO_SECONDS)

    # Stopping.

    def stop(self, reason: str) -> None:
        """Begin an orderly stop; a second call forces it."""
        if self._stop.is_set():
            self.force()
            return
        self._reason = reason
        self._stop.set()

    def force(self) -> None:
        """Stop now, without waiting for pending work. The ledger makes that safe."""
        self._stop.set()
        self.forced.set()

    async def _finish(self, parts: Parts) -> bool:
        """Finish pending work within the grace period; return whether every accepted row is durable.

        If time runs out before that, force the stop and return False. Windows get what is left of the grace period; a drain
        waits for them without a limit.
        """
        began_ms = self._clock.steady_ms()
        try:
            async with asyncio.timeout(self.settings.grace_seconds):
                parts.source.stop_accepting()
                await parts.source.drain()
                await parts.coordinator.flush("shutdown")
        except TimeoutError:
            self.force()  # the handler may ignore a cancellation, so do not wait any longer
            return False
        if self._drain:
            await self._publish_all(parts)
            return True
        if parts.runner is not None:
            left = self.settings.grace_seconds - (self._clock.steady_ms() - began_ms) / 1000
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(left, 0.0)):
                    await parts.runner.idle()
        return True

    async def _publish_all(self, parts: Parts) -> None:
        """Wait until this server is the only one, cut every open window, and return when all are published."""
        coordinator, runner = parts.coordinator, parts.runner
        while coordinator.status().servers > 1:
            await self._clock.sleep(self.settings.flush_interval_ms / 1000)
            await coordinator.flush("drain")
        coordinator.cuts_all = True
        while True:
            await coordinator.flush("drain")
            if runner is not None and len(runner.unfinished):
                self._to_compute.set()
                await runner.idle()
                continue
            windows = (await parts.ledger.peek()).windows.values()
            set_aside = [window for window in windows if window.state is WindowState.SET_ASIDE]
            published = [
                window for window in windows if window.state is WindowState.PUBLISHED and not window.pending
            ]
            if len(set_aside) + len(published) == len(windows):
                break
            # Another drain has cut the other windows, and publishes them.
            await self._clock.sleep(self.settings.flush_interval_ms / 1000)
        log.info("pipeline.drained", set_aside=[window.window_id for window in set_aside])

    def _unfinished(self, parts: Parts) -> dict[str, object]:
        """Return what an orderly stop still waits for, for the log."""
        status = parts.coordinator.status()
        return {
            "connections": parts.source.connections,
            "buffered_bytes": status.buffered_bytes,
            "windows": status.windows_waiting,
            **({"servers": status.servers - 1} if self._drain else {}),
        }

    @contextlib.asynccontextmanager
    async def _until(
        self,
        event: asyncio.Event,
        work: Coroutine[None, None, T],
        waiting_for: Callable[[], dict[str, object]],
    ) -> AsyncIterator[asyncio.Task[T]]:
        """Start ``work``, wait until it is done or ``event`` is set, and yield the work's task.

        Every few seconds of the wait, log what ``waiting_for`` returns. Work that is unfinished when the context ends is
        cancelled.
        """
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work)
            waiting = group.create_task(event.wait())
            reporting = group.create_task(self._report_waiting(waiting_for))
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            yield task
            for each in (task, waiting, reporting):
                each.cancel()

    async def _report_waiting(self, waiting_for: Callable[[], dict[str, object]]) -> None:
        """Log every few seconds what ``waiting_for`` returns, until cancelled."""
        began_ms = self._clock.steady_ms()
        while True:
            await self._clock.sleep(_REPORT_SECONDS)
            seconds = (self._clock.steady_ms() - began_ms) / 1000
            log.info("server.waiting", waiting_for=waiting_for(), seconds=seconds)

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
                for owner in (self._parts, self._endpoint):
                    if owner is not None and owner.tls is not None:
                        await owner.tls.read_again()

    # Watching.

    def report(self) -> ServiceReport:
        """Return the state of the server for systemd: the stage, the most urgent reason not to be ready, or ``ready``."""
        stopping, parts = self._stop.is_set(), self._begun
        if stopping or parts is None:
            text = self._stage
        else:
            text = next((reason for reason, _ in unready(parts)), "ready")
        return ServiceReport(text, self.is_ready, stopping)

    async def listening(self) -> str:
        """Wait until shards can connect, and return the address: ``host:port`` with the real port, or ``unix:/path``."""
        return await (await self._assembled()).source.listening()

    async def ready(self) -> None:
        """Return once every part works and Spark is warm."""
        await self._readiness.green.wait()

    async def finished(self) -> None:
        """Return once every known shard has ended and every window is published (or set aside)."""
        parts = await self._assembled()
        while not parts.coordinator.is_over or (parts.runner is not None and len(parts.runner.unfinished)):
            # Child shards may appear while the last windows are computed, so check again.
            await parts.coordinator.over()
            if parts.runner is not None:
                await parts.runner.idle()

    def status(self) -> CoordinatorStatus:
        """Return a snapshot. Raises RuntimeError before the parts are built."""
        if self._begun is None:
            raise RuntimeError("the server has not started yet")
        return self._begun.coordinator.status()

    def document(self, failure: str = "") -> Status:
        """Return the server's status, in any stage. If ``failure`` says why its parts cannot be read, it omits them."""
        function = self._gatherer.function(self.settings, self._begun, stage=self._stage, failure=failure)
        return self._gatherer.status(
            {self.settings.pipeline: function},
            engine=None if self._begun is None or failure else self._begun.engine,
            stopping=self._stop.is_set(),
        )

    @property
    def _stage(self) -> str:
        """What the server does while it is not working, as a verb phrase, for example "starts (ledger and recovery)"."""
        return f"stops ({self._reason})" if self._stop.is_set() else f"starts ({self._step})"

    async def carry_out(self, act: str, argument: str, function: str = "") -> tuple[bool, str]:
        """Carry out an act on a function, or the only one; return whether it is done, and a sentence for the caller."""
        parts = None if self._stop.is_set() else self._begun
        return await carry_out({self.settings.pipeline: parts}, self._clock, act, argument, function)

    async def fire_timers(self) -> None:
        """Fire pending timers without waiting for their due times; for simulations. See ``Firing.fire_all``. Raises LedgerError."""
        if self._begun is not None and self._begun.firing is not None:
            await self._begun.firing.fire_all()

    @property
    def is_ready(self) -> bool:
        """Whether readiness is green."""
        return self._readiness.green.is_set()

    async def _assembled(self) -> Parts:
        await self._built.wait()
        assert self._begun is not None
        return self._begun
