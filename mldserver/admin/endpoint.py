"""The admin endpoint of one server: its sockets, and how long they are served.

``admin`` shows the server to readers. Steering needs the server's Unix socket, whose clients' user ids the kernel vouches
for: ``admin`` itself if it is a Unix socket, else a socket in the output folder of each function. ``metrics_listen`` serves
metrics and health to any client.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
from aiohttp import web

from mldserver.admin.addresses import address_file, steering_socket
from mldserver.admin.http_listener import Access, HttpListener
from mldserver.admin.routes import Routes
from mldserver.admin.status_feed import StatusFeed
from mldserver.base.clock import Clock
from mldserver.base.listening import listen_tcp, listen_unix
from mldserver.base.threads import run_in_daemon_thread
from mldserver.base.tls import ServerTLS
from mldserver.base.uris import redaction
from mldserver.config.kinds import Address, TcpAddress, UnixAddress, is_local
from mldserver.config.settings import Settings
from mldserver.errors import NotThereYet, OperatorError
from mldserver.status_document import Status

log = structlog.get_logger("mldserver")

_T = TypeVar("_T")
_SHUTDOWN_SECONDS: Final = 1.0
"""The stop waits no longer for requests, whose connections are closed by then."""

CarryOut = Callable[[str, str, str], Awaitable[tuple[bool, str]]]
"""Carries out an act with an argument on a function; returns whether it is done, and a sentence."""


class AdminEndpoint:
    """The endpoint of one server. ``serving`` is its whole life."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        """Prepare what the settings name; nothing is opened yet. With several functions the settings may be those of any."""
        assert settings.admin is not None, "there is an endpoint only where there is an address"
        self._settings = settings
        self._stored: dict[Path, str] = {}
        """The address that each function's output folder has for commands, by its file."""
        self._secrets = settings.secrets()
        """Of all functions."""
        self._redact = redaction(self._secrets, in_json=True)
        self._place: Address = settings.admin
        self._clock = clock
        self.tls: ServerTLS | None = None
        """The certificates of an endpoint outside loopback; None: plain HTTP."""
        self.address: str | None = None
        """Where the endpoint listens, with the real port; None: nowhere."""
        self.metrics_address = ""
        """Where metrics alone are served; empty: nowhere."""
        self.steering_address = ""
        """A Unix socket for steering; empty: there is none."""
        self._carry_out: CarryOut
        self._server: web.Server
        self._group: asyncio.TaskGroup
        self._tasks: set[asyncio.Task[Any]] = set()
        """All that runs in the group."""
        self._steering: set[Path] = set()
        """The Unix sockets for steering that are open."""
        self._context = contextvars.Context()
        """Of the server: events about a client have no function, unless its request names one."""
        self._sockets = contextlib.ExitStack()

    @contextlib.asynccontextmanager
    async def serving(
        self,
        collect: Callable[[str], Status | None],
        carry_out: CarryOut,
        pause: Callable[[float], Awaitable[None]] | None = None,
    ) -> AsyncIterator[None]:
        """Serve while the context lasts.

        ``collect`` returns the status of the whole server or, if given a reason, what is known without asking its parts.
        ``pause`` sleeps between two documents. Raises OperatorError if the configured address cannot be listened on, or
        the certificates cannot be used.
        """
        self._carry_out = carry_out
        self._context = contextvars.copy_context()
        if not is_local(self._place):
            self.tls = await run_in_daemon_thread(self._read_certificates, name="mldserver-tls")
        with self._sockets:
            listeners = await self._listen()
            if not listeners:
                yield
                return
            log.info("admin.listening", address=self.address, metrics=self.metrics_address)
            feed = StatusFeed(collect, self._hide)
            routes = Routes(feed, self._carry_out_shielded, lambda: self.steering_address)
            runner = web.AppRunner(
                routes.application(), handler_cancellation=True, shutdown_timeout=_SHUTDOWN_SECONDS
            )
            await runner.setup()
            assert runner.server is not None, "it is set up"
            self._server = runner.server
            try:
                async with asyncio.TaskGroup() as self._group:
                    self._spawn(feed.run(pause or self._clock.sleep), "status")
                    for listener in listeners:
                        self._spawn(listener.run(self._server), "admin")
                    try:
                        yield
                    finally:
                        for task in self._tasks:
                            task.cancel()
            finally:
                await runner.cleanup()
                await run_in_daemon_thread(self._remove_addresses, name="mldserver-address")

    async def open_steering(self, settings: Settings) -> None:
        """Create the Unix socket for steering in a function's output folder, unless ``admin`` is one, and store its address there.

        A function that starts again calls this again, which does not affect its socket.

        All sockets steer the whole server. A server with one function calls this when the output folder belongs to it. Without the
        socket the server continues, with a warning.
        """
        self._secrets |= settings.secrets()
        self._redact = redaction(self._secrets, in_json=True)
        if self.address is None:
            return
        stored = self.steering_address or self.address
        if isinstance(self._place, TcpAddress):
            path = steering_socket(settings, int(self.address.rpartition(":")[2])).absolute()
            if path in self._steering:
                return
            try:
                listener = await run_in_daemon_thread(
                    partial(self._listen_unix, path), name="mldserver-steering"
                )
            except OSError as error:
                log.warning(
                    "admin.steering_unavailable",
                    what=f"The Unix socket {path} cannot be created: {error.strerror or error}.",
                    did="The server continues; it cannot be steered.",
                    advice="Give a Unix socket with --admin unix:PATH.",
                )
            else:
                stored = f"unix:{path}"
                self.steering_address = self.steering_address or stored
                self._steering.add(path)
                steering = HttpListener(listener, Access.STEER).run(self._server)
                self._context.copy().run(self._spawn, steering, "steering")
        await run_in_daemon_thread(
            partial(self._store_address, address_file(settings), stored), name="mldserver-address"
        )

    def _spawn(self, work: Coroutine[None, None, _T], name: str) -> asyncio.Task[_T]:
        """Start a task that is cancelled when ``serving`` ends."""
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _carry_out_shielded(self, act: str, argument: str, function: str, who: str) -> tuple[bool, str]:
        """Carry out an act and return its result. The act continues if the client disconnects."""
        with structlog.contextvars.bound_contextvars(**({"pipeline": function} if function else {})):
            act_task = self._spawn(self._carry_out_and_log(act, argument, function, who), "act")
        return await asyncio.shield(act_task)

    async def _carry_out_and_log(self, act: str, argument: str, function: str, who: str) -> tuple[bool, str]:
        """Carry out the request of an operator, ``who``, and log it as ``admin.act``. Return (whether it is done, a sentence)."""
        try:
            done, text = await self._carry_out(act, argument, function)
        except Exception as error:  # noqa: BLE001  # one act must not end the server; the client receives the reason
            done, text = False, f"It failed: {type(error).__name__}: {error}."
        report = log.info if done else log.warning
        report("admin.act", act=act, argument=argument, who=who, done=done, text=text)
        return done, text

    def _hide(self, text: str) -> str:
        """Return JSON without the secrets of all functions that the endpoint knows by now."""
        return self._redact(text)

    # Sockets and files.

    def _read_certificates(self) -> ServerTLS | None:
        """Blocking. Raises OperatorError for files that cannot be used."""
        settings = self._settings
        if settings.tls_certificate is None:
            return None
        return ServerTLS(
            settings.tls_certificate,
            settings.tls_key,
            settings.tls_client_ca,
            names=() if settings.insecure else settings.tls_names,
            required=settings.tls_client_ca is not None and not settings.insecure,
        )

    async def _listen(self) -> list[HttpListener]:
        """Return the listeners that the settings name; none if the default address is not available."""
        place, settings = self._place, self._settings
        try:
            if isinstance(place, UnixAddress):
                listeners = [HttpListener(self._listen_unix(place.path), Access.STEER)]
                self.address, self.steering_address = str(place), f"unix:{place.path.absolute()}"
            else:
                listeners = [HttpListener(await self._listen_tcp(place), Access.READ, self.tls)]
                self.address = listeners[0].address
        except (OSError, UnicodeError) as error:
            problem = _cannot_listen("admin", place, error)
            is_optional = "admin" not in settings.origins and settings.metrics_listen is None
            if isinstance(error, OSError) and is_optional:
                log.warning(
                    "admin.unavailable",
                    **problem.told() | {"did": "The server continues without an admin endpoint."},
                )
                return []
            raise problem from error
        if (place_for_metrics := settings.metrics_listen) is not None:
            assert isinstance(place_for_metrics, TcpAddress), "the settings allow no other"
            try:
                listeners.append(HttpListener(await self._listen_tcp(place_for_metrics), Access.METRICS))
            except (OSError, UnicodeError) as error:
                raise _cannot_listen("metrics_listen", place_for_metrics, error) from error
            self.metrics_address = listeners[1].address
        return listeners

    async def _listen_tcp(self, place: TcpAddress) -> socket.socket:
        return self._sockets.enter_context(await listen_tcp(*place))

    def _listen_unix(self, path: Path) -> socket.socket:
        """Blocking for as long as the file system. The socket's file is removed at the end."""
        path.parent.mkdir(parents=True, exist_ok=True)
        listener = self._sockets.enter_context(listen_unix(path))
        self._sockets.callback(_remove_socket_file, path, path.lstat())
        return listener

    def _store_address(self, file: Path, address: str) -> None:
        """Store an address for commands in a function's output folder. Blocking."""
        with contextlib.suppress(OSError):  # commands need --admin then
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{address}\n", "utf-8")
            self._stored[file] = address

    def _remove_addresses(self) -> None:
        """Remove the stored addresses, unless another server of an output folder has replaced them. Blocking."""
        for file, address in self._stored.items():
            with contextlib.suppress(OSError):
                if file.read_text("utf-8").strip() == address:
                    file.unlink()


def _remove_socket_file(path: Path, made: os.stat_result) -> None:
    """Remove a socket's file, unless another file has replaced it. Call it while the socket is open and keeps its inode."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(made, path.lstat()):
            path.unlink()


def _cannot_listen(setting: str, place: Address, error: Exception) -> OperatorError:
    """Return the error to raise if an address cannot be listened on; NotThereYet if another process uses it now."""
    is_in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    return (NotThereYet if is_in_use else OperatorError)(
        f"The admin endpoint cannot listen on {place}: {getattr(error, 'strerror', None) or error}.",
        advice=f"Give another address with --{setting.replace('_', '-')}, or `none`.",
    )
