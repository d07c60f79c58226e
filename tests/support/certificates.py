"""Authorities and certificates for tests, made with `cryptography` once a process."""

from __future__ import annotations

import functools
import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mldserver.base.tls import ServerTLS, client_context

Pair = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


@functools.cache
def issued(name: str, by: str | None = None, *, days: int = 2) -> Pair:
    """A certificate for ``name`` and 127.0.0.1 from the authority ``by``; None: an authority itself."""
    issuer = None if by is None else issued(by)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    until = datetime.now(UTC) + timedelta(days=days)
    hosts = [x509.DNSName(name.replace(" ", "-")), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer[0].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(until - timedelta(days=9))
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .sign(key if issuer is None else issuer[1], hashes.SHA256())
    )
    return certificate, key


class Certificates:
    """Files of one authority: ``server``, ``client``, ``stranger`` (of another authority), each with its key."""

    def __init__(self, folder: Path, authority: str = "authority") -> None:
        self.folder = folder
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(issued(authority)[0].public_bytes(serialization.Encoding.PEM))
        self.server = self.write("server", authority)
        self.client = self.write("client", authority)
        self.stranger = self.write("stranger", f"not {authority}")

    def both(self, client: str = "client", **more: Any) -> tuple[ServerTLS, ssl.SSLContext]:
        """The server's side, and a client's with this certificate; ``more``: what else the server's takes."""
        show = self.folder / f"{client}.pem" if client else None
        return ServerTLS(self.server, client_ca=self.ca, **more), client_context(show, None, self.ca)

    def write(self, name: str, by: str = "authority", *, days: int = 2, password: bytes = b"") -> Path:
        """Write ``NAME.pem`` with certificate and key, readable by this user alone."""
        certificate, key = issued(name, by, days=days)
        path = self.folder / f"{name}.pem"
        path.touch(mode=0o600)
        secret = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        path.write_bytes(
            certificate.public_bytes(serialization.Encoding.PEM)
            + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
        )
        return path
