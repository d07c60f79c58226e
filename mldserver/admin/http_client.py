"""Asks a running server, and steers it: the admin endpoint's client for the command line. Blocking.

Each request has a separate connection. The client uses no proxy from the environment, and follows no redirect.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from typing import Any, Final
from urllib.parse import quote

import msgspec

from mldserver.base.listening import short_name
from mldserver.base.tls import refusal_by_server
from mldserver.config.kinds import Address, UnixAddress
from mldserver.errors import NotThereYet, OperatorError
from mldserver.observe.log_lines import harmless
from mldserver.status_document import SCHEMA, Status

_ANSWER_SECONDS: Final = 5.0
_MOST_BYTES: Final = 64 << 20
"""Of an answer: the command's memory stays bounded, whatever listens at the address."""


class NoAnswer(NotThereYet):
    """No server answers at the address, or not in time, or not as a server does."""


class Refused(OperatorError):
    """The server does not admit this caller, or refuses the request."""


class ActResult(msgspec.Struct, frozen=True):
    """The result of an act."""

    done: bool
    text: str
    """A sentence."""


class Client:
    """The admin endpoint of a server."""

    def __init__(
        self, address: Address, *, tls: ssl.SSLContext | None = None, seconds: float = _ANSWER_SECONDS
    ) -> None:
        """Name the endpoint. ``tls`` has the caller's certificate; ``seconds`` bounds each wait."""
        self.address = address
        self._tls = tls
        self._seconds = seconds

    def status(self) -> bytes:
        """Return the status document as it came. Raises NoAnswer and Refused."""
        status, body = self._request("GET", "/status", self._seconds)
        if status != http.client.OK:
            raise NoAnswer(f"The server at {self.address} has no status to show: {_error_text(status, body)}")
        return body

    def act(self, name: str, argument: str, *, seconds: float, function: str = "") -> ActResult:
        """Request an act on a function, or on the only one, and return its result. Raises NoAnswer, also after ``seconds``, and Refused."""
        # A server of an older version knows no functions.
        request = {"argument": argument} | ({"function": function} if function else {})
        status, body = self._request(
            "POST", f"/act/{quote(name, safe='')}", seconds, json.dumps(request).encode()
        )
        try:
            result = msgspec.json.decode(body, type=ActResult)
        except msgspec.MsgspecError as error:
            raise Refused(
                f"The server at {self.address} did not do it: {_error_text(status, body)}"
            ) from error
        return ActResult(result.done, "\n".join(map(harmless, result.text.splitlines())))

    def _request(
        self, method: str, path: str, seconds: float, body: bytes | None = None
    ) -> tuple[int, bytes]:
        """Make one request over a new connection; return the HTTP status and the body.

        Raises NoAnswer if no server answers within ``seconds``, Refused if TLS or the server denies access.
        """
        connection, connected = _HTTPConnection(self.address, self._tls, seconds), False
        headers = {"Accept": "application/json", "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.connect()
            connected = True
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            data = answer.read(_MOST_BYTES)
        except (OSError, http.client.HTTPException) as error:
            # A server may just close the connection if it does not trust, or misses, the caller's certificate.
            was_closed = connected and isinstance(error, ConnectionError)
            if isinstance(error, ssl.SSLError) or (was_closed and self._tls is not None):
                raise Refused(
                    f"The server at {self.address} and this command do not trust each other: {_reason(error)}.",
                    advice="--admin names the server as its certificate does, --ca who signed that; --certificate and --key "
                    "are the caller's own.",
                ) from error
            if was_closed or isinstance(error, http.client.HTTPException):
                raise NoAnswer(
                    f"The process at {self.address} is not an admin endpoint of mldserver, or it expects TLS."
                ) from error
            why = f"it did not within {seconds:g} s" if isinstance(error, TimeoutError) else _reason(error)
            raise NoAnswer(f"No server answers at {self.address}: {why}.") from error
        finally:
            connection.close()
        if answer.status == http.client.FORBIDDEN:
            raise Refused(f"The server at {self.address} refuses: {_error_text(answer.status, data)}")
        return answer.status, data


class _HTTPConnection(http.client.HTTPConnection):
    """A connection to an address of either kind, with TLS or without."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, seconds: float) -> None:
        self._unix = address.path if isinstance(address, UnixAddress) else None
        self._tls = tls
        host, port = ("localhost", None) if isinstance(address, UnixAddress) else address
        super().__init__(host, port, timeout=seconds)

    def connect(self) -> None:
        """Connect to the Unix socket, or to the host, then start TLS. Called by ``http.client``."""
        if self._unix is not None:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            with short_name(self._unix) as name:
                self.sock.connect(name)
            return
        super().connect()
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)


def read_status(document: bytes) -> Status:
    """Return a status document, decoded. Raises NoAnswer for anything else, and OperatorError for a newer program's document."""
    try:
        if (schema := msgspec.json.decode(document, type=_SchemaNumber).schema) > SCHEMA:
            raise OperatorError(
                f"The server's status has schema {schema}, and this program knows {SCHEMA}.",
                advice="Use the server's own version of mldserver; `status --json` shows any.",
            )
        return msgspec.json.decode(document, type=Status)
    except msgspec.MsgspecError as error:
        raise NoAnswer(f"The answer is not a status of mldserver: {error}.") from error


class _SchemaNumber(msgspec.Struct):
    schema: int


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return refusal_by_server(error)
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).rstrip(".")


def _error_text(status: int, body: bytes) -> str:
    """Return the text of an error response: from its JSON, else the body as it is; without a body, the HTTP status."""
    try:
        document: Any = json.loads(body)
    except ValueError:
        document = body.decode("utf-8", "replace").strip()
    text = document.get("error") or document.get("reason") if isinstance(document, dict) else document
    return harmless(str(text)) if text else f"HTTP status {status}."
