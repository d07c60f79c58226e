"""The admin endpoint as the server has it: a socket, and a process that serves it from a document a second.

That process serves the clients: the server encodes a document, sends it, and waits for no client. The socket is the
server's, so that the process may die at any time: a fresh one goes on where clients wait already.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

import mldserver
from mldserver.admin.access import make_token, read_token
from mldserver.admin.endpoint_messages import (
    Answered,
    Document,
    FromEndpoint,
    LogLine,
    Renew,
    Start,
    Steer,
    Taken,
)
from mldserver.base.backoff import Backoff
from mldserver.base.clock import Clock, first_of
from mldserver.base.listening import listen_tcp, listen_unix
from mldserver.base.threads import run_in_daemon_thread
from mldserver.base.uris import redaction
from mldserver.children.channel import Channel, Descriptors, encodable
from mldserver.children.process import ChildProcess, ending
from mldserver.children.supervise import ChildExit, supervise
from mldserver.config.kinds import Address, TcpAddress, UnixAddress, is_local
from mldserver.config.resolve import home
from mldserver.config.settings import Settings
from mldserver.errors import NotThereYet, OperatorError
from mldserver.observe.logging import LineLimit
from mldserver.status_document import Status

if TYPE_CHECKING:
    CarryOut = Callable[[str, str], Awaitable[tuple[bool, str]]]
    """Carries out an act with an argument; returns whether it is done, and a sentence."""

log = structlog.get_logger("mldserver")

_SECONDS: Final = 1.0
"""From document to document."""
_HANGS_SECONDS: Final = 30.0
"""A process that has not taken a document for so long is replaced."""
_AGAIN_SECONDS: Final = 5.0
"""The longest wait for a fresh process: probes must not take its absence for the server's."""
_PASSED_ON: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""No other variable is passed on: it may be secret, and any client may connect."""
_ROOT: Final = str(Path(mldserver.__file__).parents[1])
_TOKEN: Final = "_mldserver/admin.token"  # noqa: S105  # a file's name


_ADDRESS: Final = "_mldserver/admin.address"


def token_file(settings: Settings) -> Path:
    """Return where the token is: a file of the operator's, or one that the server makes."""
    return settings.admin_token_file or home(settings) / _TOKEN


def address_file(settings: Settings) -> Path:
    """Return where a server says at which address its endpoint listens, for commands that are given `--out` alone."""
    return home(settings) / _ADDRESS


class AdminEndpoint:
    """The endpoint of one server; ``serving`` is its whole life."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        """Prepare what the settings name; nothing is opened yet."""
        assert settings.admin is not None, "there is an endpoint only where there is an address"
        self._settings = settings
        self._place: Address = settings.admin
        self._hide = redaction(settings.secrets(), in_json=True)
        self._by_token = isinstance(settings.admin, TcpAddress) and is_local(settings.admin)
        self._clock = clock
        # On loopback it speaks plain HTTP.
        certificate = None if is_local(settings.admin) else settings.tls_certificate
        self._start = Start(
            pipeline=settings.pipeline,
            token_file=str(token_file(settings).absolute()),
            guarded=settings.admin_token_file is not None,
            insecure=settings.insecure,
            certificate=None if certificate is None else str(certificate.absolute()),
            key=None if settings.tls_key is None else str(settings.tls_key.absolute()),
            client_ca=None if settings.tls_client_ca is None else str(settings.tls_client_ca.absolute()),
            names=settings.tls_names,
        )
        self.address: str | None = None
        """Where it listens, with the real port; None: it does not."""
        self.metrics_address = ""
        """Where metrics alone are served; empty: nowhere."""
        self._made: os.stat_result | None = None
        """The Unix socket that it has made."""
        self._child: ChildProcess | None = None
        self._channel: Channel[FromEndpoint] | None = None
        self._acts: set[asyncio.Task[None]] = set()
        """What is carried out: it goes on when the process that asked for it dies."""
        self._taken = asyncio.Event()
        """Whether the process has taken the latest document."""

    @contextlib.asynccontextmanager
    async def serving(
        self,
        status: Callable[[str], Status | None],
        carry_out: CarryOut,
        pause: Callable[[float], Awaitable[None]] | None = None,
    ) -> AsyncIterator[None]:
        """Serve while the context lasts, whatever becomes of the process.

        ``status`` makes a document of the whole server or, if given a reason, of what is known without its parts.
        ``pause`` sleeps between them, and may look around. Raises OperatorError when the address that was given cannot be
        listened on, and for certificates that cannot be used.
        """
        # The process reads certificates for itself; what is wrong with them ends this start.
        await run_in_daemon_thread(self._start.tls, name="mldserver-tls")
        listener = await self._listen()
        if listener is None:
            yield
            return
        listeners = [listener]
        if (place := self._settings.metrics_listen) is not None:
            assert isinstance(place, TcpAddress), "the settings allow no other"
            try:
                listeners.append(await listen_tcp(*place))
            except (OSError, UnicodeError) as error:
                listener.close()
                raise _no_listener("metrics_listen", place, error) from error
            self.metrics_address = str(TcpAddress(*listeners[1].getsockname()[:2]))
        log.info(
            "admin.listening",
            address=self.address,
            metrics=self.metrics_address,
            token_file=str(token_file(self._settings)) if self._by_token else "",
        )
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._keep(group, listeners, carry_out), name="admin"),
                    group.create_task(self._feed(status, pause or self._clock.sleep), name="status"),
                ]
                try:
                    yield
                finally:
                    for task in (*tasks, *self._acts):
                        task.cancel()
        finally:
            # While the socket is open, no other file has its inode: a later file at the path stays.
            if isinstance(self._place, UnixAddress) and self._made is not None:
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(self._made, self._place.path.lstat()):
                        self._place.path.unlink()
            for each in listeners:
                each.close()
            await run_in_daemon_thread(self._remove_address, name="mldserver-address")

    def make_files(self) -> None:
        """Write where the endpoint listens, then ``make_token``. Blocking. Raises as that does."""
        if self.address is not None:
            with contextlib.suppress(OSError):  # commands are given --admin then
                address_file(self._settings).write_text(f"{self.address}\n", "utf-8")
        self.make_token()

    def _remove_address(self) -> None:
        # Another server of the folder may have written its own since.
        with contextlib.suppress(OSError):
            if address_file(self._settings).read_text("utf-8").strip() == self.address:
                address_file(self._settings).unlink()

    def make_token(self) -> None:
        """Ensure that the token's file exists, for this user alone. Blocking. Raises OperatorError for a configured file.

        Over Unix sockets, and from outside, no client steers by a token: none is made.
        """
        if self._settings.admin_token_file is not None:
            read_token(self._settings.admin_token_file)
        elif self._by_token:
            try:
                make_token(token_file(self._settings))
            except OperatorError as error:
                error.did = "Nobody can steer over loopback; all else goes on."
                log.warning("admin.token_unusable", **error.told())

    def renew(self) -> None:
        """Read certificates again."""
        if self._channel is not None:
            self._channel.send(Renew())

    async def _listen(self) -> socket.socket | None:
        """Return a listening socket; None where the default address cannot be had."""
        place = self._place
        try:
            listener = listen_unix(place.path) if isinstance(place, UnixAddress) else await listen_tcp(*place)
        except (OSError, UnicodeError) as error:
            problem = _no_listener("admin", place, error)
            by_default = "admin" not in self._settings.origins and self._settings.metrics_listen is None
            if isinstance(error, OSError) and by_default:
                log.warning("admin.unavailable", **problem.told() | {"did": "The server goes on without."})
                return None
            raise problem from error
        if isinstance(place, TcpAddress):
            place = TcpAddress(*listener.getsockname()[:2])
        else:
            self._made = place.path.lstat()
        self.address = str(place)
        return listener

    # The process.

    async def _keep(
        self, group: asyncio.TaskGroup, listeners: list[socket.socket], carry_out: CarryOut
    ) -> None:
        """Keep an endpoint process running."""

        async def run_once() -> ChildExit:
            try:
                end = await self._live(group, listeners, carry_out)
            except OSError as error:  # no process, or no descriptor, to be had
                end = str(error)
            return ChildExit(lambda delay: log.warning("admin.lost", reason=end, delay_seconds=delay))

        await supervise(run_once, backoff=Backoff(1.0, _AGAIN_SECONDS, free=1), clock=self._clock)

    async def _live(
        self, group: asyncio.TaskGroup, listeners: list[socket.socket], carry_out: CarryOut
    ) -> str:
        """Run one process to its end, and return how it ended."""
        printed = LineLimit()
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        # The child finds this package from any working directory.
        paths = filter(None, (_ROOT, environment.get("PYTHONPATH")))
        child = await ChildProcess.start(
            [sys.executable, "-P", "-m", "mldserver.admin.endpoint_process"],
            environment=environment | {"PYTHONPATH": os.pathsep.join(paths)},
            output=[partial(_log_lines, printed)],
            talks=True,
        )
        gone = asyncio.Event()
        wrong = ""

        def ended(what: str | None) -> None:
            nonlocal wrong
            wrong = what or ""
            gone.set()

        def receive(message: FromEndpoint, _files: Descriptors) -> None:
            match message:
                case Taken():
                    self._taken.set()
                case LogLine():
                    getattr(log, message.level)(message.event, **message.fields)
                case Steer():
                    act = group.create_task(self._act(channel, message, carry_out))
                    self._acts.add(act)
                    act.add_done_callback(self._acts.discard)

        assert child.end is not None, "it was started with a socket"
        channel = Channel[FromEndpoint](child.end, FromEndpoint, receive=receive, ended=ended)
        try:
            channel.send(self._start, tuple(os.dup(each.fileno()) for each in listeners))
            self._child, self._channel = child, channel
            self._taken.set()
            await first_of(child.wait(), gone.wait())
        finally:
            self._child = self._channel = None
            await child.close()
            channel.close()
            printed.report()
        return wrong or ending(await child.wait())

    async def _act(self, channel: Channel[FromEndpoint], ask: Steer, carry_out: CarryOut) -> None:
        """Carry out an act, and answer. A failure is reported to the caller, and logged."""
        try:
            done, text = await carry_out(ask.act, ask.argument)
        except Exception as error:  # noqa: BLE001  # one act must not end the server
            done, text = False, f"It failed: {type(error).__name__}: {error}."
        tell = log.info if done else log.warning
        tell("admin.act", act=ask.act, argument=ask.argument, who=ask.who, done=done, text=text)
        channel.send(Answered(ask.number, done, text))

    # Documents.

    async def _feed(
        self, status: Callable[[str], Status | None], pause: Callable[[float], Awaitable[None]]
    ) -> None:
        """Send a document a second; the next one only when the process has taken the one before."""
        told = ""
        sent_ms = self._clock.steady_ms()
        while True:
            if self._channel is not None and self._taken.is_set():
                try:
                    data = self._encoded(status(""))
                except Exception as error:
                    reason = f"the status cannot be made: {type(error).__name__}: {error}"
                    data = b""
                    with contextlib.suppress(Exception):  # what went wrong concerns more than the parts
                        data = self._encoded(status(reason))
                    if reason != told:
                        log.exception(
                            "admin.failed",
                            did="/readyz is red, and /status says why; nothing else is concerned.",
                        )
                    told = reason
                self._taken.clear()
                self._channel.send(Document(data))
                sent_ms = self._clock.steady_ms()
            elif self._child is not None and self._clock.steady_ms() - sent_ms > _HANGS_SECONDS * 1000:
                self._child.kill()
            await pause(_SECONDS)

    def _encoded(self, document: Status | None) -> bytes:
        """Return a document's bytes without the settings' secrets, whatever a user's texts hold; b"" for None."""
        if document is None:
            return b""
        try:
            data = msgspec.json.encode(document)
        except UnicodeEncodeError:
            data = msgspec.json.encode(encodable(msgspec.to_builtins(document)))
        return self._hide(data.decode()).encode()


def _no_listener(setting: str, place: Address, error: Exception) -> OperatorError:
    """Return why an address cannot be listened on; NotThereYet where another process has it."""
    taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    return (NotThereYet if taken else OperatorError)(
        f"The admin endpoint cannot listen on {place}: {getattr(error, 'strerror', None) or error}.",
        advice=f"Give another address with --{setting.replace('_', '-')}, or `none`.",
    )


def _log_lines(printed: LineLimit, lines: list[str]) -> bool:
    """Log what the process prints; return whether that was not too much."""
    said = [line for line in lines if line]
    passed = [line for line in said if printed.passes()]
    for line in passed:
        log.warning("library.log", logger="mldserver.admin", text=line)
    return len(passed) == len(said)
