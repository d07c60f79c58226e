"""A small, correct, independent server for the fake daemon to talk to."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

ENDINGS = ("leaseLost", "shardEnded", "shutdown")


@dataclass
class TinyServer:
    """Takes every batch, checkpoints null at the end of each and at a shard's end, closes after the ending."""

    address: str = ""
    received: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    seen: list[tuple[str, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    greedy: bool = True
    close_after_ending: bool = True
    stay_open: asyncio.Event | None = None
    """Keeps connections open beyond the peer's EOF until it is set."""
    answer: Callable[[str, dict[str, Any]], bytes | None] | None = None
    """May answer in place of the server: (shard, message) to raw bytes, or None for the normal answer."""
    before_answer: Callable[[str, dict[str, Any]], None] | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await self._serve(reader, writer)
        if self.stay_open:
            await self.stay_open.wait()
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        shard = ""
        while line := await reader.readline():
            message = json.loads(line)
            action = message["action"]
            if action == "initialize":
                shard = message["shardId"]
                v1 = "sequenceNumber" not in message
            self.seen.append((shard, action))
            if self.before_answer:
                self.before_answer(shard, message)
            if action == "processRecords":
                rows = self.received.setdefault(shard, [])
                rows += [(r["sequenceNumber"], r.get("subSequenceNumber") or 0) for r in message["records"]]
            if self.answer and (raw := self.answer(shard, message)) is not None:
                writer.write(raw)
                continue
            wants = (action == "processRecords" and message["records"] and self.greedy) or action in {
                "shardEnded",
                "shutdownRequested",
            }
            if wants or (action == "shutdown" and message["reason"] == "TERMINATE"):
                await self._checkpoint(reader, writer, v1=v1)
            writer.write(json.dumps({"action": "status", "responseFor": action}).encode() + b"\n")
            if action in ENDINGS and self.close_after_ending:
                return

    async def _checkpoint(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, v1: bool
    ) -> None:
        ask = {"action": "checkpoint", "checkpoint": None} if v1 else None
        ask = ask or {"action": "checkpoint", "sequenceNumber": None, "subSequenceNumber": None}
        while True:
            writer.write(json.dumps(ask).encode() + b"\n")
            if not (line := await reader.readline()):
                raise ConnectionResetError
            reply = json.loads(line)
            if reply["error"]:
                self.errors.append(reply["error"])
            if reply["error"] != "ThrottlingException":
                return


@pytest.fixture
async def tiny_server() -> AsyncIterator[TinyServer]:
    server = TinyServer()
    async with _listening(server):
        yield server


@asynccontextmanager
async def _listening(server: TinyServer) -> AsyncIterator[None]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, limit=1 << 26)
    host, port = listener.sockets[0].getsockname()
    server.address = f"{host}:{port}"
    try:
        yield
    finally:
        listener.close()
        await listener.wait_closed()
