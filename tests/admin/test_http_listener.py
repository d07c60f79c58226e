"""The bounds of the admin endpoint: clients that are slow, hostile, many, or broken."""

from __future__ import annotations

import asyncio
import gc
import socket
import zlib
from pathlib import Path
from typing import Any

import pytest
from admin.served import pass_seconds, running, served, until
from support.certificates import Certificates

from mldserver.admin import http_listener as module
from mldserver.base.tls import ServerTLS

pytestmark = pytest.mark.quick

Logged = list[dict[str, Any]]
GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_a_client_that_sends_nothing_or_a_byte_now_and_then_is_disconnected(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            silent, slow = await server.client(), await server.client()
            slow.writer.write(b"G")
            await until(lambda: len(server.server.connections) == 2)
            pass_seconds(4)
            slow.writer.write(b"E")
            assert (await server.ask("/livez")).code == 200
            pass_seconds(2)
            assert await silent.ended()
            assert await slow.ended()

    running(story())


def test_a_body_that_never_ends_costs_its_connection(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path, module.Access.STEER) as server:
            client = await server.client()
            client.writer.write(b"POST /act/flush HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            await until(lambda: server.server.requests_count == 1)
            (connection,) = server.server.connections
            assert isinstance(connection, module.Connection)
            await until(lambda: connection.deadline.when() == module.ANSWER_SECONDS)
            pass_seconds(31)
            assert await client.ended()

    running(story())


def test_a_handshake_that_never_ends_is_cut(tmp_path: Path) -> None:
    async def story() -> None:
        tls = ServerTLS(Certificates(tmp_path).server)
        async with served(tmp_path, host="0.0.0.0", tls=tls) as server:
            client = await server.client()
            client.writer.write(b"\x16\x03\x01\x02")
            for _ in range(100):
                await asyncio.sleep(0)
            pass_seconds(6)
            assert await client.ended()

    running(story())


def test_beyond_so_many_connections_clients_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 3)

    async def story() -> None:
        async with served(tmp_path) as server:
            idle = [await server.client() for _ in range(3)]
            await until(lambda: len(server.server.connections) == 3)
            waiting = asyncio.create_task(server.ask("/livez"))
            for _ in range(100):
                await asyncio.sleep(0)
            assert not waiting.done()
            idle[0].writer.transport.abort()
            assert (await waiting).code == 200

    running(story())


def test_of_many_connections_so_many_are_accepted_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PER_SECOND", 4)

    async def story() -> None:
        async with served(tmp_path) as server:
            for _ in range(4):
                assert (await server.ask("/livez")).code == 200
            more = [asyncio.create_task(server.ask("/livez")) for _ in range(3)]
            for answered in range(3):
                for _ in range(100):
                    await asyncio.sleep(0)
                assert sum(each.done() for each in more) == answered
                pass_seconds(0.25)
                await until(lambda: sum(each.done() for each in more) == answered + 1)  # noqa: B023  # called at once

    running(story())


def test_a_connection_carries_one_request(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            client = await server.client()
            client.writer.write(GET * 100)
            answer = await client.answer()
            assert (answer.code, answer.headers["connection"]) == (200, "close")
            assert await client.ended()
            assert server.server.requests_count == 1

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


def test_a_request_has_so_many_bytes(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            assert (await server.ask("/livez", X="a" * 4000, Y="a" * 4000)).code == 200
            assert (await server.ask("/livez", X="a" * 9000)).code == 400
            client = await server.client()
            client.writer.write(
                GET[:-2] + b"X: " + b"a" * 4000 + (b"\r\nY: " + b"a" * 4000) * 4 + b"\r\n\r\n"
            )
            assert await client.ended()
            assert server.server.requests_count == 2, "it is disconnected before anything is parsed"

    running(story())


def test_a_compressed_body_is_not_decompressed(tmp_path: Path) -> None:
    """A request of 16 KiB would become 16 MiB."""

    async def story() -> None:
        async with served(tmp_path, module.Access.STEER) as server:
            body = zlib.compress(b'{"argument": "s1"}')
            answer = await server.ask("/act/flush", "POST", body, Content_Encoding="deflate")
            assert (answer.code, "must be JSON" in answer.json["error"]) == (400, True)

    running(story())


def test_a_reader_of_events_that_reads_nothing_is_disconnected_and_others_go_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            stuck, reader = await server.reader(), await server.reader()
            stuck.writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            stuck.reader._transport.pause_reading()  # type: ignore[attr-defined]  # nobody reads any more
            for number in range(4):
                server.show(version=f"{number}-{'x' * 4_000_000}")
                assert (await reader.event())["version"].startswith(str(number))
            assert len(server.server.connections) == 2
            pass_seconds(11)
            await until(lambda: len(server.server.connections) == 1)
            server.show(version="last")
            assert (await reader.event())["version"] == "last"

    running(story())


def test_a_client_that_reads_nothing_of_a_long_answer_is_disconnected(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as server:
            server.show(version="x" * 8_000_000)
            client = await server.client()
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]  # as above
            client.writer.write(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: server.server.requests_count > 0)
            assert (await server.ask("/livez")).code == 200
            pass_seconds(31)
            await until(lambda: not server.server.connections)

    running(story())


def test_thousands_of_requests_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    monkeypatch.setattr(module, "_PER_SECOND", 1e9)

    async def story() -> None:
        async with served(tmp_path) as server:

            async def ask(times: int) -> int:
                for number in range(times):
                    if number % 20 == 0:
                        server.show(version=str(number % 7))
                    path = ("/", "/livez", "/status", "/metrics", "/history", "/none", "/act/x")[number % 7]
                    assert (await server.ask(path)).code in {200, 404, 405}
                    server.close()
                await until(lambda: not server.server.connections)
                gc.collect()
                return len(gc.get_objects())

            before, tasks = await ask(400), len(asyncio.all_tasks())
            after = await ask(10_000 if long else 1_000)
            assert after - before < 200
            assert len(asyncio.all_tasks()) == tasks

    running(story())


def test_without_a_descriptor_to_accept_with_it_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Logged
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
    assert [event["event"] for event in logged] == ["admin.refused"]
    assert "cannot be accepted: [Errno 24] Too many open files" in logged[0]["what"]


def test_a_bug_in_one_connection_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    connect = asyncio.SelectorEventLoop.connect_accepted_socket
    bugs = [ValueError("a bug")]

    async def failing(self: Any, *arguments: Any, **options: Any) -> Any:
        if bugs:
            raise bugs.pop()
        return await connect(self, *arguments, **options)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "connect_accepted_socket", failing)

    async def story() -> None:
        async with served(tmp_path) as server:
            assert await (await server.client()).ended()
            assert (await server.ask("/livez")).code == 200

    running(story())
    assert [event["event"] for event in logged] == ["admin.failed"]
