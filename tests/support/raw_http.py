"""HTTP byte by byte, for clients that are slow, rude or foreign; and a small status document."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from typing import Any

import msgspec

from mldserver.status_document import Status

NOW_MS = 1_800_000_000_000
_LIMIT = 1 << 26


def status(**changes: Any) -> Status:
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
    return Status(**about | changes)


def document(**changes: Any) -> bytes:
    return msgspec.json.encode(status(**changes))


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


async def connected(address: str, tls: ssl.SSLContext | None = None) -> Client:
    """A client of ``host:port`` or ``unix:PATH``."""
    if address.startswith("unix:"):
        return Client(*await asyncio.open_unix_connection(address.removeprefix("unix:"), limit=_LIMIT))
    host, _, port = address.rpartition(":")
    return Client(*await asyncio.open_connection(host, int(port), ssl=tls, limit=_LIMIT))


async def asked(
    address: str,
    path: str,
    method: str = "GET",
    body: bytes = b"",
    tls: ssl.SSLContext | None = None,
    **headers: str,
) -> Answer:
    """What a client is answered that asks once and goes."""
    client = await connected(address, tls)
    try:
        return await client.ask(path, method, body, **headers)
    finally:
        client.writer.transport.abort()
