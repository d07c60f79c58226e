"""A child that does everything right, in forty lines; tests spoil one thing each. And a command's child for pipes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any


class Child:
    """Checkpoints each batch, retries what passes, and refuses what it does not know."""

    retries = 5

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.v1 = self.gone = False

    async def run(self) -> None:
        while (raw := await self.reader.readline()).endswith(b"\n"):
            if not raw.strip():
                continue
            message = json.loads(raw)
            await self.request(message["action"], message)
            if message["action"] in {"leaseLost", "shardEnded"} or message.get("reason") in {
                "ZOMBIE",
                "TERMINATE",
            }:
                return

    async def request(self, action: str, message: dict[str, Any]) -> None:
        if action == "initialize":
            self.v1 = "sequenceNumber" not in message
        if action == "processRecords" and message["records"]:
            last = message["records"][-1]
            await self.checkpoint(last["sequenceNumber"], last.get("subSequenceNumber"))
        if action == "shutdownRequested":
            await self.checkpoint(None, None)
        if action == "shardEnded" or message.get("reason") == "TERMINATE":
            await self.end()
        await self.answer(action)

    async def end(self) -> None:
        while not await self.checkpoint(None, None):
            pass

    async def answer(self, action: str) -> None:
        await self.say({"action": "status", "responseFor": action})

    async def checkpoint(self, number: str | None, sub: int | None) -> bool:
        for attempt in range(self.retries):
            if self.gone:
                return True
            error = await self.ask(number, sub)
            self.gone = error == "ShutdownException"
            if error is None or self.gone:
                return True
            await self.pause(attempt)
        return False

    async def ask(self, number: str | None, sub: int | None) -> str | None:
        keys = {"checkpoint": number} if self.v1 else {"sequenceNumber": number, "subSequenceNumber": sub}
        await self.say({"action": "checkpoint", **keys})
        raw = b"\n"
        while raw == b"\n":
            raw = await self.reader.readline()
        error = json.loads(raw)["error"]
        if error is not None and not isinstance(error, str):
            raise TypeError(error)
        return error

    async def pause(self, attempt: int) -> None:
        await asyncio.sleep(0.02 * 2**attempt)

    async def say(self, message: object) -> None:
        await self.write(json.dumps(message).encode() + b"\n")

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


@contextlib.asynccontextmanager
async def listening(kind: type[Child], path: Path) -> AsyncIterator[str]:
    """Serve children of this kind at a Unix socket; yield the address."""

    serving: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            await kind(reader, writer).run()
        except (Exception, asyncio.CancelledError):  # noqa: BLE001  # what a child does not take ends it, and the test all
            pass
        finally:
            writer.close()
            serving.discard(task)

    async with await asyncio.start_unix_server(serve, path, limit=1 << 27):
        yield f"unix:{path}"
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
