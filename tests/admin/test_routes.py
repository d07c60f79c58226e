"""What the admin endpoint answers, and to whom: over real sockets, with a clock that is moved by hand."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
import ssl
from pathlib import Path
from typing import Any

import pytest
from admin.served import Served, pass_seconds, running, served, until
from support.certificates import Certificates
from support.raw_http import NOW_MS, document

from mldserver.admin import http_listener, metrics, routes
from mldserver.admin.http_client import Client as HttpClient
from mldserver.admin.http_client import Refused
from mldserver.admin.http_listener import Access
from mldserver.base.tls import ServerTLS, client_context
from mldserver.config.kinds import address

pytestmark = pytest.mark.quick

Logged = list[dict[str, Any]]
READS = ("/", "/status", "/events", "/history", "/metrics", "/nowhere")


# Reading


def test_it_shows_the_latest_document(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            early = await server.ask("/status")
            assert (early.code, "no status yet" in early.json["error"]) == (503, True)
            for version in ("1", "2"):
                server.show(version=version)
                answer = await server.ask("/status")
                assert answer.body == document(version=version)
                assert answer.headers["content-type"] == "application/json"
            head = await server.ask("/status", "HEAD")
            assert (head.code, head.headers["content-type"]) == (200, "application/json")

    running(story())


def test_it_is_live_and_ready_when_the_document_says_so(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:

            async def codes() -> list[int]:
                return [(await server.ask(path)).code for path in ("/livez", "/healthz", "/readyz")]

            assert await codes() == [200, 200, 503]
            assert (await server.ask("/readyz")).json["reasons"] == ["the server starts"]
            reasons = ["Spark starts", "no address"]
            server.show(ready=False, reasons=tuple(reasons))
            assert await codes() == [200, 200, 503]
            assert (await server.ask("/readyz")).json == {"ready": False, "reasons": reasons}
            server.show()
            assert await codes() == [200, 200, 200]

    running(story())


def test_events_are_the_documents_as_they_come_the_present_one_first(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            early = await server.reader()
            server.show(version="1")
            assert (await early.event())["version"] == "1"
            late = await server.reader()
            assert (await late.event())["version"] == "1"
            server.show(version="2")
            assert [(await each.event())["version"] for each in (early, late)] == ["2", "2"]

    running(story())


def test_a_stream_ends_after_ten_minutes(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            server.show(version="1")
            reader = await server.reader()
            assert (await reader.event())["version"] == "1"
            pass_seconds(590)
            server.show(version="2")
            assert (await reader.event())["version"] == "2"
            pass_seconds(11)
            assert await reader.reader.readuntil(b"0\r\n\r\n"), "the end of the answer, in order"
            assert await reader.ended()

    running(story())


def test_streams_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_MOST_STREAMS", 1)

    async def story() -> None:
        async with served(tmp_path) as server:
            first = await server.reader()
            assert "readers of events" in (await server.ask("/events")).json["error"]
            first.writer.transport.abort()
            await until(lambda: not server.routes._open_streams)
            await server.reader()

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
                server.show(taken_ms=NOW_MS + second * 1000)
            assert (await server.ask("/history")).json["at_ms"] == [NOW_MS + 10_000]

    running(story())


def test_metrics_are_made_once_of_a_document_in_the_requested_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    exposed = metrics.exposed
    monkeypatch.setattr(metrics, "exposed", lambda status, kind: made.append(kind) or exposed(status, kind))

    async def story() -> None:
        async with served(tmp_path) as server:
            assert (await server.ask("/metrics")).code == 503
            for ready in (True, False):
                server.show(ready=ready)
                for _ in range(3):
                    plain = await server.ask("/metrics")
                    assert plain.headers["content-type"] == metrics.TEXT
                    assert f'mldserver_ready{{function="departures"}} {float(ready)}\n'.encode() in plain.body
                    opened = await server.ask(
                        "/metrics", Accept="application/openmetrics-text; version=1.0.0"
                    )
                    assert opened.headers["content-type"] == metrics.OPENMETRICS
                    assert opened.body.endswith(b"# EOF\n")

    running(story())
    assert made == [metrics.TEXT, metrics.OPENMETRICS] * 2


def test_an_unknown_path_or_method_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            answer = await server.ask("/admin")
            assert (answer.code, "/readyz" in answer.json["error"]) == (404, True)
            answer = await server.ask("/status", "DELETE")
            assert (answer.code, answer.headers["allow"]) == (405, "GET, HEAD")
            answer = await server.ask("/act/pause")
            assert (answer.code, answer.headers["allow"]) == (405, "POST")

    running(story())


def test_a_bug_costs_one_answer_and_is_logged_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    def fail(_status: object, _kind: str) -> bytes:
        raise ValueError("a bug")

    monkeypatch.setattr(metrics, "exposed", fail)

    async def story() -> None:
        async with served(tmp_path) as server:
            server.show()
            for _ in range(3):
                assert (await server.ask("/metrics")).code == 500
            assert (await server.ask("/livez")).code == 200

    running(story())
    (failed,) = [event for event in logged if event["event"] == "admin.failed"]
    assert "ValueError: a bug" in failed["exception"]


# Who may do what


async def most(server: Served, tls: ssl.SSLContext | None = None, **headers: str) -> str:
    """What a client may do there, tried out: nothing, read, or steer."""

    async def code(path: str, method: str = "GET") -> int:
        return (await server.ask(path, method, tls=tls, **headers)).code

    try:
        probes = {await code("/livez"), await code("/readyz")}
    except (OSError, asyncio.IncompleteReadError):  # the handshake failed
        return "nothing"
    reads = {await code(path) for path in READS}
    steers = await code("/act/flush", "POST")
    if steers == 200:
        return "steer"
    assert steers == 403
    if reads == {200, 404}:
        return "read"
    assert probes | reads == {403}
    return "nothing"


def test_over_tcp_steering_is_refused_with_the_way_to_the_socket(tmp_path: Path, logged: Logged) -> None:
    async def story() -> None:
        async with served(tmp_path, steering="unix:/out/admin.sock") as server:
            server.show()
            assert await most(server) == "read"
            answer = await server.ask("/act/pause", "POST", b'{"argument": "s1"}', Authorization="Bearer x")
            assert answer.code == 403
            assert (
                "run `mldserver pause --admin unix:/out/admin.sock` on the server's host"
                in answer.json["error"]
            )
        async with served(tmp_path, steering="") as server:
            answer = await server.ask("/act/pause", "POST")
            assert "admin.steering_unavailable" in answer.json["error"]

    running(story())
    refused = [event for event in logged if event["event"] == "admin.refused"]
    assert [(event["status"], event["path"]) for event in refused][:2] == [
        (404, "/nowhere"),
        (403, "/act/flush"),
    ]
    assert refused[0]["who"].startswith("127.0.0.1 port ")


def test_refused_requests_are_counted_in_the_log_once_a_minute(tmp_path: Path, logged: Logged) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            for _ in range(5):
                await server.ask("/nothing")
            pass_seconds(60)
            await server.ask("/" + "x" * 300)

    running(story())
    refused = [event for event in logged if event["event"] == "admin.refused"]
    assert [event["requests"] for event in refused] == [1, 5]
    assert len(refused[1]["path"]) == 200


@pytest.mark.parametrize(("uid", "may"), [(os.getuid(), "steer"), (0, "steer"), (4_000, "nothing")])
def test_a_unix_socket_is_for_its_user_and_root_whom_the_kernel_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, may: str
) -> None:
    init = http_listener.Connection.__init__

    def connected(self: http_listener.Connection, *arguments: Any) -> None:
        init(self, *arguments)
        assert self.uid == os.getuid()
        assert self.peer == f"user {os.getuid()}, process {os.getpid()}"
        self.uid = uid

    monkeypatch.setattr(http_listener.Connection, "__init__", connected)

    async def story() -> None:
        async with served(tmp_path, Access.STEER) as server:
            server.show()
            assert await most(server, Host="any") == may

    running(story())


def test_an_act_has_its_argument_and_its_client(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path, Access.STEER) as server:
            answer = await server.ask("/act/flush", "POST", b'{"argument": "s1"}')
            assert answer.json == {
                "done": True,
                "text": f"flush of s1 by user {os.getuid()}, process {os.getpid()}",
            }
            assert (await server.ask("/act/fail", "POST")).code == 409

    running(story())


@pytest.mark.parametrize("body", [b"no JSON", b"[]", b'{"argument": 1}', b'{"other": ""}', b"\xff"])
def test_a_malformed_body_is_refused(tmp_path: Path, body: bytes) -> None:
    async def story() -> None:
        async with served(tmp_path, Access.STEER) as server:
            answer = await server.ask("/act/flush", "POST", body)
            assert (answer.code, "must be JSON" in answer.json["error"]) == (400, True)
            answer = await server.ask("/act/flush", "POST", b" " * 5000)
            assert (answer.code, answer.json) == (413, {"error": "A body has 4096 bytes at most."})

    running(story())


def test_an_act_takes_as_long_as_it_takes(tmp_path: Path) -> None:
    async def story() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def steer(act: str, argument: str, function: str, who: str) -> tuple[bool, str]:
            begun.set()
            await go_on.wait()
            return True, "done"

        async with served(tmp_path, Access.STEER, steer=steer) as server:
            act = asyncio.create_task(server.ask("/act/reload", "POST"))
            await begun.wait()
            pass_seconds(900)
            assert (await server.ask("/livez")).code == 200
            go_on.set()
            assert (await act).json == {"done": True, "text": "done"}

    running(story())


def test_a_name_that_was_rebound_to_loopback_reads_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            server.show()
            for name in ("evil.example", "evil.example:80", ""):
                for path in ("/", "/status", "/livez"):
                    assert (await server.ask(path, Host=name)).code == 403
            for name in ("localhost", "127.0.0.1:7071", "[::1]:7071"):
                assert (await server.ask("/status", Host=name)).code == 200
            # A page of another site may send a request; its browser does not let it read the answer.
            answer = await server.ask("/status", Origin="http://evil.example", Sec_Fetch_Site="cross-site")
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
            assert "access-control-allow-origin" not in answer.headers

    running(story())


def test_the_address_for_metrics_serves_them_and_health_to_any_client_and_nothing_else(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with served(tmp_path, Access.METRICS) as server:
            server.show(ready=False, reasons=("a secret",))
            assert b"mldserver_ready" in (await server.ask("/metrics", Host="departures.example:9464")).body
            assert (await server.ask("/healthz")).code == 200
            assert (await server.ask("/readyz")).json == {"ready": False}, "the reasons are not public"
            for path in ("/", "/status", "/events", "/history", "/livez", "/act/pause"):
                assert (await server.ask(path)).code == 404
            assert (await server.ask("/act/pause", "POST")).code == 404
            assert (await server.ask("/metrics", "POST")).code == 405

    running(story())


# Outside loopback


@pytest.mark.parametrize(
    ("ca", "names", "given"),
    [
        # A client without a certificate, one with the right, another, a foreign one.
        (True, (), ("nothing", "read", "read", "nothing")),
        (True, ("clie??",), ("nothing", "read", "nothing", "nothing")),
        (False, (), ("read", "read", "read", "read")),
    ],
)
def test_outside_loopback_the_client_certificate_counts(
    tmp_path: Path, ca: bool, names: tuple[str, ...], given: tuple[str, ...]
) -> None:
    files = Certificates(tmp_path)
    files.write("other")
    tls = ServerTLS(files.server, client_ca=files.ca if ca else None, names=names, required=ca)

    async def story() -> None:
        async with served(tmp_path, host="0.0.0.0", tls=tls) as server:
            server.show()
            shown = (None, *(files.folder / f"{name}.pem" for name in ("client", "other", "stranger")))
            contexts = [client_context(own, None, files.ca) for own in shown]
            found = [await most(server, context, Host="any") for context in contexts]
            assert tuple(found) == given
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
        tls = ServerTLS(files.server, client_ca=files.ca)
        async with served(tmp_path, host="0.0.0.0", tls=tls) as server:
            asking = HttpClient(
                address.parse(server.address), tls=client_context(own, None, files.ca), seconds=60
            )
            with pytest.raises(Refused, match=rf"do not trust each other: {why}\. .*--certificate"):
                await asyncio.to_thread(asking.status)

    running(story())


def test_without_tls_any_client_outside_loopback_reads(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path, host="0.0.0.0") as server:
            server.show()
            assert await most(server, Host="any") == "read"

    running(story())
