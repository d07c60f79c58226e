"""One run of a function's parts: started in order, stopped in reverse.

Order of start: ledger and recovery, handler, then together the listener and the engine. Connections are accepted, rows
flushed and checkpoints sent while Spark still starts; windows wait for it.

Order of stop: no new connections; each shard finishes its request; one last cycle makes everything durable and cuts
what may close; windows that are being computed get what is left of the grace (they are cut: the next start computes
them all the same, or another server on the ledger does); engine; ledger. A stop that comes before the start is over
gives it up: nothing was accepted yet, so that is a clean end. A second one ends all waiting, in whatever stage.

A drain stops every server on the ledger, as above, once the ledger asks for it. A pipeline that drains (``Dependencies.drain``)
asks, and is the last: it does not listen, and waits until the others have left or expired. Then no row is on its way any more,
so it cuts every window that is open, whatever the watermark says, and ends when the ledger has none to publish.

A server that others on its ledger took for dead (it hung for longer than ``server_timeout``, say) ends with an error: its shards
and windows may have gone on elsewhere, and all that it holds in memory is delivered again. Its connections end with it, and
the daemons come back with theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Final, TypeVar

import structlog

from mldserver.admin.gather import Readiness, unready
from mldserver.assembly import Dependencies, Parts, assemble, exposed
from mldserver.base.aws import require_aws
from mldserver.base.threads import run_in_daemon_thread
from mldserver.config.settings import Settings
from mldserver.coordinator.coordinator import Coordinator
from mldserver.errors import folder_error
from mldserver.jobs.engine import Engine
from mldserver.ledger.contract import Wanted, WindowState
from mldserver.ledger.operations import Ledger

log = structlog.get_logger("mldserver")
T = TypeVar("T")

_LET_GO_SECONDS: Final = 1.0
"""How long connections may take to end, at the very end, while the runtime still runs; after a forced stop each part."""
_DRAIN: Final = "drain"
"""The reason of a stop."""
_REPORT_SECONDS: Final = 5.0
"""Between two log events about what a start or a stop waits for."""


class Pipeline:
    """One run of a function, from sockets to published windows. ``run`` is its whole life."""

    def __init__(
        self,
        settings: Settings,
        around: Dependencies,
        *,
        begun: Callable[[Settings], Awaitable[None]] | None = None,
        forced: Callable[[], None] | None = None,
        undeploys: bool = False,
    ) -> None:
        """Prepare a run; nothing is started.

        ``begun`` is called once the output folder belongs to this server, and ``forced`` if the stop is forced. ``undeploys``: the
        drain is that of an undeploy, which asked all servers to drain.
        """
        self.settings = settings
        self._around = around
        self._clock = around.clock
        self._drain = around.drain
        self._on_begun, self._on_forced = begun, forced
        self.code_path = ""
        """The archive of the handler's code (``assemble``); set it before ``run``."""
        self.parts: Parts | None = None
        """The parts, once they are built."""
        self.has_closed_ledger = False
        """Whether the parts' ledger cannot be used any more. Read only."""
        self.begun: Parts | None = None
        """The parts, once the start is complete; None before."""
        self._built = asyncio.Event()
        self._stop = asyncio.Event()
        self.forced = asyncio.Event()
        """Set once the stop is forced: pending work is cancelled then, which may not end it. Read only."""
        self.undeploys = undeploys
        """Whether an undeploy of the function asked for the drain."""
        self._reason = ""
        self._step = "ledger"
        """What the start waits for."""
        self.readiness = Readiness()
        self._to_compute = asyncio.Event()
        """Set when the engine is needed: a drain may find nothing left to compute."""
        if not self._drain:
            self._to_compute.set()

    # Life.

    async def run(self) -> bool:
        """Start, work until stopped, and close everything. Return whether all accepted rows are durable.

        Raises what a part raises, in groups: OperatorError, HandlerError and LedgerError are for the operator.
        """
        async with contextlib.AsyncExitStack() as ends:
            ends.push_async_callback(self._close)
            async with self._until(self._stop, self._start(), lambda: {"start": self._step}) as starting:
                if not starting.done():
                    log.info("server.stopping", reason=self._reason or "forced", connections=0)
            # ``begun`` is None if the stop came before the start was complete.
            return self.begun is None or await self._work(self.begun)

    async def _start(self) -> None:
        """Build and start the parts, as far as connections can be accepted; ``_work`` starts Spark.

        Raises OperatorError, HandlerError or LedgerError if a part cannot start.
        """
        if self.settings.stream is not None and self._around.kinesis is None:
            self._begin("AWS credentials")
            await require_aws(self.settings.stream, region=self.settings.region)
        parts = self.parts = await assemble(
            self.settings, self._around, step=self._begin, code_path=self.code_path
        )
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
        if self._on_begun is not None:
            await self._on_begun(self.settings)
        if self._drain and not self.undeploys:  # another server may have deployed the function again
            await parts.ledger.drain()
        self.begun = parts
        self._built.set()
        if self._drain:
            self.stop(_DRAIN)

    def _begin(self, step: str) -> None:
        """Record the step that the start waits for."""
        self._step = step

    async def _work(self, parts: Parts) -> bool:
        """Run all parts until a stop is requested, stop them in order, and return whether all accepted rows are durable.

        The order of the stop: finish the shards' requests and make rows durable; windows; Spark; connections and dead
        letters; the handler's runtime last.
        """
        async with asyncio.TaskGroup() as group:
            works = {
                "coordinator": parts.coordinator.run(),
                "runtime": parts.runtime.run(),
                "readiness": self.readiness.watch(parts, self._clock, self._stop),
                "dead letters": parts.redriver.run(),
                "drain": self._watch_drain(parts.coordinator),
                "versions": parts.swap.run(),
                "queries": parts.queries.run(parts.lookups, parts.runtime.fill_lookup),
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
        return durable

    async def _run_engine(self, engine: Engine) -> None:
        """Run Spark, once a window may need it."""
        await self._to_compute.wait()
        await engine.run()

    async def _watch_drain(self, coordinator: Coordinator) -> None:
        """Stop this server when the ledger asks all servers to drain."""
        await coordinator.draining.wait()
        if not self._stop.is_set():
            self.undeploys = coordinator.ledger_view.state.life.wanted is Wanted.UNDEPLOYED
            self.stop(_DRAIN)

    async def _close(self) -> None:
        """Close the parts that were built, in the order of the stop. An error of a part does not keep others open."""
        parts = self.parts
        if parts is None:
            return
        parts.queries.published.pop(self.settings.pipeline, None)
        async with contextlib.AsyncExitStack() as closing:  # the stack closes in reverse order
            closing.push_async_callback(self._end, "ledger", partial(self._close_ledger, parts.ledger))
            if parts.letters is not None:
                closing.push_async_callback(self._end, "dead letters", parts.letters.close)
            closing.push_async_callback(self._end, "leaving the ledger", parts.coordinator.leave)
            closing.push_async_callback(self._end, "handler", parts.runtime.close)
            if parts.engine is not None:
                closing.push_async_callback(self._end, "engine", parts.engine.close)

    async def _close_ledger(self, ledger: Ledger) -> None:
        self.has_closed_ledger = True
        await ledger.close()

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
        if self._on_forced is not None:
            self._on_forced()

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
        """Wait until this server is the only one, cut every open window, and return when all are published.

        Return sooner if an undeploy asked for it, and another server has deployed the function again: the rest stays open.
        """
        coordinator, runner = parts.coordinator, parts.runner
        view = coordinator.ledger_view
        while coordinator.status().servers > 1:
            await self._clock.sleep(self.settings.flush_interval_ms / 1000)
            await coordinator.flush("drain")
            if self.undeploys and view.state.life.wanted is not Wanted.UNDEPLOYED:
                return
        coordinator.cuts_all = True
        while True:
            await coordinator.flush("drain")
            if self.undeploys and view.state.life.wanted is not Wanted.UNDEPLOYED:
                return
            if runner is not None and not runner.is_idle:
                self._to_compute.set()
                await runner.idle()
                continue
            state = await parts.ledger.peek()
            windows = state.windows.values()
            set_aside = [window for window in windows if window.state is WindowState.SET_ASIDE]
            published = [
                window for window in windows if window.state is WindowState.PUBLISHED and not window.pending
            ]
            if len(set_aside) + len(published) == len(windows) and not state.late_segments:
                break
            # Another drain has cut the other windows, or has the late rows, and publishes them.
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

    # Watching.

    async def assembled(self) -> Parts:
        """Wait until the start is complete, and return the parts."""
        await self._built.wait()
        assert self.begun is not None
        return self.begun

    async def finished(self) -> None:
        """Return once every known shard has ended and every window is published (or set aside)."""
        parts = await self.assembled()
        while not parts.coordinator.is_over or (parts.runner is not None and not parts.runner.is_idle):
            # Child shards may appear while the last windows are computed, so check again.
            await parts.coordinator.over()
            if parts.runner is not None:
                await parts.runner.idle()

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested."""
        return self._stop.is_set()

    @property
    def stage(self) -> str:
        """What the run does while it is not working, as a verb phrase, for example "starts (ledger and recovery)"."""
        return f"stops ({self._reason})" if self._stop.is_set() else f"starts ({self._step})"

    def report(self) -> str:
        """Return the stage, the most urgent reason not to be ready, or ``ready``."""
        if self._stop.is_set() or self.begun is None:
            return self.stage
        return next((reason for reason, _ in unready(self.begun)), "ready")
