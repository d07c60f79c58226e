"""How the fake of DynamoDB Streams is reached: over HTTP on loopback, or in memory with the shape of an aioboto3 client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import orjson
from aiohttp import web
from botocore import parsers, session
from botocore.exceptions import ClientError, ConnectionClosedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from mldserver.base.clock import Clock

_TARGET: Final = "DynamoDBStreams_20120810."


class Answer(NamedTuple):
    """What a request is answered with; status 0: the connection breaks instead."""

    status: int
    body: dict[str, Any]
    seconds: float = 0.0
    """How long it takes to come."""


class Answering(Protocol):
    """What requests are put to."""

    clock: Clock

    def answer(self, action: str, request: dict[str, Any]) -> Answer:
        """Answer a request: both are JSON values."""
        ...


def as_json(value: Any) -> str:
    """Return bytes as JSON has them on the wire: for ``orjson.dumps``."""
    return base64.b64encode(value).decode()


@contextlib.asynccontextmanager
async def serving(streams: Answering, port: int = 0) -> AsyncIterator[str]:
    """Answer on loopback while the block runs; yield the ``endpoint_url``. Port 0: a free one."""

    async def handle(request: web.Request) -> web.Response:
        action = request.headers.get("X-Amz-Target", "").removeprefix(_TARGET)
        answer = streams.answer(action, orjson.loads(await request.read()))
        if answer.seconds:
            await streams.clock.sleep(answer.seconds)
        if not answer.status and request.transport is not None:
            request.transport.abort()
        return web.Response(
            status=answer.status or 500,
            body=orjson.dumps(answer.body, default=as_json),
            content_type="application/x-amz-json-1.0",
        )

    application = web.Application()
    application.router.add_post("/", handle)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class MemoryClient:
    """The four actions as aioboto3 has them; botocore's own parser reads the answers, so that types are its."""

    def __init__(self, streams: Answering) -> None:
        """Answer from ``streams``."""
        self._streams = streams
        self._parser = parsers.create_parser("json")
        self._model = session.get_session().get_service_model("dynamodbstreams")

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, dict[str, Any]]]:
        """Return an action by its name in Python."""
        action = name.title().replace("_", "")
        if action not in self._model.operation_names:
            raise AttributeError(name)

        async def call(**request: Any) -> dict[str, Any]:
            return await self._call(action, request)

        return call

    async def _call(self, action: str, request: dict[str, Any]) -> dict[str, Any]:
        answer = self._streams.answer(action, request)
        if answer.seconds:
            await self._streams.clock.sleep(answer.seconds)
        else:
            await asyncio.sleep(0)
        if not answer.status:
            raise ConnectionClosedError(endpoint_url="memory")
        body = orjson.dumps(answer.body, default=as_json)
        response = {"body": body, "headers": {}, "status_code": answer.status}
        parsed: dict[str, Any] = self._parser.parse(
            response, self._model.operation_model(action).output_shape
        )
        if answer.status >= 300:  # noqa: PLR2004  # as in HTTP
            raise ClientError(parsed, action)
        return parsed
