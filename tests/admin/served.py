"""A running admin endpoint on real sockets, with its clients, and a loop whose time is moved by hand."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from support.raw_http import Answer, Client, connected

from mldserver.admin.access import make_token, read_token
from mldserver.admin.endpoint import Endpoint
from mldserver.admin.endpoint_messages import Answered
from mldserver.base.listening import listen_tcp, listen_unix


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
