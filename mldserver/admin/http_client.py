"""Asks a running server, and steers it: the admin endpoint's client for the command line. Blocking.

Each request has a separate connection. No proxy of the environment is used, and no redirect followed.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import ssl
import sys
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec

from mldserver.admin.access import AccessToken
from mldserver.base.tls import refusal_by_server
from mldserver.config.kinds import Address, TcpAddress, UnixAddress, is_local
from mldserver.errors import NotThereYet, OperatorError
from mldserver.observe.log_lines import harmless
from mldserver.status_document import SCHEMA, Status

_ANSWER_SECONDS: Final = 5.0
_REFUSALS: Final = {http.client.UNAUTHORIZED, http.client.FORBIDDEN}
_LISTENS: Final = "0A"
"""TCP_LISTEN of the kernel."""
_LARGEST: Final = 64 << 20
"""Bytes of an answer: whatever listens at the address, the command's memory is bounded."""


class NoAnswer(NotThereYet):
    """No server answers at the address, or not in time, or not as a server does."""


class Refused(OperatorError):
    """The server does not admit this caller, or refuses the request."""


class Answer(msgspec.Struct, frozen=True):
    """What became of an act."""

    done: bool
    text: str
    """A sentence."""


class Client:
    """The admin endpoint of a server."""

    def __init__(
        self,
        address: Address,
        *,
        token: AccessToken | None = None,
        tls: ssl.SSLContext | None = None,
        seconds: float = _ANSWER_SECONDS,
    ) -> None:
        """Name the endpoint. ``token`` is for loopback; ``tls`` has the caller's certificate; ``seconds`` are a wait's bound."""
        self.address = address
        self._token = token
        self._tls = tls
        self._seconds = seconds
        self._on_loopback = isinstance(address, TcpAddress) and is_local(address)

    def status(self) -> bytes:
        """Return the status document as it came. Raises NoAnswer and Refused."""
        status, body = self._ask("GET", "/status", self._seconds)
        if status != http.client.OK:
            raise NoAnswer(f"The server at {self.address} has no status to show: {_sentence(status, body)}")
        return body

    def silence(self) -> str | None:
        """Return why the server does not live, though its endpoint answers, in words; None: it lives. Raises as ``status``."""
        status, body = self._ask("GET", "/livez", self._seconds)
        return None if status == http.client.OK else _sentence(status, body)

    def act(self, name: str, argument: str, *, seconds: float) -> Answer:
        """Have the server act, and return the result. Raises NoAnswer, also after ``seconds``, and Refused."""
        asked = json.dumps({"argument": argument}).encode()
        status, body = self._ask("POST", f"/act/{quote(name, safe='')}", seconds, asked)
        try:
            answer = msgspec.json.decode(body, type=Answer)
            return Answer(answer.done, "\n".join(map(harmless, answer.text.splitlines())))
        except msgspec.MsgspecError as error:
            raise Refused(f"The server at {self.address} did not do it: {_sentence(status, body)}") from error

    def _ask(self, method: str, path: str, seconds: float, body: bytes | None = None) -> tuple[int, bytes]:
        """Make one request; return the answer's status and body. A GET shows the token only once it is refused without."""
        status, data = self._once(method, path, seconds, body, None if method == "GET" else self._token)
        if status in _REFUSALS and method == "GET" and self._token is not None:
            status, data = self._once(method, path, seconds, body, self._token)
        if status in _REFUSALS:
            raise Refused(
                f"The server at {self.address} refuses: {_sentence(status, data)}",
                advice="--admin-token-file names the token's file; --certificate and --key are a client certificate.",
            )
        return status, data

    def _once(
        self, method: str, path: str, seconds: float, body: bytes | None, token: AccessToken | None
    ) -> tuple[int, bytes]:
        connection, connected = _HTTPConnection(self.address, self._tls, seconds), False
        headers = {"Accept": "application/json", "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if token is not None:
            headers["Authorization"] = f"Bearer {token.word}"
        try:
            connection.connect()
            connected = True
            if token is not None and self._tls is None and self._on_loopback:
                # Send the token to its owner or root only: another user may have taken the port.
                strangers = listening_users(connection.sock) - {token.owner, 0}
                if strangers:
                    raise Refused(
                        f"What listens at {self.address} is of user {min(strangers)}, and the token of user {token.owner}: "
                        "it was not sent.",
                        advice="See which process has the port, or name the server's own endpoint with --admin.",
                    )
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            data = answer.read(_LARGEST)
        except (OSError, http.client.HTTPException) as error:
            # A certificate that it does not trust, or misses, may be no more to a server than a reason to hang up.
            hung_up = connected and isinstance(error, ConnectionError)
            if isinstance(error, ssl.SSLError) or (hung_up and self._tls is not None):
                raise Refused(
                    f"The server at {self.address} and this command do not trust each other: {_reason(error)}.",
                    advice="--admin names the server as its certificate does, --ca who signed that; --certificate and --key "
                    "are the caller's own.",
                ) from error
            if hung_up or isinstance(error, http.client.HTTPException):
                raise NoAnswer(
                    f"What answers at {self.address} is no admin endpoint of mldserver, or speaks TLS where none was asked for."
                ) from error
            why = f"it did not within {seconds:g} s" if isinstance(error, TimeoutError) else _reason(error)
            raise NoAnswer(f"No server answers at {self.address}: {why}.") from error
        finally:
            connection.close()
        return answer.status, data


def listening_users(ours: socket.socket, tables: Path = Path("/proc/net")) -> set[int]:
    """Return the ids of users that a TCP connection may have reached on this host; none if the system shows none.

    An accepted connection's user is certain. Before that the kernel shows only the listeners.
    """
    here, there = ours.getsockname()[:2], ours.getpeername()[:2]
    listeners: dict[bool, set[int]] = {True: set(), False: set()}
    for name in ("tcp", "tcp6"):
        try:
            lines = (tables / name).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            # man 5 proc: sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode
            _, local, remote, state, *_, uid, _timeout, inode = line.split()[:10]
            host, port = _socket_address(local)
            if (host, port) == there and _socket_address(remote) == here and inode != "0":
                return {int(uid)}
            if state == _LISTENS and port == there[1] and host in {there[0], "0.0.0.0", "::"}:  # noqa: S104  # looked for
                listeners[host == there[0]].add(int(uid))
    return listeners[True] or listeners[False]


def _socket_address(text: str) -> tuple[str, int]:
    """Return the address that a table of the kernel shows as 32-bit words of the machine's order, in hexadecimal."""
    words, _, port = text.partition(":")
    packed = b"".join(
        int(words[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(words), 8)
    )
    host = ipaddress.ip_address(packed)
    return str(getattr(host, "ipv4_mapped", None) or host), int(port, 16)


class _HTTPConnection(http.client.HTTPConnection):
    """One to an address of either kind, by TLS or without."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, seconds: float) -> None:
        self._unix = address.path if isinstance(address, UnixAddress) else None
        self._tls = tls
        host, port = ("localhost", None) if isinstance(address, UnixAddress) else address
        super().__init__(host, port, timeout=seconds)

    def connect(self) -> None:
        if self._unix is not None:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            self.sock.connect(str(self._unix))
            return
        super().connect()
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)


def read_status(document: bytes) -> Status:
    """Return a status document's meaning. Raises NoAnswer for what is none, and OperatorError for a newer program's."""
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


def _sentence(status: int, body: bytes) -> str:
    """Return the sentence in an answer that is none of those that were hoped for."""
    try:
        document: Any = json.loads(body)
    except ValueError:
        document = body.decode("utf-8", "replace").strip()
    text = document.get("error") or document.get("reason") if isinstance(document, dict) else document
    return harmless(str(text)) if text else f"HTTP status {status}."
