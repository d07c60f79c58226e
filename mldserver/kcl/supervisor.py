"""Keeps the Java daemon running: starts it, passes its log on, starts it again when it exits, stops it in order.

The daemon's JVM exits whenever one of its connections fails, and never tries again by itself: restarting it is the
normal way back after a server was restarted. It would wait for its grace first, for children that are gone, so it is
not left the time. Nor is it started before the server answers: it would take leases, fail, and keep them from other
hosts until they expire, again and again. Once a JVM is dead, the supervisor releases the leader's lock that it may have
held, so that the application has a leader again at once.

A JVM that is asked to stop has nothing left to do when its last bridge has ended. KCL 3.1 nevertheless waits until
``failoverTimeMillis`` (10 s by default) is over: its thread that fetches records in advance does not notice the stop. The
supervisor kills such a JVM, so that the host's shards are not without a reader for these seconds.
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
from mldserver.kcl.log_filter import (
    BRIDGE_ENDED,
    ENDS_ITSELF,
    FilteredEvent,
    LogEvent,
    LogFilter,
    LogParser,
    verbatim,
)

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
REPORT_SECONDS: Final = 60.0
ENDS_IN_ORDER: Final = frozenset({0, 1, 128 + signal.SIGTERM, -signal.SIGTERM})
"""Exit codes of a daemon that was asked to stop: negative before it could catch the signal, 1 when it was ending itself."""
DRAIN_SECONDS: Final = 2.0
"""What the JVM wrote before it exited is read within this time, even when a child of it holds the pipe open."""


@dataclass(kw_only=True)
class Supervisor:
    """Runs the Java daemon, starting it again each time it exits, until asked to stop."""

    command: Sequence[str]
    environment: Mapping[str, str]
    backoff: Backoff
    grace: float
    """Seconds that the daemon may take to end after SIGTERM."""
    clock: Clock
    chance: Callable[[], float]
    """Returns numbers in [0, 1), for the jitter of the back-off."""
    server: Address
    answers: Callable[[], Awaitable[bool]]
    """Whether the server can be connected to now."""
    worker: LeaseWorker
    """The KCL worker that each daemon in turn acts as."""
    start_fields: Mapping[str, Any]
    """The fields of the event ``kcl.starting``."""
    _filter: LogFilter = field(default_factory=LogFilter)
    _parser: LogParser = field(default_factory=LogParser)
    _flush_timer: asyncio.TimerHandle | None = None
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _forced: asyncio.Event = field(default_factory=asyncio.Event)
    _daemon_is_ending: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the running daemon has begun to exit by itself, because one of its connections failed."""
    _open_shards: int = 0
    """Leases that the running daemon has gained, less the shards whose bridges have ended: it may need time for a last
    checkpoint of each."""
    _bridges_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the daemon's last bridge ends after the request to stop."""
    _killed: bool = False
    """The last daemon was killed by this supervisor."""
    _leader_lock_released: bool = False
    """No JVM of this worker can hold the leader's lock."""
    _starts: int = 0
    _activity: str = "starting"

    def report(self) -> ServiceReport:
        """Return the state in a line for systemd. It is ready at once, even while it waits for the server."""
        return ServiceReport(self._activity, ready=True, stopping=self._stopping.is_set())

    def stop(self) -> None:
        """End the daemon with SIGTERM and its grace; at a second call, kill it at once."""
        if self._stopping.is_set():
            self._forced.set()
        self._stopping.set()

    async def run(self) -> int:
        """Run until stopped; return the exit code of this program.

        0: the daemon stopped in time; 3: it had to be killed; 1: it ended otherwise. Raises OperatorError when the command cannot be started at all.
        """
        try:
            code = await self._keep_running()
        finally:
            self.worker.close()
        return EXIT_FORCED if self._forced.is_set() else code

    async def _keep_running(self) -> int:
        """Run one daemon after another until stopped; return the exit code.

        The JVMs of a KCL application elect a leader by a lock in DynamoDB. A JVM that was killed leaves its lock behind, and no
        shard is assigned until the lock expires. So the lock of a dead JVM is released before the next one starts.
        """
        exit_code = EXIT_CLEAN

        async def run_once() -> ChildExit | None:
            nonlocal exit_code
            if not await self._wait_for_server():
                return None
            await self._release_leader_lock()  # again, if it failed before
            began_ms = self.clock.steady_ms()
            code = await self._run_daemon()
            seconds = (self.clock.steady_ms() - began_ms) / 1000
            await self._release_leader_lock()
            if self._stopping.is_set():
                exit_code = self._report_stop(code, seconds)
            return ChildExit(partial(self._report_exit, code, seconds))

        if await self._wait_for_worker_name():
            # A former supervisor may have been killed together with its JVM, and have left that JVM's lock.
            await self._release_leader_lock()
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
        self._activity = f"the daemon ended with exit code {code}; it starts again in {delay:.1f} s"
        log.warning("kcl.exited", exit_code=code, seconds=seconds, delay_seconds=round(delay, 3))

    async def _wait_for_worker_name(self) -> bool:
        """Wait until no other process on this host uses the worker's name. Return False if asked to stop first."""

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

    async def _wait_for_server(self) -> bool:
        """Wait until the server accepts connections. Return False if asked to stop first."""
        return await self._wait_for(self.answers, f"the server at {self.server}", address=str(self.server))

    async def _wait_for(
        self, condition: Callable[[], Awaitable[bool]], what_for: str, **fields: object
    ) -> bool:
        """Poll until ``condition`` returns True; return False if asked to stop first. Log once a minute meanwhile."""
        began_ms = report_at_ms = self.clock.steady_ms()
        self._activity = f"waiting for {what_for}"
        while not self._stopping.is_set():
            if await condition():
                return True
            now_ms = self.clock.steady_ms()
            if now_ms >= report_at_ms:
                report_at_ms = now_ms + round(REPORT_SECONDS * 1000)
                log.warning("kcl.waiting", seconds=(now_ms - began_ms) / 1000, **fields)
            await first_of(self._stopping.wait(), self.clock.sleep(ASK_SECONDS))
        return False

    async def _release_leader_lock(self) -> None:
        """Release the leader's lock if the last JVM, which is dead, may hold it. A forced stop does not wait for that."""
        if not self._leader_lock_released:

            async def release() -> None:
                self._leader_lock_released = await self.worker.release_lead()

            await first_of(self._forced.wait(), release())

    async def _run_daemon(self) -> int:
        """Start the daemon and wait until it exits; return its exit code (negative: the signal that ended it).

        Beside it run ``_end_when_needed`` and the watch on the application's leader. Raises OperatorError if the command
        can never be started, NotThereYet if it may start later.
        """
        self._starts += 1
        self._daemon_is_ending.clear()
        self._bridges_ended.clear()
        self._killed = False
        self._open_shards = 0
        self._leader_lock_released = False
        self._activity = f"the daemon runs (start {self._starts})"
        log.info("kcl.starting", start=self._starts, **self.start_fields)
        try:
            child = await ChildProcess.start(
                self.command, environment=self.environment, output=[self._log_output], keep=self.worker.held
            )
        except OSError as error:
            is_permanent = isinstance(error, FileNotFoundError | PermissionError)
            raise (OperatorError if is_permanent else NotThereYet)(
                f"{self.command[0]} cannot be started: {error.strerror}."
            ) from error
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(self._end_when_needed(child)),
                    tasks.create_task(self.worker.watch_leader()),
                ]
                code = await child.wait()
                for task in beside:
                    task.cancel()
        finally:
            # This also ends bridge processes that have outlived their JVM.
            await child.close(DRAIN_SECONDS)
            self._log_events(self._parser.flush())
        return code

    async def _end_when_needed(self, child: ChildProcess) -> None:
        """Wait until this program is asked to stop, or the daemon begins to exit by itself; then make sure that it ends.

        Asked to stop: send SIGTERM, wait until the last bridge has ended or the grace is over, then kill. A daemon without
        an open shard gets a short grace, as it has nothing to checkpoint. A daemon that exits by itself gets ``LAST_SECONDS`` while the server answers, else none.
        A second request to stop (``_forced``) ends each wait.
        """
        await first_of(self._stopping.wait(), self._daemon_is_ending.wait())
        self._activity = "the daemon ends"
        if self._daemon_is_ending.is_set():
            server_answers = await self.answers()
            log.warning(
                "kcl.cut_short",
                what="A connection to the server ended, which ends the daemon.",
                did=f"Its other shards get {LAST_SECONDS:g} s."
                if server_answers
                else "The server is gone too: the daemon was killed.",
            )
            if server_answers:
                await first_of(self._forced.wait(), self.clock.sleep(LAST_SECONDS))
        else:
            if not self._forced.is_set():
                child.signal(signal.SIGTERM)
                short_grace = min(UNLEASED_SECONDS, self.grace)
                await self._wait_for_bridges(short_grace)
                if self._open_shards > 0:
                    await self._wait_for_bridges(self.grace - short_grace)
            if self._open_shards > 0:
                self._forced.set()  # the exit code of this program then says that the daemon was killed
        self._killed = True
        child.kill()

    async def _wait_for_bridges(self, seconds: float) -> None:
        """Wait until the last bridge has ended or the stop is forced, at most ``seconds``."""
        await first_of(self._forced.wait(), self._bridges_ended.wait(), self.clock.sleep(seconds))

    def _log_output(self, lines: list[str]) -> bool:
        """Log the daemon's output. A line that Java wrote without logback waits for further lines of the same message."""
        self._log_events(self._parser.feed(lines))
        if self._parser.waiting:
            self._flush_timer = asyncio.get_running_loop().call_later(
                JOIN_SECONDS, lambda: self._log_events(self._parser.flush())
            )
        return True

    def _log_events(self, events: Iterable[LogEvent]) -> None:
        """Log the daemon's events, filtered; count its open shards, and note whether it begins to exit."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        now = self.clock.steady_ms() / 1000
        for event in events:
            # While the daemon exits, each of its shards reports the same fault: log these at debug only.
            lines = [verbatim(event)] if self._daemon_is_ending.is_set() else self._filter.filter(event, now)
            self._open_shards += sum(line.event == "kcl.lease_gained" for line in lines)
            _log_lines(lines)
            if event.text.startswith(BRIDGE_ENDED):
                self._open_shards -= 1
                if self._open_shards == 0 and self._stopping.is_set():
                    self._bridges_ended.set()
            if event.text == ENDS_ITSELF and not self._stopping.is_set():
                self._daemon_is_ending.set()


async def answers(server: Address, tls: Sequence[Path] = ()) -> bool:
    """Whether the server accepts a connection now. ``tls``: paths of authority, certificate and key, read at each call.

    Raises ConfigError if the server's certificate is not trusted, or a file does not hold what it should.
    """
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            if isinstance(server, UnixAddress):
                _, writer = await asyncio.open_unix_connection(server.path)
            else:
                context = None
                if tls:
                    authority, certificate, key = tls
                    make_context = partial(client_context, certificate, key, authority)
                    context = await run_in_daemon_thread(make_context, name="mldserver-tls")
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


def _log_lines(lines: Iterable[FilteredEvent]) -> None:
    for line in lines:
        getattr(log, line.level)(line.event, **line.fields)
