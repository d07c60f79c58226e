"""HTTP for people and probes, made from the server's latest status document and nothing else.

    GET  /         the page                    GET  /status    the document, as JSON
    GET  /livez    the server's loop turns     GET  /events    the same, as server-sent events
    GET  /readyz   200, or 503 with reasons    GET  /metrics   for Prometheus
    GET  /history  the last hour, for the page
    GET  /healthz  the same as /livez
    POST /act/NAME {"argument": "…"}: carried out by the server

Limits bound what clients do: connections (at the limit an old one closes), the time of each step, headers, bodies, streams,
and data that waits for a slow reader. A connection is a task, which ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import struct
import sys
import traceback
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestHandler

from mldserver.admin import metrics
from mldserver.admin.access import (
    Act,
    Credential,
    Listener,
    browser_refusal,
    read_token,
    refusal,
    same_token,
)
from mldserver.admin.endpoint_messages import Answered
from mldserver.admin.history import History
from mldserver.base.clock import Flag
from mldserver.base.tls import ServerTLS, names_of
from mldserver.config.kinds import is_loopback
from mldserver.errors import OperatorError
from mldserver.status_document import Status

if TYPE_CHECKING:
    AskServer = Callable[[str, str, str], Awaitable[Answered]]

log = structlog.get_logger("mldserver")

_COUNTED: Final = frozenset({401, 403, 404})
"""Statuses of refused requests that the log counts: no credential, a wrong one, no such path."""
_SHOWN: Final = 200
"""Characters of a path in the log."""
_TELL_SECONDS: Final = 60.0
_MOST_CONNECTIONS: Final = 200
_MOST_STREAMS: Final = 50
_MOST_ACTS: Final = 8
"""That are not answered yet."""
_HEADER_BYTES: Final = 8192
_BODY_BYTES: Final = 4096
_REQUEST_SECONDS: Final = 5.0
"""Until the first request has come, with the handshake before it."""
_IDLE_SECONDS: Final = 30.0
"""From an answer's begin to the next request: a slow reader has as long as one that says nothing."""
_STREAM_SECONDS: Final = 10.0
"""How long a reader of events may take for one document."""
_STREAMING_SECONDS: Final = 600.0
"""After which a stream ends; browsers come back by themselves."""
_SILENT_SECONDS: Final = 5.0
"""Without a document for so long, the server's event loop does not turn."""

_HEADERS: Final = {
    "Server": "mldserver",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}

_EVENT: Final = b"event: status\ndata: %b\n\n"
_PAGE: Final = Path(__file__).with_name("page.html")

_READS: Final = {
    "/livez": Act.LIVE,
    "/healthz": Act.LIVE,
    "/readyz": Act.LIVE,
    **dict.fromkeys(("/", "/status", "/events", "/history", "/metrics"), Act.READ),
}


_FOR_METRICS: Final = ("/metrics", "/healthz", "/readyz")
"""What the address for metrics alone serves, to any client."""


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    """Of a POST."""

    argument: str = ""


class _RequestRefused(Exception):
    """A request that is not answered as it wants."""

    def __init__(self, status: int, error: str, **headers: str) -> None:
        """``error``: why, in a sentence for the client."""
        super().__init__(error)
        self.response = _body(
            msgspec.json.encode({"error": error}), "application/json", status=status, **headers
        )


class Connection:
    """A client, from the accept to the end."""

    def __init__(self, endpoint: Endpoint, peer_socket: socket.socket, *, metrics_only: bool = False) -> None:
        self._endpoint = endpoint
        self.metrics_only = metrics_only
        self._socket = peer_socket
        self._loop = asyncio.get_running_loop()
        self.gone = asyncio.Event()
        self.asked = False  # anything, in a whole request
        self.deadline: float | None = self._loop.time() + _REQUEST_SECONDS
        """When it is cut, in the loop's time; None: not now."""
        self.transport: asyncio.Transport | None = None
        self.peer = _peer(peer_socket)
        """In words; with it who a Unix socket's client is."""

    async def run(self) -> None:
        """Serve the client until it goes, its time is over, or this is cancelled."""
        server, tls = self._endpoint.server, None if self.metrics_only else self._endpoint.tls
        handler = server()
        server.serving[handler] = self
        try:
            with contextlib.suppress(OSError, TimeoutError):  # ssl.SSLError is an OSError
                self.transport, _ = await self._loop.connect_accepted_socket(
                    lambda: handler,
                    self._socket,
                    ssl=None if tls is None else tls.context,
                    ssl_handshake_timeout=None if tls is None else _REQUEST_SECONDS,
                )
                while self.deadline is None or self.deadline > self._loop.time():
                    left = None if self.deadline is None else self.deadline - self._loop.time()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(min(left or _REQUEST_SECONDS, _REQUEST_SECONDS)):
                            await self.gone.wait()
                            return
        finally:
            del server.serving[handler]
            if self.transport is not None:
                self.transport.abort()
            self._socket.close()

    def extend(self, seconds: float | None) -> None:
        """Set the deadline, from now on; None: it has none."""
        self.deadline = None if seconds is None else self._loop.time() + seconds

    def shown(self, request: web.BaseRequest) -> tuple[Credential, str]:
        """Return the credential that the client has shown, and who it is in words."""
        peer, uid = self.peer
        if self._endpoint.listener is Listener.UNIX:
            return (Credential.OWNER if uid in {0, self._endpoint.uid} else Credential.STRANGER), peer
        if authorization := request.headers.get(hdrs.AUTHORIZATION, ""):
            try:  # the file may have changed: what it holds now counts
                right = same_token(_token(authorization), read_token(self._endpoint.token_file))
            except OperatorError as error:
                print(error, file=sys.stderr)  # noqa: T201  # the log's way out
                right = False
            if not right:
                return Credential.WRONG_TOKEN, peer
        tls, proof = self._endpoint.tls, request.get_extra_info("ssl_object")
        if tls is not None and proof.getpeercert():
            named = Credential.CERTIFICATE if tls.refusal(proof) is None else Credential.WRONG_NAME
            return named, f"certificate of {', '.join(names_of(proof)[:1]) or 'nobody'}, {peer}"
        return (Credential.TOKEN, f"token, {peer}") if authorization else (Credential.NONE, peer)


def _token(authorization: str) -> str:
    """Return the token that a client shows: as it is, or as the password that a browser asks for."""
    scheme, _, shown = authorization.partition(" ")
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):  # neither base64 nor text
            return b64decode(shown.strip(), validate=True).decode().partition(":")[2]
    return shown.strip() if scheme.lower() == "bearer" else ""


def _peer(peer_socket: socket.socket) -> tuple[str, int | None]:
    """Return the peer in words and, for a Unix socket's client, the user's id where the system knows it."""
    if peer_socket.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):  # it has gone already
            host, port = peer_socket.getpeername()[:2]
            return f"{host} port {port}", None
        return "gone", None
    if not hasattr(socket, "SO_PEERCRED"):
        return "unknown user", None
    pid, uid, _ = struct.unpack("3i", peer_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return f"user {uid}, process {pid}", uid


class _WebServer(web.Server):
    """aiohttp's own, which knows the connection of each handler."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        silent = logging.getLogger("mldserver.admin.http")
        silent.disabled = True  # malformed requests are normal; ``Endpoint`` logs faults
        super().__init__(
            handler,
            handler_cancellation=True,
            keepalive_timeout=_IDLE_SECONDS,
            lingering_time=0,
            access_log=None,
            logger=silent,
            auto_decompress=False,
        )
        self.serving: dict[RequestHandler, Connection] = {}

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        if handler in self.serving:
            self.serving[handler].gone.set()


class Endpoint:
    """Serves one listening socket. What it shows comes by ``take``."""

    def __init__(
        self,
        *,
        ask: AskServer,
        uid: int,
        token_file: Path,
        guarded: bool = False,
        insecure: bool = False,
        tls: ServerTLS | None = None,
    ) -> None:
        """Set the permissions. ``ask`` has the server carry out an act: its name, argument, and the caller.

        ``uid``: the user that, like root, may use a Unix socket. For the rest see ``endpoint_messages.Start`` and ``access.py``.
        """
        self.server = _WebServer(self._handle)
        self.listener = Listener.LOOPBACK
        self.uid = uid
        self.tls = tls
        self._ask = ask
        self.token_file = token_file
        self._may = partial(refusal, guarded=guarded, insecure=insecure)
        self._loop = asyncio.get_running_loop()
        self._taken = self._loop.time()
        self._document = b""
        self._status: Status | None = None
        """The same, decoded."""
        self._history = History()
        self._made: dict[str, bytes] = {}
        """What was made of the document, once for all who ask."""
        self._page = _PAGE.read_bytes()
        self._policy = _policy(self._page)
        self._news = Flag()
        """Set when there is a newer document."""
        self._streams = self._acts = 0
        self._refused: Counter[str] = Counter()
        """Refused requests that were not logged yet, by their status."""
        self._latest_refused: dict[str, str] = {}
        self._refusal = asyncio.Event()

    def take(self, document: bytes) -> None:
        """Take a document: nothing is older than this from now on. Empty: the server lives, and has none newer."""
        self._taken = self._loop.time()
        if document:
            self._status = msgspec.json.decode(document, type=Status)
            self._document, self._made = document, {}
            self._history.add(self._status)
            news, self._news = self._news, Flag()
            news.set()

    async def serve(self, listener: socket.socket, *, metrics_only: bool = False) -> None:
        """Accept clients until cancelled. At the limit close the oldest client that has asked nothing yet, else the oldest.

        ``metrics_only``: any client may ask, in plain HTTP, for metrics and health, and for nothing else.
        """
        listener.setblocking(False)
        if not metrics_only and listener.family == socket.AF_UNIX:
            self.listener = Listener.UNIX
        elif not metrics_only:
            host = listener.getsockname()[0]
            self.listener = Listener.LOOPBACK if is_loopback(host) else Listener.REMOTE
        async with asyncio.TaskGroup() as group:
            clients: dict[Connection, asyncio.Task[None]] = {}
            while True:
                try:
                    peer_socket, _ = await self._loop.sock_accept(listener)
                except OSError as error:  # out of descriptors, say
                    print(f"a connection cannot be accepted: {error}", file=sys.stderr)  # noqa: T201  # the log's way out
                    await asyncio.sleep(1.0)
                    continue
                if len(clients) >= _MOST_CONNECTIONS:
                    clients.pop(min(clients, key=lambda client: client.asked)).cancel()
                client = Connection(self, peer_socket, metrics_only=metrics_only)
                clients[client] = group.create_task(client.run())
                clients[client].add_done_callback(partial(clients.pop, client))

    # Requests.

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; its failure affects no other request."""
        connection = self.server.serving[request.protocol]
        connection.asked = True
        connection.extend(_IDLE_SECONDS)
        try:
            response = await self._answer(request, connection)
        except _RequestRefused as error:
            response = error.response
            # A client that reads shows its token only once it is asked for it.
            if (response.status, request.method) != (401, "GET") or hdrs.AUTHORIZATION in request.headers:
                self._note_refusal(response.status, request.path, connection)
        except Exception:  # noqa: BLE001  # a bug in here costs one answer
            traceback.print_exc()
            response = _json(500, error="The endpoint has failed; the server's log says how.")
        connection.extend(_IDLE_SECONDS)
        return response

    def _note_refusal(self, status: int, path: str, connection: Connection) -> None:
        if status in _COUNTED:
            self._refused[str(status)] += 1
            shown = path[:_SHOWN].encode(errors="replace").decode()
            self._latest_refused = {"path": shown, "who": connection.peer[0]}
            self._refusal.set()

    async def tell_refusals(self) -> None:
        """Log refused requests, at most once a minute, until cancelled."""
        while True:
            await self._refusal.wait()
            self._refusal.clear()
            counts, self._refused = self._refused, Counter()
            log.warning(
                "admin.refused", requests=sum(counts.values()), statuses=dict(counts), **self._latest_refused
            )
            await asyncio.sleep(_TELL_SECONDS)

    async def _answer(self, request: web.BaseRequest, connection: Connection) -> web.StreamResponse:
        """Raises _RequestRefused."""
        path, headers = request.path, request.headers
        if sum(len(name) + len(value) for name, value in request.raw_headers) > _HEADER_BYTES:
            raise _RequestRefused(431, "The request's headers are too long.")
        if connection.metrics_only:
            if path not in _FOR_METRICS:
                raise _RequestRefused(404, f"There is no {path} here, but {', '.join(_FOR_METRICS)}.")
            self._check_method(request.method, path, ("GET", "HEAD"))
            await self._take_what_waits()
            return self._read(path, headers.get(hdrs.ACCEPT, ""), may_read=False)
        foreign = browser_refusal(
            self.listener,
            path,
            method=request.method,
            host=headers.get(hdrs.HOST, ""),
            origin=headers.get(hdrs.ORIGIN, ""),
            site=headers.get("Sec-Fetch-Site", ""),
        )
        if foreign is not None:
            raise _RequestRefused(403, foreign)
        wanted = _READS.get(path, Act.STEER if path.startswith("/act/") else None)
        credential, who = connection.shown(request)
        why = self._may(self.listener, credential, wanted or Act.READ)
        if why is not None and "token" in why:
            realm = "mldserver: any name, and the token as the password"
            raise _RequestRefused(401, why, WWW_Authenticate=f'Basic realm="{realm}"')
        if why is not None:
            raise _RequestRefused(403, why)
        if wanted is None:
            raise _RequestRefused(404, f"There is no {path} here, but {', '.join(_READS)} and /act/NAME.")
        allowed = ("POST",) if wanted is Act.STEER else ("GET", "HEAD")
        self._check_method(request.method, path, allowed)
        if wanted is Act.STEER:
            return await self._steer(request, connection, who)
        if path == "/events" and request.method == "GET":
            return await self._stream(request, connection)
        await self._take_what_waits()
        may_read = self._may(self.listener, credential, Act.READ) is None
        return self._read(path, headers.get(hdrs.ACCEPT, ""), may_read=may_read)

    def _check_method(self, method: str, path: str, allowed: tuple[str, ...]) -> None:
        if method not in allowed:
            raise _RequestRefused(405, f"{path} takes {' and '.join(allowed)}.", Allow=", ".join(allowed))

    async def _take_what_waits(self) -> None:
        """Take a pending document first: this process itself may have stood still."""
        for _ in range(5 if self._loop.time() - self._taken >= _SILENT_SECONDS else 0):
            await asyncio.sleep(0)

    def _read(self, path: str, accept: str, *, may_read: bool) -> web.Response:
        silent = self._loop.time() - self._taken
        turns = silent < _SILENT_SECONDS
        still = f"the server's event loop has not turned for {silent:.0f} s"
        if path in {"/livez", "/healthz"}:
            return _json(
                200 if turns else 503, live=turns, **({} if turns or not may_read else {"reason": still})
            )
        if path == "/":
            return _body(self._page, "text/html; charset=utf-8", Content_Security_Policy=self._policy)
        status = self._status
        if path == "/readyz":
            ready = turns and status is not None and status.ready
            reasons = (
                (still,) if not turns else status.reasons if status is not None else ("the server starts",)
            )
            return _json(200 if ready else 503, ready=ready, **({"reasons": reasons} if may_read else {}))
        if status is None:
            raise _RequestRefused(503, "The server has only just started: there is no status yet.")
        if path == "/history":
            return _body(self._once("history", self._history.json), "application/json")
        if path == "/metrics":
            kind = metrics.content_type(accept)
            return _body(self._once(kind, lambda: metrics.exposed(status, kind)), kind)
        return _body(self._document, "application/json")

    async def _stream(self, request: web.BaseRequest, connection: Connection) -> web.StreamResponse:
        """Send each document as it comes; a slow reader misses some, and is cut off in the end."""
        if self._streams >= _MOST_STREAMS:
            raise _RequestRefused(503, f"There are {_MOST_STREAMS} readers of events already.")
        response = web.StreamResponse(headers=_HEADERS | {hdrs.CONTENT_TYPE: "text/event-stream"})
        self._streams += 1
        try:
            await response.prepare(request)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STREAMING_SECONDS):
                    while True:
                        news = self._news
                        connection.extend(_STREAM_SECONDS)
                        if self._document:
                            await response.write(self._once("events", lambda: _EVENT % self._document))
                        connection.extend(None)
                        await news.wait()
            return response
        finally:
            self._streams -= 1

    async def _steer(self, request: web.BaseRequest, connection: Connection, who: str) -> web.Response:
        body = bytearray()
        async with asyncio.timeout(_REQUEST_SECONDS):
            async for part in request.content.iter_any():
                body += part
                if len(body) > _BODY_BYTES:
                    raise _RequestRefused(413, f"A body has {_BODY_BYTES} bytes at most.")
        try:
            argument = msgspec.json.decode(bytes(body), type=_Body).argument if body else ""
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _RequestRefused(400, f'The body must be JSON, as {{"argument": "…"}}: {error}.') from error
        if self._acts >= _MOST_ACTS:
            raise _RequestRefused(503, f"{_MOST_ACTS} acts are not done yet: try again later.")
        self._acts += 1
        connection.extend(None)  # a reload takes its time
        try:
            answer = await self._ask(request.path.removeprefix("/act/"), argument, who)
        finally:
            self._acts -= 1
        return _json(200 if answer.done else 409, done=answer.done, text=answer.text)

    def _once(self, what: str, make: Callable[[], bytes]) -> bytes:
        """Return what is made of the present document, once for all."""
        if what not in self._made:
            self._made[what] = make()
        return self._made[what]


def _policy(page: bytes) -> str:
    """Return what a browser lets the page do: run and draw what stands in it, and ask this endpoint; nothing else."""
    allowed = {b"script": "", b"style": ""}
    for tag, part in re.findall(rb"<(script|style)>(.*?)</\1>", page, re.DOTALL):
        allowed[tag] += f" 'sha256-{b64encode(sha256(part).digest()).decode()}'"
    return (
        f"default-src 'none'; script-src{allowed[b'script']}; style-src{allowed[b'style']}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _json(status: int, **fields: object) -> web.Response:
    return _body(msgspec.json.encode(fields), "application/json", status=status)


def _body(body: bytes, kind: str, *, status: int = 200, **headers: str) -> web.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.Response(status=status, body=body, headers=_HEADERS | {hdrs.CONTENT_TYPE: kind} | named)
