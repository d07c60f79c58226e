"""A server in a process of its own, as users start it: what it imports, what memory it keeps, and what is left of its workers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import has_ended
from support.serving import until
from workers.kit import children, delivery

from mldserver.testing import FakeMLD, FakeStream

RECORDS = 40
WHO_IMPORTS = """
import os
with open("imported", "a") as file:
    file.write(f"{os.getpid()}\\n")

def process_record(record):
    with open("called", "a") as file:
        file.write(f"{os.getpid()}\\n")
"""
BLOCKED = {
    "in a thread": """
def process_record(record):
    note()
    time.sleep(3600)
""",
    "on the event loop, where the kernel does not tell of the server's end": """
async def process_record(record):
    ctypes.CDLL(None).prctl(1, 0)
    note()
    time.sleep(3600)
""",
    "in C code that lets no other thread run": """
def process_record(record):
    note()
    ctypes.PyDLL(None).sleep(3600)
""",
}
BLOCKS = """
import ctypes, os, time

def note():
    os.close(os.open(f"called.{os.getpid()}", os.O_CREAT))
"""

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Serving:
    """A server's process, and what it logged."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.process = process
        self._folder = folder

    def printed(self) -> str:
        return (self._folder / "printed").read_text()

    def called(self) -> set[int]:
        """Return which processes have noted that they were called, in a file each."""
        return {int(path.suffix[1:]) for path in self._folder.glob("called.*")}

    def faults(self) -> int:
        """Return how many pages it has touched for the first time (proc(5))."""
        after_name = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2]
        return int(after_name.split()[7])

    def named(self, name: str) -> list[dict[str, Any]]:
        log = self._folder / "log"
        # What is after the last end of a line may still be written.
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]


@contextlib.asynccontextmanager
async def serving(folder: Path, text: str, *, workers: str) -> AsyncIterator[Serving]:
    """Serve a handler without rows, which needs no Spark."""
    (folder / "mine.py").write_text(text)
    settings = ["--listen", "127.0.0.1:0", "--out", "out", "--workers", workers, "--log-file", "log"]
    with (folder / "printed").open("wb") as printed:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mldserver", "serve", "mine", *settings),
            cwd=folder,
            stdout=printed,
            stderr=printed,
        )
    try:
        async with asyncio.timeout(800):
            yield Serving(process, folder)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def daemon_of(server: Serving, *, shards: int) -> FakeMLD:
    await until(lambda: bool(server.named("server.listening")) or server.process.returncode is not None)
    assert server.process.returncode is None, server.printed()
    stream = FakeStream(shards, seed=1)
    for number in range(RECORDS):
        stream.put(b"{}", f"key-{number}")
    stream.end()
    return FakeMLD(stream, server.named("server.listening")[0]["address"])


@pytest.mark.parametrize(
    ("workers", "in_the_server"), [("2", False), ("inline", True)], ids=["workers", "inline"]
)
async def test_the_handler_is_imported_in_the_server_only_where_there_are_no_workers(
    tmp_path: Path, workers: str, in_the_server: bool
) -> None:
    async with serving(tmp_path, WHO_IMPORTS, workers=workers) as server:
        daemon = await daemon_of(server, shards=2)
        await daemon.run()
        assert daemon.finished
        server.process.terminate()
        assert await server.process.wait() == 0
    imported, called = (set((tmp_path / name).read_text().split()) for name in ("imported", "called"))
    assert called <= imported
    assert (str(server.process.pid) in imported) is in_the_server


@pytest.mark.parametrize("blocked", BLOCKED)
async def test_workers_end_when_their_server_is_killed_whatever_they_are_doing(
    tmp_path: Path, blocked: str
) -> None:
    async with serving(tmp_path, BLOCKS + BLOCKED[blocked], workers="2") as server:
        daemon = await daemon_of(server, shards=1)
        playing = asyncio.create_task(daemon.run())
        # One is blocked, one has nothing to do, and one is on standby.
        await until(lambda: len(children(server.process.pid)) == 3 and bool(server.called()))
        workers = children(server.process.pid)
        assert server.called() < workers
        server.process.kill()
        async with asyncio.timeout(800):
            await until(lambda: all(map(has_ended, workers)))
        playing.cancel()
        await asyncio.wait({playing})


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="it is about glibc")
async def test_the_memory_that_a_line_took_is_there_for_the_next_though_that_is_longer(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "def process_record(record): ...", workers="1") as server:
        await until(lambda: bool(server.named("server.listening")) or server.process.returncode is not None)
        host, port = server.named("server.listening")[0]["address"].rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, port)

        async def exchange(line: bytes) -> None:
            writer.write(line + b"\n")
            while (said := json.loads(await reader.readline())).pop("action") == "checkpoint":
                writer.write(json.dumps({"action": "checkpoint", "error": None, **said}).encode() + b"\n")

        await exchange(
            b'{"action":"initialize","shardId":"s","sequenceNumber":"TRIM_HORIZON","subSequenceNumber":0}'
        )
        lines = [
            delivery("s", *["x" * 1000] * (200 * 5**number // 4**number)).payload.line for number in range(12)
        ]
        # What the server touches once, for its status and its first batch, is no part of this.
        await until(lambda: bool(server.named("server.ready")) or server.process.returncode is not None)
        await exchange(delivery("s", "warm").payload.line)
        before = server.faults()
        for line in lines:
            await exchange(line)
        touched = server.faults() - before
        writer.close()
        # The server also copies each line into memory that it shares with the worker, which is touched once for the longest.
        shared = len(lines[-1]) / PAGE_BYTES
    pages = sum(map(len, lines)) / PAGE_BYTES
    assert touched - shared < pages * 2 / 3, (
        "touched for the first time: of each line all, if it was given back"
    )
