"""What the admin endpoint answers, and what it puts up with: over real sockets, with a clock that is moved by hand."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import hashlib
import os
import re
import socket
from typing import TYPE_CHECKING, Any

import pytest
from support.certificates import Certificates
from support.raw_http import NOW_MS, Answer, Client, connected, document

from mldserver.admin import endpoint as module
from mldserver.admin import metrics
from mldserver.admin.access import make_token, read_token
from mldserver.admin.endpoint import Endpoint
from mldserver.admin.endpoint_messages import Answered
from mldserver.base.listening import listen_tcp, listen_unix
from mldserver.base.tls import ServerTLS, client_context

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path


class Loop(asyncio.SelectorEventLoop):
    """Its time is moved on by hand alone: however slow the machine is, nobody is late."""

    now = 0.0

    def time(self) -> float:
        return self.now


def running(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(test)


def pass_seconds(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    loop.now += seconds


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # sockets have no event for a test to wait on
        await asyncio.sleep(0)


class Served:
    """A running endpoint with its clients."""

    def __init__(self, endpoint: Endpoint, address: str, token_file: Path) -> None:
        self.endpoint, self.address, self.token_file = endpoint, address, token_file
        self.clients: list[Client] = []

    async def client(self, tls: ssl.SSLContext | None = None) -> Client:
        self.clients.append(await connected(self.address, tls))
        return self.clients[-1]

    async def ask(self, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> Answer:
        return await (await self.client()).ask(path, method, body, **headers)

    @property
    def bearer(self) -> str:
        return f"Bearer {read_token(self.token_file)}"

    def close(self) -> None:
        for client in self.clients:
            client.writer.transport.abort()


@contextlib.asynccontextmanager
async def served(
    folder: Path, *, unix: bool = False, listener: socket.socket | None = None, **rules: Any
) -> AsyncIterator[Served]:
    token_file = folder / "admin.token"
    make_token(token_file)
    path = folder / "admin.sock"
    if listener is None:
        listener = listen_unix(path) if unix else await listen_tcp("127.0.0.1", 0)
    asked: list[tuple[str, str, str]] = []

    async def ask(act: str, argument: str, who: str) -> Answered:
        asked.append((act, argument, who))
        return Answered(1, act != "fail", f"{act} of {argument or 'all'} by {who}")

    endpoint = Endpoint(**{"ask": ask, "uid": os.getuid(), "token_file": token_file} | rules)
    one = Served(endpoint, f"unix:{path}" if unix else f"127.0.0.1:{listener.getsockname()[1]}", token_file)
    serving = asyncio.create_task(endpoint.serve(listener))
    try:
        yield one
    finally:
        one.close()
        serving.cancel()
        await asyncio.wait({serving})
        assert serving.cancelled()
        listener.close()


# What it tells


def test_it_shows_the_latest_document_as_it_came(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            early = await server.ask("/status")
            assert (early.code, "no status yet" in early.json["error"]) == (503, True)
            for version in ("1", "2"):
                server.endpoint.take(document(version=version))
                answer = await server.ask("/status")
                assert answer.body == document(version=version)
                assert answer.headers["content-type"] == "application/json"
            server.endpoint.take(b"")
            assert (await server.ask("/status")).body == document(version="2")
            for path in ("/status", "/events"):
                head = await server.ask(path, "HEAD")
                assert (head.code, head.headers["content-type"]) == (200, "application/json")

    running(story())


def test_it_is_live_while_documents_come_and_ready_when_they_say_so(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:

            async def codes() -> tuple[int, int]:
                return (await server.ask("/livez")).code, (await server.ask("/readyz")).code

            assert await codes() == (200, 503)
            server.endpoint.take(document(ready=False, reasons=("Spark starts", "no address")))
            assert await codes() == (200, 503)
            assert (await server.ask("/readyz")).json == {
                "ready": False,
                "reasons": ["Spark starts", "no address"],
            }
            server.endpoint.take(document())
            assert await codes() == (200, 200)
            pass_seconds(6)
            assert await codes() == (503, 503)
            assert "event loop has not turned for 6 s" in (await server.ask("/readyz")).json["reasons"][0]
            assert "event loop has not turned" in (await server.ask("/livez")).json["reason"]
            server.endpoint.take(b"")
            assert await codes() == (200, 200)

    running(story())


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_a_document_that_waits_is_taken_before_the_server_is_said_to_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            server.endpoint.take(document())
            own, others = socket.socketpair()
            own.setblocking(False)
            took = asyncio.Event()

            async def take() -> None:
                await took.wait()
                server.endpoint.take(document())

            taking = asyncio.create_task(take())
            shown = module.Connection.shown

            def starved(*arguments: Any) -> Any:
                """Stand still while a document comes."""
                pass_seconds(6)
                asyncio.get_running_loop().add_reader(own, took.set)
                others.send(b"a document")
                return shown(*arguments)

            with own, others:
                client = await server.client()
                monkeypatch.setattr(module.Connection, "shown", starved)
                assert (await client.ask(path)).code == 200
                asyncio.get_running_loop().remove_reader(own)
            await taking

    running(story())


def test_events_are_the_documents_as_they_come_the_present_one_first(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            early, late = await server.client(), await server.client()
            early.writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await early.answer()).headers["content-type"] == "text/event-stream"
            server.endpoint.take(document(version="1"))
            assert (await early.event())["version"] == "1"
            late.writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await late.event())["version"] == "1"
            server.endpoint.take(document(version="2"))
            assert [(await each.event())["version"] for each in (early, late)] == ["2", "2"]

    running(story())


def test_the_page_may_run_what_stands_in_it_and_nothing_else(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            answer = await server.ask("/", Sec_Fetch_Site="cross-site")
            assert (answer.code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
            scripts = re.findall(rb"<script>(.*?)</script>", answer.body, re.DOTALL)
            hashes = [base64.b64encode(hashlib.sha256(each).digest()).decode() for each in scripts]
            policy = answer.headers["content-security-policy"]
            assert len(hashes) == answer.body.count(b"<script") == 1
            assert f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-" in policy
            assert "unsafe" not in policy

    running(story())


def test_the_last_hour_is_made_of_the_documents(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            for second in range(12):
                server.endpoint.take(document(taken_ms=NOW_MS + second * 1000))
            assert (await server.ask("/history")).json["at_ms"] == [NOW_MS + 10_000]

    running(story())


def test_metrics_are_made_once_of_a_document_in_the_format_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    exposed = metrics.exposed
    monkeypatch.setattr(metrics, "exposed", lambda status, kind: made.append(kind) or exposed(status, kind))

    async def story() -> None:
        async with served(tmp_path) as server:
            assert (await server.ask("/metrics")).code == 503
            for ready in (True, False):
                server.endpoint.take(document(ready=ready))
                for _ in range(3):
                    plain = await server.ask("/metrics")
                    assert plain.headers["content-type"] == metrics.TEXT
                    assert f"mldserver_ready {float(ready)}\n".encode() in plain.body
                    opened = await server.ask(
                        "/metrics", Accept="application/openmetrics-text; version=1.0.0"
                    )
                    assert opened.headers["content-type"] == metrics.OPENMETRICS
                    assert opened.body.endswith(b"# EOF\n")

    running(story())
    assert made == [metrics.TEXT, metrics.OPENMETRICS] * 2


def test_what_is_not_there_is_told_with_what_is(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            answer = await server.ask("/admin")
            assert (answer.code, "/readyz" in answer.json["error"]) == (404, True)
            answer = await server.ask("/status", "DELETE")
            assert (answer.code, answer.headers["allow"]) == (405, "GET, HEAD")
            answer = await server.ask("/act/pause", Authorization=server.bearer)
            assert (answer.code, answer.headers["allow"]) == (405, "POST")

    running(story())


# Who may


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


# What it puts up with


@pytest.mark.parametrize("body", [b"no JSON", b"[]", b'{"argument": 1}', b'{"other": ""}', b"\xff"])
def test_a_body_that_is_none_is_refused(tmp_path: Path, body: bytes) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            answer = await server.ask("/act/flush", "POST", body, Authorization=server.bearer)
            assert (answer.code, "must be JSON" in answer.json["error"]) == (400, True)

    running(story())


def test_who_sends_nothing_or_a_byte_now_and_then_is_cut(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            silent, slow, idle = await server.client(), await server.client(), await server.client()
            assert (await idle.ask("/livez")).code == 200
            slow.writer.write(b"G")
            pass_seconds(4)
            slow.writer.write(b"E")
            assert (await idle.ask("/livez")).code == 200
            pass_seconds(2)
            assert await silent.ended()
            assert await slow.ended()
            assert (await idle.ask("/livez")).code == 503
            pass_seconds(31)
            assert await idle.ended()

    running(story())


def test_of_too_many_connections_the_oldest_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_CONNECTIONS", 3)

    async def story() -> None:
        async with served(tmp_path) as server:
            clients = [await server.client() for _ in range(3)]
            for client in clients:
                assert (await client.ask("/livez")).code == 200
            assert (await server.ask("/livez")).code == 200
            assert await clients[0].ended()
            assert (await clients[1].ask("/livez")).code == 200

    running(story())


def test_who_has_asked_nothing_yet_gives_way_before_who_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_CONNECTIONS", 3)

    async def story() -> None:
        async with served(tmp_path) as server:
            probe = await server.client()
            assert (await probe.ask("/livez")).code == 200
            flood = [await server.client() for _ in range(8)]
            for client in flood[:6]:
                assert await client.ended()
            for client in (probe, *flood[6:]):
                assert (await client.ask("/livez")).code == 200

    running(story())


def test_garbage_is_answered_with_an_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            for garbage in (
                b"\x16\x03\x01\x02\x00",
                b"GARBAGE\r\n\r\n",
                b"GET / HTTP/9.9\r\n\r\n",
                b"\0" * 70_000,
            ):
                client = await server.client()
                client.writer.write(garbage + b"\r\n\r\n")
                assert await client.ended()
            assert (await server.ask("/livez")).code == 200

    running(story())
    assert capfd.readouterr() == ("", "")


def test_what_is_too_long_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            assert (await server.ask("/livez", X="a" * 4000)).code == 200
            assert (await server.ask("/livez", X="a" * 4000, Y="a" * 4200)).code == 431
            assert (await server.ask("/livez", X="a" * 9000)).code == 400
            right = {"Authorization": server.bearer}
            assert (await server.ask("/act/flush", "POST", b" " * 5000, **right)).code == 413

    running(story())


def test_who_does_not_read_events_is_cut_and_others_go_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            stuck, reader = await server.client(), await server.client()
            stuck.writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            for client in (stuck, reader):
                client.writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await client.answer()
            stuck.reader._transport.pause_reading()  # type: ignore[attr-defined]  # nobody reads any more
            for number in range(4):
                server.endpoint.take(document(version=f"{number}-{'x' * 4_000_000}"))
                assert (await reader.event())["version"].startswith(str(number))
            assert len(server.endpoint.server.serving) == 2
            pass_seconds(11)
            await until(lambda: len(server.endpoint.server.serving) == 1)
            server.endpoint.take(document(version="last"))
            assert (await reader.event())["version"] == "last"

    running(story())


def test_a_stream_ends_after_ten_minutes(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            server.endpoint.take(document(version="1"))
            reader = await server.client()
            reader.writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.answer()
            assert (await reader.event())["version"] == "1"
            pass_seconds(590)
            server.endpoint.take(document(version="2"))
            assert (await reader.event())["version"] == "2"
            pass_seconds(11)
            assert await reader.reader.readuntil(b"0\r\n\r\n"), "the end of the answer, in order"
            assert server.endpoint._streams == 0

    running(story())


def test_who_asks_for_much_and_reads_nothing_is_cut(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            server.endpoint.take(document(version="x" * 1_000_000))
            client = await server.client()
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]  # as above
            client.writer.write(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
            await until(lambda: server.endpoint.server.requests_count > 0)
            assert (await server.ask("/livez")).code == 200
            pass_seconds(31)
            await until(lambda: not server.endpoint.server.serving)
            assert server.endpoint.server.requests_count < 50

    running(story())


def test_thousands_of_requests_leave_nothing_behind(tmp_path: Path, long: bool) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:

            async def ask(times: int) -> int:
                for number in range(times):
                    if number % 20 == 0:
                        server.endpoint.take(document(version=str(number % 7)))
                        client = await server.client()
                    path = ("/", "/livez", "/status", "/metrics", "/history", "/none", "/act/x")[number % 7]
                    assert (await client.ask(path)).code in {200, 401, 404}
                    if number % 20 == 19:
                        client.writer.transport.abort()
                server.close()
                server.clients.clear()
                await until(lambda: not server.endpoint.server.serving)
                gc.collect()
                return len(gc.get_objects())

            before, tasks = await ask(400), len(asyncio.all_tasks())
            after = await ask(10_000 if long else 1_000)
            assert after - before < 200
            assert len(asyncio.all_tasks()) == tasks

    running(story())


def test_streams_and_acts_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_STREAMS", 1)
    monkeypatch.setattr(module, "_MOST_ACTS", 1)

    async def story() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def ask(act: str, argument: str, who: str) -> Answered:
            begun.set()
            await go_on.wait()
            return Answered(1, True, "done")

        async with served(tmp_path, ask=ask) as server:
            right = {"Authorization": server.bearer}
            stream = await server.client()
            stream.writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await stream.answer()
            assert "readers of events" in (await server.ask("/events")).json["error"]
            act = asyncio.create_task(server.ask("/act/reload", "POST", **right))
            await begun.wait()
            assert "not done yet" in (await server.ask("/act/reload", "POST", **right)).json["error"]
            pass_seconds(300)  # an act takes as long as it takes
            assert (await server.ask("/livez")).code == 503
            go_on.set()
            assert (await act).json == {"done": True, "text": "done"}
            assert (await server.ask("/act/reload", "POST", **right)).code == 200
            stream.writer.transport.abort()
            await until(lambda: not server.endpoint._streams)
            again = await server.client()
            again.writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await again.answer()).code == 200

    running(story())


def test_a_bug_costs_one_answer_and_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        async def ask(act: str, argument: str, who: str) -> Answered:
            raise ValueError("a bug")

        async with served(tmp_path, ask=ask) as server:
            client = await server.client()
            assert (await client.ask("/act/flush", "POST", Authorization=server.bearer)).code == 500
            assert (await client.ask("/livez")).code == 200

    running(story())
    assert "ValueError: a bug" in capfd.readouterr().err


def test_no_descriptor_to_accept_with_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def story() -> None:
        accept = asyncio.SelectorEventLoop.sock_accept
        failures = [OSError(24, "Too many open files")]

        async def failing(self: Any, listener: socket.socket) -> Any:
            if failures:
                raise failures.pop()
            return await accept(self, listener)

        monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", failing)
        async with served(tmp_path) as server:
            asking = asyncio.create_task(server.ask("/livez"))
            await until(lambda: not failures)
            pass_seconds(2)
            assert (await asking).code == 200

    running(story())
    assert "cannot be accepted" in capfd.readouterr().err
