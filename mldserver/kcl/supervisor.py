"""Keeps the Java daemon running: starts it, passes its log on, starts it again when it exits, stops it in order.

The daemon's JVM exits whenever one of its connections fails, and never tries again by itself: restarting it is the
normal way back after a server was restarted. It would wait for its grace first, for children that are gone, so it is
not left the time. Nor is it started before the server answers: it would take leases, fail, and keep them from other
hosts until they expire, again and again. Whoever leads the application gives expired leases away; a leader that was
killed is followed by another only after two minutes, so while its server stays away the lead is given up for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import ssl
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog
from botocore.exceptions import BotoCoreError, ClientError

from mldserver.base.aws import aws_client
from mldserver.base.clock import first_of
from mldserver.base.service import Report
from mldserver.base.threads import aside
from mldserver.base.tls import client_context
from mldserver.children.process import ChildProcess
from mldserver.config.kinds import UnixAddress
from mldserver.errors import EXIT_CLEAN, EXIT_FAULT, EXIT_FORCED, ConfigError, NotThereYet, OperatorError
from mldserver.kcl.digest import ENDS_ITSELF, Digest, LogParser, verbatim

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from mldserver.base.backoff import Backoff
    from mldserver.base.clock import Clock
    from mldserver.config.kinds import Address
    from mldserver.kcl.digest import Line, LogEvent

log = structlog.get_logger("mldserver")

JOIN_SECONDS: Final = 0.2
"""A line of the JVM's own that nothing follows for this long is complete."""
LAST_SECONDS: Final = 3.0
"""How long a JVM that ends itself may take where the server still answers: other shards have connections, and may
checkpoint. An answer takes milliseconds."""
ASK_SECONDS: Final = 0.25
"""Between two looks for a server that does not answer."""
ANSWER_SECONDS: Final = 1.0
"""One look takes no longer."""
LEAD_SECONDS: Final = 10.0
"""When its server stays away for so long, the host gives up the lead: by then the others could take its leases, which
have expired, and a server that restarts is mostly back. A slow host may take twice as long to give it up: AWS's client is
imported then."""
TELL_SECONDS: Final = 60.0
COUNTS_SECONDS: Final = 10.0
"""Between two looks for counts of repeated lines that are due."""
ENDS_IN_ORDER: Final = frozenset({0, 1, 128 + signal.SIGTERM, -signal.SIGTERM})
"""What a daemon that was told to stop exits with: negative before it could catch the signal, 1 when it was ending itself."""
DRAIN_SECONDS: Final = 2.0
"""What the JVM wrote before it exited is read within this time, even when a child of it holds the pipe open."""
HEALTHY_SECONDS: Final = 120.0
"""A run of this length counts as good: a start takes the KCL up to a minute, so shorter ones say little."""


@dataclass(kw_only=True)
class Supervisor:
    """One daemon, again and again, until it is told to stop."""

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
    step_down: Callable[[], Awaitable[None]]
    """Gives up the lead of a daemon that is gone."""
    told: Mapping[str, Any]
    """The fields of the event ``kcl.starting``."""
    _digest: Digest = field(default_factory=Digest)
    _parser: LogParser = field(default_factory=LogParser)
    _joining: asyncio.TimerHandle | None = None
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _forced: asyncio.Event = field(default_factory=asyncio.Event)
    _doomed: asyncio.Event = field(default_factory=asyncio.Event)
    """The daemon that runs now has begun to end itself, unasked."""
    _killed: bool = False
    """The last daemon was killed by this supervisor."""
    _starts: int = 0
    _doing: str = "starting"

    def report(self) -> Report:
        """Return how it is, in a line for systemd. It is ready at once: what is not there yet it waits for."""
        return Report(self._doing, ready=True, stopping=self._stopping.is_set())

    def stop(self) -> None:
        """Ask for the end: the daemon gets SIGTERM and its grace; asked again, it is killed."""
        if self._stopping.is_set():
            self._forced.set()
        self._stopping.set()

    async def run(self) -> int:
        """Run until stopped. Returns the exit code: 0 after the daemon's end in order, 3 when this had to kill it, else 1.

        Raises OperatorError, in a group, when the command cannot be started at all.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                counts = tasks.create_task(self._tell_counts())
                code = await self._again_and_again()
                counts.cancel()
        finally:
            _write(self._digest.due(math.inf))
        return EXIT_FORCED if self._forced.is_set() else code

    async def _tell_counts(self) -> None:
        """Tell how often lines came again, however quiet the log is."""
        while True:
            await self.clock.sleep(COUNTS_SECONDS)
            _write(self._digest.due(self.clock.steady_ms() / 1000))

    async def _again_and_again(self) -> int:
        while await self._server_is_there():
            began = self.clock.steady_ms()
            code = await self._once()
            ran = (self.clock.steady_ms() - began) / 1000
            if self._stopping.is_set():
                if self._killed or code in ENDS_IN_ORDER:
                    log.info("kcl.exited", exit_code=code, seconds=ran)
                    return EXIT_CLEAN
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                log.warning(
                    "kcl.exited",
                    exit_code=code,
                    seconds=ran,
                    what=f"The daemon {how} while it was being stopped.",
                    advice="Look whether the host's memory is used up. Its shards move when their leases expire.",
                )
                return EXIT_FAULT
            if ran >= HEALTHY_SECONDS:
                self.backoff.worked()
            delay = self.backoff.failed(self.chance())
            self._doing = f"the daemon ended with exit code {code}; it starts again in {delay:.1f} s"
            log.warning("kcl.exited", exit_code=code, seconds=ran, delay_seconds=round(delay, 3))
            await first_of(self._stopping.wait(), self.clock.sleep(delay))
        return EXIT_CLEAN

    async def _server_is_there(self) -> bool:
        """Return True once the server answers, False when told to stop first."""
        began = tell_at = self.clock.steady_ms()
        leads = self._starts > 0
        self._doing = f"waiting for the server at {self.server}"
        while not self._stopping.is_set():
            if await self.answers():
                return True
            now = self.clock.steady_ms()
            if now >= tell_at:
                tell_at = now + round(TELL_SECONDS * 1000)
                log.warning("kcl.waiting", address=str(self.server), seconds=(now - began) / 1000)
            if leads and now - began >= LEAD_SECONDS * 1000:
                leads = False
                await first_of(self._stopping.wait(), self.step_down())
            await first_of(self._stopping.wait(), self.clock.sleep(ASK_SECONDS))
        return False

    async def _once(self) -> int:
        """Run the daemon once; return its exit code (negative: the signal that ended it)."""
        self._starts += 1
        self._doomed.clear()
        self._killed = False
        self._doing = f"the daemon runs (start {self._starts})"
        log.info("kcl.starting", start=self._starts, **self.told)
        try:
            child = await ChildProcess.start(
                self.command, environment=self.environment, output=[self._pass_on]
            )
        except OSError as error:
            lasting = isinstance(error, FileNotFoundError | PermissionError)
            raise (OperatorError if lasting else NotThereYet)(
                f"{self.command[0]} cannot be started: {error.strerror}."
            ) from error
        try:
            async with asyncio.TaskGroup() as tasks:
                stopper = tasks.create_task(self._end(child))
                code = await child.wait()
                stopper.cancel()
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
                await first_of(self._forced.wait(), self.clock.sleep(self.grace))
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
            _write([verbatim(event)] if self._doomed.is_set() else self._digest.take(event, now))
            if event.text == ENDS_ITSELF and not self._stopping.is_set():
                self._doomed.set()


async def answers(server: Address, tls: Sequence[Path] = ()) -> bool:
    """Whether the server takes connections now; ``tls``: authority, certificate and key, read anew with each look.

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
                    context = await aside(making, name="mldserver-tls")
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


async def step_down(properties: Mapping[str, str]) -> None:
    """Release the lock by which the daemon led its application, if it did; a fault is logged."""
    table = properties.get("coordinatorStateTableName", f"{properties['applicationName']}-CoordinatorState")
    where: dict[str, Any] = {
        "region": properties.get("dynamoDBRegionName", properties["regionName"]),
        "endpoint_url": properties.get("dynamoDBEndpoint"),
        "retries": {"total_max_attempts": 2},
    }
    try:
        async with asyncio.timeout(2 * LEAD_SECONDS), aws_client("dynamodb", **where) as client:
            # Another leads, or nobody yet.
            nothing = (
                client.exceptions.ConditionalCheckFailedException,
                client.exceptions.ResourceNotFoundException,
            )
            with contextlib.suppress(*nothing):
                await client.delete_item(
                    TableName=table,
                    Key={"key": {"S": "Leader"}},
                    ConditionExpression="ownerName = :worker",
                    ExpressionAttributeValues={":worker": {"S": properties["workerIdentifier"]}},
                )
    except (BotoCoreError, ClientError, OSError) as error:
        log.warning(
            "kcl.fault",
            what=f"The lead of the application could not be given up: {error or 'AWS did not answer'}.",
            did="Other hosts take over this one's shards two minutes later than they could.",
            advice="Look whether AWS answers, and allow the credentials of mldserver kcl dynamodb:DeleteItem on the table"
            f" {table}.",
        )


def _write(lines: Iterable[Line]) -> None:
    for line in lines:
        getattr(log, line.level)(line.event, **line.fields)
