"""Who may do what at the admin endpoint, tried out over real sockets."""

from __future__ import annotations

import asyncio
import base64
import os
import ssl
from pathlib import Path

import pytest
from admin.served import Served, pass_seconds, running, served, until
from support.certificates import Certificates
from support.raw_http import document

from mldserver.admin import endpoint as module
from mldserver.admin.http_client import Client as HttpClient
from mldserver.admin.http_client import Refused
from mldserver.base.listening import listen_tcp
from mldserver.base.tls import ServerTLS, client_context
from mldserver.config.kinds import TcpAddress


def test_the_token_steers_over_loopback_and_nothing_else_does(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            for shown in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": f"Basic {server.bearer[7:]}"},
            ):
                answer = await server.ask("/act/flush", "POST", **shown)
                assert (answer.code, "www-authenticate" in answer.headers) == (401, True)
            answer = await server.ask(
                "/act/flush", "POST", b'{"argument": "s1"}', Authorization=server.bearer
            )
            assert (answer.code, answer.json["done"]) == (200, True)
            assert answer.json["text"].startswith("flush of s1 by token, 127.0.0.1 port ")
            assert (await server.ask("/act/fail", "POST", Authorization=server.bearer)).code == 409

    running(story())


def test_a_unix_socket_is_its_users_who_is_known_by_the_kernel(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path, unix=True) as server:
            server.endpoint.take(document())
            assert (await server.ask("/status", Host="any")).code == 200
            text = (await server.ask("/act/pause", "POST")).json["text"]
            assert text == f"pause of all by user {os.getuid()}, process {os.getpid()}"

    running(story())


READS = ("/", "/status", "/events", "/history", "/metrics", "/nowhere")


async def most(server: Served, tls: ssl.SSLContext | None = None, **headers: str) -> int:
    """What a client may do there, tried out: nothing 0, live 1, read 2, steer 3."""

    async def code(path: str, method: str = "GET") -> int:
        return (await (await server.client(tls)).ask(path, method, **headers)).code  # of a stream, too

    try:
        probes = {await code("/livez"), await code("/readyz")}
    except (OSError, asyncio.IncompleteReadError):  # no handshake, or an end right behind it
        return 0
    reads = {await code(path) for path in READS}
    steers = await code("/act/flush", "POST")
    assert steers in {200, 401, 403}
    if steers == 200:
        return 3
    if reads == {200, 404}:
        return 2
    assert reads <= {401, 403}, reads
    if probes == {200}:
        return 1
    assert probes <= {401, 403}, probes
    return 0


WRONG = {"Authorization": "Bearer wrong"}


@pytest.mark.parametrize(("guarded", "given"), [(False, (2, 3, 1)), (True, (1, 3, 1))])
def test_over_loopback_it_is_the_token_that_counts(
    tmp_path: Path, guarded: bool, given: tuple[int, int, int]
) -> None:
    async def story() -> None:
        async with served(tmp_path, guarded=guarded) as server:
            server.endpoint.take(document())
            right = {"Authorization": server.bearer}
            assert (await most(server), await most(server, **right), await most(server, **WRONG)) == given
            probe = (await server.ask("/readyz")).json
            assert probe == ({"ready": True} if guarded else {"ready": True, "reasons": []})

    running(story())


@pytest.mark.parametrize(("uid", "may"), [(0, 3), (1, 0)])
def test_another_user_of_the_host_is_told_nothing_on_the_unix_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, may: int
) -> None:
    monkeypatch.setattr(module, "_peer", lambda _: (f"user {uid}", uid))

    async def story() -> None:
        async with served(tmp_path, unix=True, uid=4_000) as server:
            server.endpoint.take(document())
            assert await most(server) == may
            assert await most(server, Authorization=server.bearer) == may

    running(story())


@pytest.mark.parametrize(
    ("insecure", "ca", "names", "given"),
    [
        # What nobody, the token's holder, the client, a client of another name, and a stranger may do.
        (False, True, (), (0, 0, 3, 3, 0)),
        (False, True, ("clie??",), (0, 0, 3, 0, 0)),
        (True, True, ("client",), (2, 2, 3, 0, 0)),
        (True, False, (), (2, 2, 2, 2, 2)),
    ],
)
def test_from_outside_it_is_the_client_certificate_that_counts(
    tmp_path: Path, insecure: bool, ca: bool, names: tuple[str, ...], given: tuple[int, ...]
) -> None:
    files = Certificates(tmp_path)
    files.write("other")
    tls = ServerTLS(
        files.server, client_ca=files.ca if ca else None, names=names, required=ca and not insecure
    )

    async def story() -> None:
        listener = await listen_tcp("0.0.0.0", 0)
        async with served(tmp_path, listener=listener, tls=tls, insecure=insecure) as server:
            server.endpoint.take(document())
            shown = {
                name: client_context(files.folder / f"{name}.pem", None, files.ca)
                for name in ("client", "other", "stranger")
            }
            nobody = client_context(None, None, files.ca)
            found = (
                await most(server, nobody, Host="any"),
                await most(server, nobody, Host="any", Authorization=server.bearer),
                *[await most(server, context, Host="any") for context in shown.values()],
            )
            assert found == given

    running(story())


def test_who_steers_from_outside_is_named_by_the_certificate(tmp_path: Path) -> None:
    files = Certificates(tmp_path)

    async def story() -> None:
        listener = await listen_tcp("0.0.0.0", 0)
        tls = ServerTLS(files.server, client_ca=files.ca)
        async with served(tmp_path, listener=listener, tls=tls) as server:
            client = await server.client(client_context(files.client, None, files.ca))
            text = (await client.ask("/act/pause", "POST")).json["text"]
            assert text.startswith("pause of all by certificate of client, 127.0.0.1 port ")
            wrong = await client.ask("/act/pause", "POST", **WRONG)
            assert (wrong.code, "certificate" in wrong.json["error"]) == (403, True)
            plain = await server.client()
            plain.writer.write(b"GET /status HTTP/1.1\r\n\r\n")
            assert await plain.ended()

    running(story())


@pytest.mark.parametrize(
    ("show", "why"),
    [
        (None, "the server wants a certificate, and none was shown"),
        ("stranger", "the server does not know the authority of the certificate that was shown"),
        ("expired", "the server says that the certificate that was shown has expired"),
    ],
)
def test_the_command_line_says_why_the_endpoint_refuses_a_certificate(
    tmp_path: Path, show: str | None, why: str
) -> None:
    files = Certificates(tmp_path)
    files.write("expired", days=-1)
    own = None if show is None else tmp_path / f"{show}.pem"

    async def story() -> None:
        listener = await listen_tcp("0.0.0.0", 0)
        tls = ServerTLS(files.server, client_ca=files.ca)
        async with served(tmp_path, listener=listener, tls=tls):
            address = TcpAddress("127.0.0.1", listener.getsockname()[1])
            asking = HttpClient(address, tls=client_context(own, None, files.ca), seconds=60)
            with pytest.raises(Refused, match=rf"do not trust each other: {why}\. .*--certificate"):
                await asyncio.to_thread(asking.status)

    running(story())


def test_a_handshake_that_never_ends_is_cut(tmp_path: Path) -> None:
    async def story() -> None:
        listener = await listen_tcp("0.0.0.0", 0)
        async with served(
            tmp_path, listener=listener, tls=ServerTLS(Certificates(tmp_path).server)
        ) as server:
            client = await server.client()
            client.writer.write(b"\x16\x03\x01\x02")
            await until(lambda: bool(server.endpoint.server.serving))
            pass_seconds(6)
            assert await client.ended()
            assert not server.endpoint.server.serving

    running(story())


def test_plain_http_from_outside_may_only_be_read_and_only_if_that_was_said(tmp_path: Path) -> None:
    async def story() -> None:
        for insecure in (False, True):
            listener = await listen_tcp("0.0.0.0", 0)
            async with served(tmp_path, listener=listener, insecure=insecure) as server:
                server.endpoint.take(document())
                assert await most(server, Host="any") == (2 if insecure else 0)
                assert await most(server, Host="any", Authorization=server.bearer) == (2 if insecure else 0)

    running(story())


def test_a_page_of_another_site_and_a_name_that_was_rebound_get_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            server.endpoint.take(document())
            for headers in ({"Host": "evil.example"}, {"Sec_Fetch_Site": "cross-site"}, {"Origin": "null"}):
                for path, method in (("/status", "GET"), ("/livez", "GET"), ("/act/pause", "POST")):
                    answer = await server.ask(path, method, Authorization=server.bearer, **headers)
                    assert answer.code == 403

    running(story())


def test_a_browser_shows_the_token_as_the_password_that_it_asks_for(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path, guarded=True) as server:
            server.endpoint.take(document())

            async def code(login: str) -> int:
                basic = f"Basic {base64.b64encode(login.encode()).decode()}"
                return (await server.ask("/", Authorization=basic)).code

            asked = await server.ask("/")
            assert (asked.code, asked.headers["www-authenticate"].split()[0]) == (401, "Basic")
            assert await code(f"anybody:{server.bearer[7:]}") == 200
            assert [await code(login) for login in ("anybody:wrong", "anybody:", server.bearer[7:])] == [
                401
            ] * 3
            for broken in ("Basic é", "Basic /w==", "Basic", "Digest x"):
                assert (await server.ask("/", Authorization=broken)).code == 401

    running(story())


def test_a_token_that_is_written_anew_counts_at_once_and_one_that_others_may_read_never(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            former = server.bearer
            server.token_file.write_text("another\n")
            assert (await server.ask("/act/flush", "POST", Authorization=former)).code == 401
            assert (await server.ask("/act/flush", "POST", Authorization="Bearer another")).code == 200
            server.token_file.chmod(0o644)
            assert (await server.ask("/act/flush", "POST", Authorization="Bearer another")).code == 401

    running(story())
    assert "may be read by others" in capfd.readouterr().err
