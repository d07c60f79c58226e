"""DynamoDB on loopback: moto over HTTP, one request at a time (its store is not safe under concurrency), with faults.

A fault is asked for each request, by the name of its operation, before moto sees it and again before the answer goes:
it may answer in moto's place, or cut the connection.
"""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Request, Response

if TYPE_CHECKING:
    Fault = Callable[[str, dict[str, Any]], Response | None]
    """Given an operation and its request; returns the answer in moto's place, or None."""


class CutConnection(Exception):
    """Raised by a fault: the connection ends without an answer."""


def refusal(code: str, status: int = 400, **more: Any) -> Response:
    """Return an error as DynamoDB words it."""
    body = json.dumps({"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": code} | more)
    return Response(body, status, content_type="application/x-amz-json-1.0")


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        pass


class Emulator:
    """The server, what it was asked, and what goes wrong."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self.before: Fault | None = None
        self.after: Fault | None = None
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=_Quiet)
        self.url = f"http://127.0.0.1:{self._server.port}"

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        request = Request(environ)
        operation = request.headers["X-Amz-Target"].rpartition(".")[2]
        body = request.get_data()
        told = json.loads(body)
        try:
            with self._lock:
                self.calls.append((operation, told))
                answer = self.before and self.before(operation, told)
                if answer is None:
                    asked = environ | {"wsgi.input": io.BytesIO(body)}
                    answer = Response.from_app(self._moto, asked, buffered=True)
                    answer = (self.after and self.after(operation, told)) or answer
        except CutConnection:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            answer = Response()
        return answer(environ, start_response)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def heal(self) -> None:
        self.before = self.after = None
        self.calls.clear()
