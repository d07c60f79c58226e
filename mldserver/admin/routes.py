"""The admin endpoint's HTTP application: shows the server's latest status, and passes steering requests to the server.

GET  /         the page                  GET  /status    the status document, as JSON
GET  /livez    200: the event loop runs  GET  /events    the same document, as server-sent events
GET  /healthz  the same as /livez        GET  /metrics   for Prometheus
GET  /readyz   200, or 503 with reasons  GET  /history   the last hour, for the page
``/readyz/FUNCTION`` and ``/history/FUNCTION`` show one function. ``POST /act/NAME {"argument": "…", "function": "…"}`` steers the
server; only over its Unix socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
import structlog
from aiohttp import hdrs, web

from mldserver.admin import metrics
from mldserver.admin.http_listener import ANSWER_SECONDS, Access, Connection
from mldserver.admin.status_feed import StatusFeed
from mldserver.base.folding import Folding
from mldserver.config.kinds import is_loopback
from mldserver.status_document import FunctionStatus, Status

log = structlog.get_logger("mldserver")

Steer = Callable[[str, str, str, str], Awaitable[tuple[bool, str]]]
"""Carries out an act with its argument on a function for a client; returns whether it is done, and a sentence."""

_LOGGED: Final = frozenset({403, 404})
_LOGGED_CHARACTERS: Final = 200
"""Of a path."""
_BODY_BYTES: Final = 4096
_MOST_STREAMS: Final = 32
"""Of all listeners."""
_WRITE_SECONDS: Final = 10.0
"""A reader of events may take so long for one document."""
_STREAM_SECONDS: Final = 600.0
"""A stream ends after this time; browsers reconnect by themselves."""
_FOR_METRICS: Final = ("/metrics", "/healthz", "/readyz")
"""Paths that ``metrics_listen`` serves."""
_READ_ONLY: Final = ("/", "/livez", "/healthz", "/readyz", "/status", "/events", "/history", "/metrics")
_PAGE: Final = Path(__file__).with_name("page.html")
_HEADERS: Final = {
    "Server": "mldserver",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    """Of a steering request."""

    argument: str = ""
    function: str = ""
    """The name of the function that the request is for; empty: the server's only one."""


class _RequestRefused(Exception):
    """A request that is refused, with the reason in a sentence for the client."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Routes:
    """Answers the requests of all listeners."""

    def __init__(self, feed: StatusFeed, steer: Steer, steering: Callable[[], str]) -> None:
        """``feed``: the server's latest status. ``steer``: carries out requests of operators.

        ``steering`` returns the address of the Unix socket that accepts these requests; empty: the server has none.
        """
        self._feed, self._carry_out_act, self._steering_address = feed, steer, steering
        self._page = _PAGE.read_bytes()
        self._content_security_policy = _content_security_policy(self._page)
        self._open_streams = 0
        loop = asyncio.get_running_loop()
        # Folds repeated errors of one HTTP status into one line of the log with their number.
        self._error_counts = Folding(lambda: round(loop.time() * 1000))

    def application(self) -> web.Application:
        """Return the application; its requests must come over a ``Connection``."""
        application = web.Application(middlewares=[self._handle_request], client_max_size=_BODY_BYTES)
        application.add_routes(
            [
                web.get("/", self._show_page),
                web.get("/livez", self._show_liveness),
                web.get("/healthz", self._show_liveness),
                web.get("/readyz", self._show_readiness),
                web.get("/readyz/{function}", self._show_readiness_of_function),
                web.get("/status", self._show_status),
                web.get("/events", self._stream_events, allow_head=False),
                web.get("/history", self._show_history),
                web.get("/history/{function}", self._show_history),
                web.get("/metrics", self._show_metrics),
                web.post("/act/{name:.*}", self._handle_act),
            ]
        )
        return application

    @web.middleware
    async def _handle_request(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the client's permission and answer the request. A failure costs only this response."""
        connection = _connection(request)
        connection.extend(ANSWER_SECONDS)
        response: web.StreamResponse
        try:
            _check_permission(request, connection)
            response = await handler(request)
        except (_RequestRefused, web.HTTPException) as error:
            response = self._error_response(request, connection, error)
        except Exception:
            if times := self._error_counts.count(500):  # 0: the line is held back
                log.exception(
                    "admin.failed",
                    what=f"{request.path} returned HTTP status 500.",
                    did="Nothing else is affected.",
                    times=times,
                )
            response = _json(500, error="The admin endpoint failed; the server's log has the reason.")
        response.force_close()
        return response

    def _error_response(
        self, request: web.Request, connection: Connection, error: _RequestRefused | web.HTTPException
    ) -> web.Response:
        """Return the response to a refused request, as JSON with the reason; log 403 and 404, folded."""
        why = str(error)
        headers: dict[str, str] = {}
        if isinstance(error, web.HTTPNotFound):
            why = f"There is no {request.path} here, but {', '.join(_READ_ONLY)} and /act/NAME."
        elif isinstance(error, web.HTTPMethodNotAllowed):
            headers[hdrs.ALLOW] = ", ".join(sorted(error.allowed_methods))
            why = f"{request.path} takes only {headers[hdrs.ALLOW]}."
        elif isinstance(error, web.HTTPRequestEntityTooLarge):
            why = f"A body has {_BODY_BYTES} bytes at most."
        if error.status in _LOGGED and (requests := self._error_counts.count(error.status)):
            path = request.path[:_LOGGED_CHARACTERS].encode(errors="replace").decode()
            log.warning(
                "admin.refused", requests=requests, status=error.status, path=path, who=connection.peer
            )
        return _json(error.status, headers, error=why)

    # Reading.

    async def _show_page(self, _request: web.Request) -> web.Response:
        return _body(
            self._page,
            "text/html; charset=utf-8",
            headers={"Content-Security-Policy": self._content_security_policy},
        )

    async def _show_liveness(self, _request: web.Request) -> web.Response:
        return _json(200, live=True)

    async def _show_readiness(self, request: web.Request) -> web.Response:
        status = self._feed.status
        if status is None:
            return _readiness(request, ready=False, reasons=("the server starts",))
        return _readiness(request, ready=status.ready, reasons=status.reasons)

    async def _show_readiness_of_function(self, request: web.Request) -> web.Response:
        _, function = self._require_function(request)
        return _readiness(request, ready=function.ready, reasons=function.reasons)

    async def _show_status(self, _request: web.Request) -> web.Response:
        self._require_status()
        return _body(self._feed.json(), "application/json")

    async def _show_history(self, request: web.Request) -> web.Response:
        name, _ = self._require_function(request)
        return _body(self._feed.history(name), "application/json")

    async def _show_metrics(self, request: web.Request) -> web.Response:
        kind = metrics.content_type(request.headers.get(hdrs.ACCEPT, ""))
        return _body(self._feed.metrics(self._require_status(), kind), kind)

    def _require_status(self) -> Status:
        status = self._feed.status
        if status is None:
            raise _RequestRefused(503, "The server has only just started: there is no status yet.")
        return status

    def _require_function(self, request: web.Request) -> tuple[str, FunctionStatus]:
        """Return the function that the path names, or the only one, with its name. Raises _RequestRefused."""
        functions = self._require_status().by_name
        name = request.match_info.get("function") or next(iter(functions))
        if name not in functions or ("function" not in request.match_info and len(functions) > 1):
            known = ", ".join(functions)
            raise _RequestRefused(404, f"Name a function of this server after the path: {known}.")
        return name, functions[name]

    async def _stream_events(self, request: web.Request) -> web.StreamResponse:
        """Send each status document when it comes. A slow reader misses some; a stuck reader is disconnected."""
        if self._open_streams >= _MOST_STREAMS:
            raise _RequestRefused(503, f"There are {_MOST_STREAMS} readers of events already.")
        connection, feed = _connection(request), self._feed
        response = web.StreamResponse(headers=_HEADERS | {hdrs.CONTENT_TYPE: "text/event-stream"})
        response.force_close()
        self._open_streams += 1
        try:
            await response.prepare(request)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STREAM_SECONDS):
                    while True:
                        renewed = feed.renewed
                        connection.extend(_WRITE_SECONDS)
                        if feed.status is not None:
                            await response.write(feed.event())
                        connection.extend(None)
                        await renewed.wait()
            return response
        finally:
            self._open_streams -= 1

    # Steering.

    async def _handle_act(self, request: web.Request) -> web.Response:
        """Carry out an operator's request, ``POST /act/NAME``. The response says in words what was done.

        Raises _RequestRefused unless the request came over the server's Unix socket with a well-formed body.
        """
        connection, name = _connection(request), request.match_info["name"]
        if connection.listener.access is not Access.STEER:
            raise _RequestRefused(403, self._how_to_steer(name))
        body = await request.read()
        try:
            asked = msgspec.json.decode(body, type=_Body) if body else _Body()
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _RequestRefused(400, f'The body must be JSON, as {{"argument": "…"}}: {error}.') from error
        connection.extend(None)  # a reload may take minutes
        done, text = await self._carry_out_act(name, asked.argument, asked.function, connection.peer)
        connection.extend(ANSWER_SECONDS)
        return _json(200 if done else 409, done=done, text=text)

    def _how_to_steer(self, name: str) -> str:
        """Return the reason for refusing an act on a read-only address, with the command that works instead."""
        if not (address := self._steering_address()):
            return (
                "This address is read-only, and the server has no Unix socket for steering: its log has "
                "admin.steering_unavailable with the reason."
            )
        return (
            f"This address is read-only. Steer the server over its Unix socket, {address}: run `mldserver {name} --admin "
            f"{address}` on the server's host as the server's user or root, for example through ssh or kubectl exec."
        )


def _readiness(request: web.Request, *, ready: bool, reasons: tuple[str, ...]) -> web.Response:
    """Return the response to a probe, without the reasons on the address for metrics."""
    code = 200 if ready else 503
    if _connection(request).listener.access is Access.METRICS:
        return _json(code, ready=ready)
    return _json(code, ready=ready, reasons=reasons)


def _connection(request: web.Request) -> Connection:
    assert isinstance(request.protocol, Connection), "HttpListener accepts all connections"
    return request.protocol


def _check_permission(request: web.Request, connection: Connection) -> None:
    """Raise _RequestRefused if the client may not make this request."""
    access = connection.listener.access
    if access is Access.METRICS:
        if request.path not in _FOR_METRICS and not request.path.startswith("/readyz/"):
            raise _RequestRefused(404, f"There is no {request.path} here, but {', '.join(_FOR_METRICS)}.")
    elif not connection.is_permitted and access is Access.STEER:
        raise _RequestRefused(403, "Only the server's own user and root may use its Unix socket.")
    elif not connection.is_permitted:
        raise _RequestRefused(403, "This needs a client certificate that the server accepts.")
    elif access is Access.READ and connection.listener.is_on_loopback and not _names_loopback(request):
        # DNS rebinding: a site whose name resolves to this host could read the status through a user's browser.
        raise _RequestRefused(
            403, "On loopback the Host header must name this host: localhost, 127.0.0.1 or [::1]."
        )


def _names_loopback(request: web.Request) -> bool:
    """Whether the Host header, without its port, is a loopback address."""
    host = request.headers.get(hdrs.HOST, "")
    name, colon, port = host.rpartition(":")
    return is_loopback((name if colon and port.isdigit() else host).strip("[]"))


def _content_security_policy(page: bytes) -> str:
    """Return the page's content security policy: its own script and style, and requests to this endpoint only."""
    hashes = {b"script": "", b"style": ""}
    for tag, content in re.findall(rb"<(script|style)>(.*?)</\1>", page, re.DOTALL):
        hashes[tag] += f" 'sha256-{b64encode(sha256(content).digest()).decode()}'"
    return (
        f"default-src 'none'; script-src{hashes[b'script']}; style-src{hashes[b'style']}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _json(status: int, headers: Mapping[str, str] | None = None, /, **fields: object) -> web.Response:
    return _body(msgspec.json.encode(fields), "application/json", status=status, headers=headers)


def _body(
    body: bytes, kind: str, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        status=status, body=body, headers={**_HEADERS, hdrs.CONTENT_TYPE: kind, **(headers or {})}
    )
