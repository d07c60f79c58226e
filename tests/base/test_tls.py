"""TLS between two ends in memory: who gets through a handshake, and by which certificates."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from support.certificates import Certificates, issued

from mldserver.base.tls import ServerTLS, client_context, names_of
from mldserver.errors import ConfigError, NotThereYet

pytestmark = pytest.mark.quick


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def shaken(
    server: ssl.SSLContext,
    client: ssl.SSLContext,
    host: str | None = "server",
    session: ssl.SSLSession | None = None,
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both ends after a handshake. Raises SSLError where one of them refuses the other."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(up, down, server_side=True)
    theirs = client.wrap_bio(down, up, server_hostname=host, session=session)
    for _ in range(4):
        for end in (theirs, ours):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    with pytest.raises(ssl.SSLWantReadError):
        theirs.read(1)
    return ours, theirs


def client(files: Certificates, certificate: str = "client", **more: Any) -> ssl.SSLContext:
    return client_context(files.folder / f"{certificate}.pem", None, files.ca, **more)


def test_both_sides_know_each_other_by_their_certificates(files: Certificates) -> None:
    server = ServerTLS(files.server, client_ca=files.ca)
    ours, theirs = shaken(server.context, client(files))
    assert names_of(ours) == ("client", "127.0.0.1")
    assert names_of(theirs) == ("server", "127.0.0.1")
    assert server.refusal(ours) is None


@pytest.mark.parametrize("required", [True, False])
def test_a_certificate_of_another_authority_never_gets_through(files: Certificates, required: bool) -> None:
    server = ServerTLS(files.server, client_ca=files.ca, required=required)
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        shaken(server.context, client(files, "stranger"))


def test_any_certificate_of_the_authority_gets_through_the_servers_own_too(files: Certificates) -> None:
    ours, _ = shaken(ServerTLS(files.server, client_ca=files.ca).context, client(files, "server"))
    assert names_of(ours) == ("server", "127.0.0.1")


def test_no_revocation_list_is_read(files: Certificates) -> None:
    authority, key = issued("authority")
    now = datetime.now(UTC)
    revoked = x509.RevokedCertificateBuilder().revocation_date(now)
    revoked = revoked.serial_number(issued("client", "authority")[0].serial_number)
    built = x509.CertificateRevocationListBuilder().issuer_name(authority.subject).last_update(now)
    built = built.next_update(now + timedelta(days=1)).add_revoked_certificate(revoked.build())
    written = built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    files.ca.write_bytes(files.ca.read_bytes() + written)
    ours, _ = shaken(ServerTLS(files.server, client_ca=files.ca).context, client(files))
    assert names_of(ours)[0] == "client"


def test_a_certificate_that_is_over_never_gets_through(files: Certificates) -> None:
    files.write("former", days=-1)
    with pytest.raises(ssl.SSLError, match="certificate has expired"):
        shaken(ServerTLS(files.server, client_ca=files.ca).context, client(files, "former"))


def test_without_a_certificate_a_client_gets_through_only_where_none_is_required(files: Certificates) -> None:
    nameless = client_context(None, None, files.ca)
    with pytest.raises(ssl.SSLError, match="peer did not return a certificate"):
        shaken(ServerTLS(files.server, client_ca=files.ca).context, nameless)
    for server in (ServerTLS(files.server, client_ca=files.ca, required=False), ServerTLS(files.server)):
        ours, _ = shaken(server.context, nameless)
        assert names_of(ours) == ()


def test_a_client_refuses_a_server_of_another_authority_or_another_name(files: Certificates) -> None:
    server = ServerTLS(files.server, client_ca=files.ca)
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        shaken(ServerTLS(files.stranger).context, client(files))
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shaken(server.context, client(files), host="elsewhere")
    shaken(server.context, client(files, check_host=False), host="elsewhere")
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        shaken(server.context, client_context(files.client, None, None))


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (["client"], None),
        (["other", "cli*"], None),
        (["127.0.0.?"], None),
        (["CLIENT", "lient"], "Its certificate is for client, 127.0.0.1, and tls_names allows none of that."),
    ],
)
def test_names_are_limited_by_patterns(files: Certificates, patterns: list[str], told: str | None) -> None:
    server = ServerTLS(files.server, client_ca=files.ca, names=patterns)
    ours, _ = shaken(server.context, client(files))
    assert server.refusal(ours) == told
    assert server.refusal(None) == "Its certificate is for nobody, and tls_names allows none of that."


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_what_is_read_again_counts_for_the_next_handshake_and_no_session_outlives_it(
    files: Certificates, logged: list[dict[str, Any]], version: ssl.TLSVersion
) -> None:
    server = ServerTLS(files.server, client_ca=files.ca)
    former = client(files)
    former.maximum_version = version
    ours, theirs = shaken(server.context, former)
    Certificates(files.folder, "next authority")
    former.load_verify_locations(files.ca)  # it would take the new server, but is not taken by it
    shaken(server.context, former)
    asyncio.run(server.read_again())
    assert [entry["event"] for entry in logged] == ["tls.read"]
    for session in (None, theirs.session):
        with pytest.raises(
            ssl.SSLError, match=r"certificate verify failed|CALLBACK_FAILED|UNKNOWN_CA|CERTIFICATE_EXPIRED"
        ):
            shaken(server.context, former, session=session)
    shaken(server.context, client(files))
    assert names_of(ours) == ("client", "127.0.0.1"), "a connection that is there stays"


def test_what_cannot_be_used_is_told_and_the_former_certificate_stays(
    files: Certificates, logged: list[dict[str, Any]]
) -> None:
    server = ServerTLS(files.server, client_ca=files.ca)
    for damage in (files.server.unlink, lambda: files.server.write_text("none")):
        damage()
        asyncio.run(server.read_again())
        shaken(server.context, client(files))
    assert [(entry["event"], entry["level"]) for entry in logged] == [("tls.refused", "error")] * 2
    assert f"The certificate {files.server} cannot be used: No such file" in logged[0]["what"]


def test_older_versions_than_1_2_are_not_spoken(files: Certificates) -> None:
    for context in (ServerTLS(files.server).context, client(files)):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_files_that_are_none_are_refused_with_what_is_wrong(files: Certificates, tmp_path: Path) -> None:
    sealed = files.write("sealed", password=b"hush")
    missing = tmp_path / "missing.pem"
    with pytest.raises(NotThereYet, match=r"missing\.pem cannot be used: No such file"):
        ServerTLS(missing)
    with pytest.raises(NotThereYet, match=r"missing\.pem cannot be used: No such file"):
        client_context(None, None, missing)
    for certificate, key, why in (
        (files.ca, None, "it is not what it should be"),
        (sealed, None, "it is not what it should be|bad "),
        (files.server, files.client, "key values mismatch"),
    ):
        with pytest.raises(ConfigError, match=f"{certificate.name}.* cannot be used: {why}"):
            ServerTLS(certificate, key)
