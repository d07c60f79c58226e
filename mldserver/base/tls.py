"""TLS as servers and clients speak it: 1.2 and later, with certificates from files that may be renewed meanwhile.

A server's context lives as long as its process, so a listener fetches it once. Each handshake uses the files as last
read, certificate and authorities alike; no session outlives a reading.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from contextvars import ContextVar
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import structlog

from mldserver.base.threads import run_in_daemon_thread
from mldserver.errors import ConfigError, NotThereYet

log = structlog.get_logger("mldserver")


_failures: ContextVar[list[ssl.SSLError] | None] = ContextVar("tls_failures", default=None)


_UNDERSTOOD: Final = {"PEER_DID_NOT_RETURN_A_CERTIFICATE", "UNSUPPORTED_PROTOCOL", "NO_SHARED_CIPHER"}
"""Reasons of failed handshakes with peers that speak TLS. Other peers would not read an alert, nor close the connection."""


class _Answering(ssl.SSLObject):
    """A server's side of one connection, which sends its alert before it fails.

    asyncio and uvloop close the transport at once when a handshake fails, and drop the alert that says why. So the first
    failure is shown to them as a wait for more: they send what is there then, and the alert with it. The client
    closes the connection, or its next bytes raise the failure.
    """

    _failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """Continue the handshake. Raises SSLWantReadError once before an error that an alert reports to the client."""
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            self._failure = error
            if (failures := _failures.get()) is not None:
                failures.append(error)
            if isinstance(error, ssl.SSLCertVerificationError) or error.reason in _UNDERSTOOD:
                raise ssl.SSLWantReadError from error
            raise


def handshake_failures() -> list[ssl.SSLError]:
    """Return a list to which the handshakes of connections that the present task accepts from now on add why they fail.

    Their clients mostly close the connection first, so that the task itself gets no more than a ConnectionResetError.
    """
    failures: list[ssl.SSLError] = []
    _failures.set(failures)
    return failures


class ServerTLS:
    """The server's side: its certificate, and whom it lets in."""

    def __init__(
        self,
        certificate: Path,
        key: Path | None = None,
        client_ca: Path | None = None,
        *,
        names: Sequence[str] = (),
        required: bool = True,
    ) -> None:
        """Read the files (PEM). Blocking. Raises ConfigError for what is none, NotThereYet for a file that is missing.

        ``key``: None where it is in the certificate's file. ``client_ca``: clients show a certificate of one of these
        authorities; not ``required``: those without one get through the handshake too. ``names``: patterns, of which a
        client's certificate must have one.
        """
        self._files = (certificate, key, client_ca)
        self._names = names
        self._required = required
        self._latest = self._read()
        self._read_at = 0
        """Seconds since the epoch; 0: the files were not read again yet."""
        self.context = self._latest
        self.context.sslobject_class = _Answering
        """For everything that listens, as long as the process lives."""
        # Called in every handshake, also of clients that name no server.
        self.context.sni_callback = self._renew

    async def read_again(self) -> None:
        """Read the certificate files for the next handshakes. If one cannot be used, log why and keep the former certificates.

        For one caller at a time. A hanging file system blocks only the reading, which has a separate thread.
        """
        try:
            self._latest = await run_in_daemon_thread(self._read, name="mldserver-tls")
            self._read_at = int(time.time())
        except (ConfigError, NotThereYet) as error:
            log.error("tls.refused", **error.told())  # the event holds the error's words
        else:
            log.info("tls.read", certificate=str(self._files[0]))

    def refusal(self, peer: ssl.SSLObject | None) -> str | None:
        """Return why a client's certificate is not allowed, after the handshake; None: it is. ``peer``: the ``ssl_object``."""
        names = names_of(peer)
        if not self._names or any(fnmatchcase(name, pattern) for name in names for pattern in self._names):
            return None
        return f"Its certificate is for {', '.join(names) or 'nobody'}, and tls_names allows none of that."

    def _read(self) -> ssl.SSLContext:
        """Return a server's context made of the certificate files as they are now. Blocking."""
        certificate, key, client_ca = self._files
        context = _context(ssl.PROTOCOL_TLS_SERVER, certificate, key, client_ca)
        # Without tickets there is nothing that a client could come back with but its certificate.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED if self._required else ssl.CERT_OPTIONAL
        return context

    def _renew(self, connection: ssl.SSLObject, _name: str, _context: ssl.SSLContext) -> int | None:
        """Use the latest certificates for a handshake that begins. Refuse a resumed TLS 1.2 session from before their reading."""
        # Without a session, the attribute raises.
        session = connection.session if connection.session_reused else None
        if session is not None and session.time <= self._read_at:
            return ssl.AlertDescription.ALERT_DESCRIPTION_CERTIFICATE_EXPIRED
        connection.context = self._latest
        return None


def client_context(
    certificate: Path | None, key: Path | None, ca: Path | None, *, check_host: bool = True
) -> ssl.SSLContext:
    """Return what a client connects with. Blocking. Raises ConfigError and NotThereYet as a server does.

    ``certificate``: shown to servers that ask for one. ``ca``: authorities of the server's; None: the system's.
    ``check_host``: whether the server's certificate must be for the host that is connected to.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, ca)
    context.check_hostname = check_host
    if ca is None:
        context.load_default_certs()
    return context


_REASONS: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client showed no certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "the client does not know the authority of this server's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the client says that this server's certificate has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the client refuses this server's certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the client refuses this server's certificate",
    "HTTP_REQUEST": "the peer speaks HTTP and not TLS",
    "WRONG_VERSION_NUMBER": "the peer does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "the client offers only versions before TLS 1.2",
    "NO_SHARED_CIPHER": "client and server have no cipher in common",
}
"""OpenSSL's names of what happens most, in words."""


def handshake_failure(error: OSError) -> str:
    """Return why a server's handshake failed, in words: expired, unknown authority, no certificate, not TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is refused: {error.verify_message}"
    reason = getattr(error, "reason", None) or str(error)
    return _REASONS.get(reason, reason.replace("_", " ").lower() if reason.isupper() else reason)


_REFUSALS: Final = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the server wants a certificate, and none was shown",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "the server wants a certificate, or has no cipher in common with this client",
    "TLSV1_ALERT_UNKNOWN_CA": "the server does not know the authority of the certificate that was shown",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the server says that the certificate that was shown has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the server refuses the certificate that was shown",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the server refuses the certificate that was shown",
    "WRONG_VERSION_NUMBER": "the server does not speak TLS",
}
"""What a client learns most by OpenSSL's names, in words."""


def refusal_by_server(error: ssl.SSLError) -> str:
    """Return why a client's handshake failed, or its first read behind it, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate is refused: {error.verify_message.rstrip('.')}"
    return _REFUSALS.get(error.reason, error.reason.replace("_", " ").lower()) if error.reason else str(error)


def names_of(peer: ssl.SSLObject | None) -> tuple[str, ...]:
    """Return the names in the certificate that a peer has shown and proven: its subject's common name, then the others."""
    shown: dict[str, Any] = (peer.getpeercert() if peer is not None else None) or {}
    subject = [pair for part in shown.get("subject", ()) for pair in part if pair[0] == "commonName"]
    # A directory name (DirName) is a tuple, not a string.
    names = (name for _, name in (*subject, *shown.get("subjectAltName", ())) if isinstance(name, str))
    return tuple(dict.fromkeys(names))


def _context(kind: int, certificate: Path | None, key: Path | None, ca: Path | None) -> ssl.SSLContext:
    """Return a TLS context with these files. Raises NotThereYet for a missing file, ConfigError for an invalid one."""
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # The protocols over it mark their own ends, so a truncated stream is detected without close_notify.
    context.options |= getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)  # OpenSSL 1.1 does not need it
    where = certificate
    try:
        if certificate is not None:
            # An encrypted key is refused here; without a password the terminal would be asked for it.
            context.load_cert_chain(certificate, key, password="")
        where = ca
        if ca is not None:
            context.load_verify_locations(ca)
    except OSError as error:  # ssl.SSLError is one
        files = f"{where} with its key {key}" if where is certificate and key is not None else str(where)
        why = str(error.strerror or error)
        if isinstance(error, ssl.SSLError):
            why = (error.reason or "it is not what it should be").replace("_", " ").lower()
        raise (NotThereYet if isinstance(error, FileNotFoundError) else ConfigError)(
            f"The certificate {files} cannot be used: {why}.",
            advice="Give PEM files that this user may read, the key without a password and belonging to the certificate.",
        ) from error
    return context
