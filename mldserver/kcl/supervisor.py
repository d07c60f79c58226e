"""Keeps the Java daemon running: starts it, passes its log on, starts it again when it exits, stops it in order.

The daemon's JVM exits whenever one of its connections fails, and never tries again by itself: restarting it is the
normal way back after a server was restarted. It would wait for its grace first, for children that are gone, so it is
not left the time. Nor is it started before the server answers: it would take leases, fail, and keep them from other
hosts until they expire, again and again. Once a JVM is dead, the supervisor releases the leader's lock that it may have
held, so that the application has a leader again at once.
"""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from mldserver.base.backoff import Backoff
from mldserver.base.clock import Clock, first_of
from mldserver.base.service import ServiceReport
from mldserver.base.threads import run_in_daemon_thread
from mldserver.base.tls import client_context
from mldserver.children.process import ChildProcess
from mldserver.children.supervise import ChildExit, supervise
from mldserver.config.kinds import Address, UnixAddress
from mldserver.errors import EXIT_CLEAN, EXIT_FAULT, EXIT_FORCED, ConfigError, NotThereYet, OperatorError
from mldserver.kcl.log_filter import ENDS_ITSELF, FilteredEvent, LogEvent, LogFilter, LogParser, verbatim

if TYPE_CHECKING:
    from mldserver.kcl.lease_worker import LeaseWorker

log = structlog.get_logger("mldserver")

JOIN_SECONDS: Final = 0.2
"""A line of the JVM's own that nothing follows for this long is complete."""
LAST_SECONDS: Final = 3.0
"""How long a JVM that ends itself may take where the server still answers: other shards have connections, and may
checkpoint. An answer takes milliseconds."""
UNLEASED_SECONDS: Final = 3.0
"""How long a JVM that has gained no lease yet may take to stop: while it starts, it ignores SIGTERM for up to half a minute."""
ASK_SECONDS: Final = 0.25
"""Between two looks for a server that does not answer."""
ANSWER_SECONDS: Final = 1.0
"""One look takes no longer."""
TELL_SECONDS: Final = 60.0
ENDS_IN_ORDER: Final = frozenset({0, 1, 128 + signal.SIGTERM, -signal.SIGTERM})
"""Exit codes of a daemon that was asked to stop: negative before it could catch the signal, 1 when it was ending itself."""
DRAIN_SECONDS: Final = 2.0
"""What the JVM wrote before it exited is read within this time, even when a child of it holds the pipe open."""


@dataclass(kw_only=True)
class Supervisor:
    """Runs one daemon, again and again, until asked to stop."""

    command: Sequence[str]
    environment: Mapping[str, str]
    backoff: Backoff
    grace: float
    """What its end may take after SIGTERM (seconds)."""
    clock: Clock
    chance: Callable[[], float]
    """Gives numbers from 0 to 1."""
    server: Address
    answers: Callable[[], Awaitable[bool]]
    """Whether the server can be connected to now."""
    worker: LeaseWorker
    """The KCL worker that each daemon in turn acts as."""
    told: Mapping[str, Any]
    """The fields of the event ``kcl.starting``."""
    _filter: LogFilter = field(default_factory=LogFilter)
    _parser: LogParser = field(default_factory=LogParser)
    _joining: asyncio.TimerHandle | None = None
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _forced: asyncio.Event = field(default_factory=asyncio.Event)
    _doomed: asyncio.Event = field(default_factory=asyncio.Event)
    """The daemon that runs now has begun to end itself, unasked."""
    _leased: bool = False
    """The daemon that runs now has gained a lease, and may have something to checkpoint."""
    _killed: bool = False
    """The last daemon was killed by this supervisor."""
    _lead_released: bool = False
    """No JVM of this worker can hold the leader's lock."""
    _starts: int = 0
    _doing: str = "starting"

    def report(self) -> ServiceReport:
        """Return how it is, in a line for systemd. It is ready at once: what is not there yet it waits for."""
        return ServiceReport(self._doing, ready=True, stopping=self._stopping.is_set())

    def stop(self) -> None:
        """Ask for the end: the daemon gets SIGTERM and its grace; asked again, it is killed."""
        if self._stopping.is_set():
            self._forced.set()
        self._stopping.set()

    async def run(self) -> int:
        """Run until stopped. Returns the exit code: 0 after the daemon's end in order, 3 when this had to kill it, else 1.

        Raises OperatorError when the command cannot be started at all.
        """
        try:
            code = await self._keep_running()
        finally:
            self.worker.close()
        return EXIT_FORCED if self._forced.is_set() else code

    async def _keep_running(self) -> int:
        """Run one daemon after another until stopped; return the exit code."""
        exit_code = EXIT_CLEAN

        async def run_once() -> ChildExit | None:
            nonlocal exit_code
            if not await self._server_is_there():
                return None
            await self._release_lead()  # again, if it failed before
            began_ms = self.clock.steady_ms()
            code = await self._once()
            seconds = (self.clock.steady_ms() - began_ms) / 1000
            await self._release_lead()
            if self._stopping.is_set():
                exit_code = self._report_stop(code, seconds)
            return ChildExit(partial(self._report_exit, code, seconds))

        if await self._name_is_free():
            # Of a former supervisor that was killed, with its JVM.
            await self._release_lead()
            await supervise(
                run_once, backoff=self.backoff, clock=self.clock, stopping=self._stopping, chance=self.chance
            )
        return exit_code

    def _report_stop(self, code: int, seconds: float) -> int:
        """Log how the daemon ended when it was asked to stop; return this program's exit code."""
        if self._killed or code in ENDS_IN_ORDER:
            log.info("kcl.exited", exit_code=code, seconds=seconds)
            return EXIT_CLEAN
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        log.warning(
            "kcl.exited",
            exit_code=code,
            seconds=seconds,
            what=f"The daemon {how} while it was being stopped.",
            advice="Look whether the host's memory is used up. Its shards move when their leases expire.",
        )
        return EXIT_FAULT

    def _report_exit(self, code: int, seconds: float, delay: float) -> None:
        """Log that the daemon ended unasked, and when it starts again."""
        self._doing = f"the daemon ended with exit code {code}; it starts again in {delay:.1f} s"
        log.warning("kcl.exited", exit_code=code, seconds=seconds, delay_seconds=round(delay, 3))

    async def _name_is_free(self) -> bool:
        """Return True once no other process on this host is the same worker, False when told to stop first."""

        async def claimed() -> bool:
            return self.worker.claim()

        return await self._wait_for(
            claimed,
            f"another mldserver kcl to end, which is the worker {self.worker.name} too",
            worker=self.worker.name,
            what="Another mldserver kcl on this host, or its JVM, is the same worker of the application.",
            did="No daemon is started while it lives.",
            advice="Stop the other one, or give this one a name with --property workerIdentifier=NAME.",
        )

    async def _server_is_there(self) -> bool:
        """Return True once the server answers, False when told to stop first."""
        return await self._wait_for(self.answers, f"the server at {self.server}", address=str(self.server))

    async def _wait_for(self, there: Callable[[], Awaitable[bool]], what_for: str, **fields: object) -> bool:
        """Return True once ``there`` does, False when told to stop first. Logs every minute that it waits."""
        began = tell_at = self.clock.steady_ms()
        self._doing = f"waiting for {what_for}"
        while not self._stopping.is_set():
            if await there():
                return True
            now = self.clock.steady_ms()
            if now >= tell_at:
                tell_at = now + round(TELL_SECONDS * 1000)
                log.warning("kcl.waiting", seconds=(now - began) / 1000, **fields)
            await first_of(self._stopping.wait(), self.clock.sleep(ASK_SECONDS))
        return False

    async def _release_lead(self) -> None:
        """Release the leader's lock if the last JVM, which is dead, may hold it. A forced stop does not wait for that."""
        if not self._lead_released:

            async def release() -> None:
                self._lead_released = await self.worker.release_lead()

            await first_of(self._forced.wait(), release())

    async def _once(self) -> int:
        """Run the daemon once; return its exit code (negative: the signal that ended it)."""
        self._starts += 1
        self._doomed.clear()
        self._killed = self._leased = False
        self._lead_released = False
        self._doing = f"the daemon runs (start {self._starts})"
        log.info("kcl.starting", start=self._starts, **self.told)
        try:
            child = await ChildProcess.start(
                self.command, environment=self.environment, output=[self._pass_on], keep=self.worker.held
            )
        except OSError as error:
            lasting = isinstance(error, FileNotFoundError | PermissionError)
            raise (OperatorError if lasting else NotThereYet)(
                f"{self.command[0]} cannot be started: {error.strerror}."
            ) from error
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(self._end(child)), tasks.create_task(self.worker.watch_leader())]
                code = await child.wait()
                for task in beside:
                    task.cancel()
        finally:
            # With bridges that outlive their JVM.
            await child.close(DRAIN_SECONDS)
            self._join(self._parser.flush())
        return code

    async def _end(self, child: ChildProcess) -> None:
        """End the daemon: in order when told to stop, without its grace when it ends itself."""
        await first_of(self._stopping.wait(), self._doomed.wait())
        self._doing = "the daemon ends"
        if self._doomed.is_set():
            there = await self.answers()
            log.warning(
                "kcl.cut_short",
                what="A connection to the server ended, which ends the daemon.",
                did=f"Its other shards get {LAST_SECONDS:g} s."
                if there
                else "The server is gone too: the daemon was killed.",
            )
            if there:
                await first_of(self._forced.wait(), self.clock.sleep(LAST_SECONDS))
        else:
            if not self._forced.is_set():
                child.signal(signal.SIGTERM)
                soon = min(UNLEASED_SECONDS, self.grace)
                await first_of(self._forced.wait(), self.clock.sleep(soon))
                if self._leased:
                    await first_of(self._forced.wait(), self.clock.sleep(self.grace - soon))
            if self._leased:
                self._forced.set()
        self._killed = True
        child.kill()

    def _pass_on(self, lines: list[str]) -> bool:
        """Log what the daemon prints; a line of the JVM's own is held back for those that may belong to it."""
        self._join(self._parser.feed(lines))
        if self._parser.waiting:
            self._joining = asyncio.get_running_loop().call_later(
                JOIN_SECONDS, lambda: self._join(self._parser.flush())
            )
        return True

    def _join(self, events: Iterable[LogEvent]) -> None:
        if self._joining is not None:
            self._joining.cancel()
            self._joining = None
        now = self.clock.steady_ms() / 1000
        for event in events:
            # What a daemon says while it falls is the same fault again, from each of its shards.
            lines = [verbatim(event)] if self._doomed.is_set() else self._filter.filter(event, now)
            self._leased = self._leased or any(line.event == "kcl.lease_gained" for line in lines)
            _write(lines)
            if event.text == ENDS_ITSELF and not self._stopping.is_set():
                self._doomed.set()


async def answers(server: Address, tls: Sequence[Path] = ()) -> bool:
    """Whether the server takes connections now; ``tls``: authority, certificate and key, read again at each look.

    Raises ConfigError when one of the certificates is not what it should be.
    """
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            if isinstance(server, UnixAddress):
                _, writer = await asyncio.open_unix_connection(server.path)
            else:
                context = None
                if tls:
                    making = partial(client_context, tls[1], tls[2], tls[0])
                    context = await run_in_daemon_thread(making, name="mldserver-tls")
                _, writer = await asyncio.open_connection(server.host, server.port, ssl=context)
            writer.close()
            return True
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"The server at {server} is not trusted: {error.verify_message}.",
            advice="Its certificate must be for the host in --connect, and from the authority in --tls-ca.",
        ) from error
    except (OSError, NotThereYet):
        return False


def _write(lines: Iterable[FilteredEvent]) -> None:
    for line in lines:
        getattr(log, line.level)(line.event, **line.fields)
