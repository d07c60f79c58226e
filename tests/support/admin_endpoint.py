"""A stand-in for a server's admin endpoint: says what it is given to say, over TCP, TLS or a Unix socket."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any

import msgspec

from mldserver.status_document import (
    Budget,
    DeadLetters,
    KeyedStateSection,
    LetterRow,
    Peer,
    ShardRow,
    Spark,
    Status,
    StoreRow,
    TimersSection,
    Totals,
    WatermarkSection,
    WindowRow,
    Windows,
    WorkerRow,
)

__all__ = ["DOCUMENT", "Endpoint", "endpoint"]

HOUR = 3_600_000
DOCUMENT = Status(
    taken_ms=10 * HOUR,
    pipeline="trips",
    handler="handlers.trips",
    version="1.2.3",
    host="here",
    pid=4711,
    server_id="one",
    started_ms=7 * HOUR - 120_000,
    listening="127.0.0.1:7070",
    ready=True,
    totals=Totals(records=123_456, batches=789, bytes=5 << 20, rows=99_999, rows_durable=88_888, dead_letters=2),
    failures={"ValueError": 2},
    shards=(
        ShardRow(id="shardId-0", state="connected", lag_ms=1_500, position="495:2", records=1_000, rows=900, bytes=1 << 20, worker=0, peer="127.0.0.1:5"),
        ShardRow(id="shardId-1", state="held", lag_ms=90_000, durable_age_seconds=4.24, records=20_000, rows=19_000, bytes=3 << 20, worker=1),
        ShardRow(id="shardId-[red]\x1b[0m", state="missing"),
    ),
    watermark=WatermarkSection(at_ms=9 * HOUR, held_by="shardId-1", server="two", reason="it lags", stuck=True),
    windows=Windows(
        open=3,
        published=7,
        latest=(
            WindowRow(id="1970-01-01T01-00-00Z", state="failed", revision=2, error="KeyError: 'x'\n  at line 3"),
            *(WindowRow(id=f"1970-01-01T0{n}-00-00Z", state="done", rows_in=10, rows_out=5, seconds=1.25) for n in range(2, 8)),
        ),
    ),
    workers=(WorkerRow(number=0, pid=12, shards=2, resident_bytes=200 << 20, restarts=1),),
    spark=Spark(ready=False, trouble="no executor", master="local[2]", version="4.0.1"),
    dead_letters=DeadLetters(waiting=2, latest=(LetterRow(at_ms=HOUR, shard="shardId-1", sequence="496:0", error="ValueError: bad"),)),
    servers=(Peer(id="one", this=True), Peer(id="two", this=False, beat_age_seconds=1.0, watermark_ms=9 * HOUR)),
    state=KeyedStateSection(keys=1_234, files=3, file_bytes=2 << 20, snapshots=2, snapshot_seconds=0.5, stores=(StoreRow(id="shardId-4", keys=1_234, bytes=5 << 20, files=3, serial=41),)),
    timers=TimersSection(pending=4_000, set=5_000, cancelled=600, fired=390, skipped=10, held=1, held_by="shardId-1", held_seconds=90.0),
    budgets={"buffer": Budget(used_bytes=12 << 20, limit_bytes=256 << 20)},
)  # fmt: skip


class Endpoint:
    """What it says, and what it was asked."""

    def __init__(self) -> None:
        self.address = ""
        self.document: Any = DOCUMENT
        self.answers: dict[str, tuple[int, Any]] = {}
        """By path: another status, and a body: bytes, or what becomes JSON."""
        self.asked: list[tuple[str, Any]] = []
        """Path and body."""

    def answer(self, path: str, body: Any) -> tuple[int, bytes]:
        self.asked.append((path, body))
        status, said = self.answers.get(path, (200, self.document))
        return status, said if isinstance(said, bytes) else msgspec.json.encode(said)


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True


@contextmanager
def endpoint(*, path: Path | None = None, tls: ssl.SSLContext | None = None) -> Iterator[Endpoint]:
    """An endpoint on a free port of loopback, or at a Unix socket's path."""
    said = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked = json.loads(body) if body else None
            status, data = said.answer(self.path, asked)
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET  # noqa: N815  # http.server's name

        def address_string(self) -> str:
            return "somebody"

        def log_message(self, *_arguments: object) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler, bind_and_activate=False)
    if path is not None:
        server.socket.close()
        server.socket = socket.socket(socket.AF_UNIX)
        server.socket.bind(str(path))
        said.address = f"unix:{path}"
    else:
        server.server_bind()
        said.address = f"127.0.0.1:{server.server_address[1]}"
    server.server_activate()
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield said
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
