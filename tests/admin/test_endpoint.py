"""What the admin endpoint answers: over real sockets, with a clock that is moved by hand."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from admin.served import pass_seconds, running, served
from support.raw_http import NOW_MS, document

from mldserver.admin import endpoint as module
from mldserver.admin import metrics


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
