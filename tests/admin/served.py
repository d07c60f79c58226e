"""The admin endpoint's routes on a real socket, with its clients, and a loop whose time is moved by hand."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from aiohttp import web
from support.raw_http import Answer, Client, connected, status

from mldserver.admin.http_listener import Access, HttpListener
from mldserver.admin.routes import Routes
from mldserver.admin.status_feed import StatusFeed
from mldserver.base.listening import listen_tcp, listen_unix
from mldserver.base.tls import ServerTLS


class Loop(asyncio.SelectorEventLoop):
    """A loop whose time is moved by hand alone, so that a slow machine misses no deadline."""

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
    """A listener that is served, with its clients."""

    def __init__(self, feed: StatusFeed, routes: Routes, server: web.Server, address: str) -> None:
        self.feed, self.routes, self.server, self.address = feed, routes, server, address
        self.clients: list[Client] = []

    def show(self, **changes: Any) -> None:
        self.feed.show(status(**changes))

    async def client(self, tls: ssl.SSLContext | None = None) -> Client:
        self.clients.append(await connected(self.address, tls))
        return self.clients[-1]

    async def ask(
        self,
        path: str,
        method: str = "GET",
        body: bytes = b"",
        tls: ssl.SSLContext | None = None,
        **headers: str,
    ) -> Answer:
        return await (await self.client(tls)).ask(path, method, body, **headers)

    async def reader(self) -> Client:
        """A client that has begun to read events."""
        client = await self.client()
        client.writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await client.answer()).headers["content-type"] == "text/event-stream"
        return client

    def close(self) -> None:
        for client in self.clients:
            client.writer.transport.abort()
        self.clients.clear()


async def _steer(act: str, argument: str, function: str, who: str) -> tuple[bool, str]:
    return act != "fail", f"{act} of {argument or 'all'}{function and f' of {function}'} by {who}"


@contextlib.asynccontextmanager
async def served(
    folder: Path,
    access: Access = Access.READ,
    *,
    host: str = "127.0.0.1",
    tls: ServerTLS | None = None,
    steer: Callable[[str, str, str, str], Awaitable[tuple[bool, str]]] = _steer,
    steering: str = "unix:/there",
) -> AsyncIterator[Served]:
    path = folder / "admin.sock"
    unix = access is Access.STEER
    sock = listen_unix(path) if unix else await listen_tcp(host, 0)
    listener = HttpListener(sock, access, tls)
    feed = StatusFeed(lambda _: None, str)
    routes = Routes(feed, steer, lambda: steering)
    runner = web.AppRunner(routes.application(), handler_cancellation=True)
    await runner.setup()
    assert runner.server is not None
    address = f"unix:{path}" if unix else f"127.0.0.1:{sock.getsockname()[1]}"
    one = Served(feed, routes, runner.server, address)
    serving = asyncio.create_task(listener.run(runner.server))
    try:
        yield one
    finally:
        one.close()
        serving.cancel()
        await asyncio.wait({serving})
        assert serving.cancelled()
        await runner.cleanup()
        sock.close()
