"""What the admin endpoint answers, and what it puts up with: over real sockets, with a clock that is moved by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from mldserver.admin import endpoint as module
from mldserver.admin.access import make_token, read_token
from mldserver.admin.endpoint import Endpoint
from mldserver.admin.status import Status
from mldserver.admin.wire import Answered
from mldserver.base.listening import listen_tcp, listen_unix

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Coroutine
    from pathlib import Path

NOW_MS = 1_800_000_000_000


def document(**changes: Any) -> bytes:
    about = {
        "taken_ms": NOW_MS,
        "pipeline": "departures",
        "handler": "handlers.departures",
        "version": "1",
        "host": "here",
        "pid": 1,
        "server_id": "one",
        "started_ms": NOW_MS,
        "ready": True,
    }
    return msgspec.json.encode(Status(**about | changes))


class Loop(asyncio.SelectorEventLoop):
    """Its time is moved on by hand, too."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


def running(test: Coroutine[Any, Any, None]) -> None:
    async def guarded() -> None:
        async with asyncio.timeout(10_000):
            await test

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(guarded())


def pass_seconds(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    loop.ahead += seconds


class Answer:
    """An answer, as it came over the wire."""

    def __init__(self, head: str, body: bytes) -> None:
        first, *lines = head.strip().split("\r\n")
        self.code = int(first.split()[1])
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """A connection to the endpoint, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> Answer:
        lines = {"Host": "localhost", "Content-Length": str(len(body))} | headers
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
        self.writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        return await self.answer(bodiless=method == "HEAD")

    async def answer(self, *, bodiless: bool = False) -> Answer:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        answer = Answer(head, b"")
        length = int(answer.headers.get("content-length", 0))
        answer.body = b"" if bodiless else await self.reader.readexactly(length)
        return answer

    async def event(self) -> Any:
        """The next document of a stream."""
        await self.reader.readuntil(b"event: status\ndata: ")
        return json.loads(await self.reader.readuntil(b"\n\n"))

    async def ended(self) -> bool:
        """Read on until the endpoint has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(1 << 16):
                pass
        return True


class Served:
    """A running endpoint with its clients."""

    def __init__(self, endpoint: Endpoint, address: str | tuple[str, int], token_file: Path) -> None:
        self.endpoint, self.address, self.token_file = endpoint, address, token_file
        self._clients: list[Client] = []

    async def client(self) -> Client:
        if isinstance(self.address, str):
            reader, writer = await asyncio.open_unix_connection(self.address)
        else:
            reader, writer = await asyncio.open_connection(*self.address)
        client = Client(reader, writer)
        self._clients.append(client)
        return client

    async def ask(self, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> Answer:
        return await (await self.client()).ask(path, method, body, **headers)

    @property
    def bearer(self) -> str:
        return f"Bearer {read_token(self.token_file)}"

    def close(self) -> None:
        for client in self._clients:
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
    one = Served(endpoint, str(path) if unix else listener.getsockname()[:2], token_file)
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
            head = await server.ask("/status", "HEAD")
            assert (head.code, head.body) == (200, b"")

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
                assert (answer.code, answer.headers["www-authenticate"]) == (401, "Bearer")
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
