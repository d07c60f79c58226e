"""What the admin endpoint puts up with: clients that are slow, rude, many, or broken."""

from __future__ import annotations

import asyncio
import gc
import socket
from pathlib import Path
from typing import Any

import pytest
from admin.served import pass_seconds, running, served, until
from support.raw_http import document

from mldserver.admin import endpoint as module
from mldserver.admin.endpoint_messages import Answered


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
