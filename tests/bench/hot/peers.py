"""What is measured: processes that are sent the same lines over a Unix socket or over pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.hot.lines import answer_to, initialize
from bench.hot.whole_server import BUSY

__all__ = ["Connection", "Peer", "echo", "kclpy", "mldserver", "prober", "relay"]

TESTS: Final = Path(__file__).parents[2]
_START_SECONDS: Final = 60.0
_LINE_LIMIT: Final = 1 << 20


@dataclass(slots=True)
class Connection:
    """One shard's lines."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def exchange(self, line: bytes) -> None:
        """Send a line, answer what is asked meanwhile, and return when the action is over."""
        self.writer.write(line)
        await self.writer.drain()
        while True:
            said = await self.reader.readline()
            if not said:
                raise ConnectionResetError("the peer has closed the connection")
            # amazon_kclpy writes an empty line before each of its own.
            if said.strip():
                answer = answer_to(said)
                if answer is None:
                    return
                self.writer.write(answer)


class Peer:
    """Processes and how to connect to them."""

    def __init__(self, name: str, processes: list[int]) -> None:
        """``processes``: their ids, of which the first is the parent of the others."""
        self.name = name
        self.processes = processes

    async def connect(self, shard_id: str) -> Connection:
        """Return a new connection whose shard is initialised."""
        raise NotImplementedError

    def children(self) -> list[int]:
        """Return every process of it that lives now, in the order of their ids."""
        found = list(self.processes)
        for parent in found:
            found += [child for child in _children(parent) if child not in found]
        return found

    def cpu_ns(self) -> int:
        """Return the CPU time of all its processes and threads so far."""
        return sum(map(process_cpu_ns, self.children()))

    def parent_cpu_ns(self) -> int:
        """Return the CPU time of the process that has the connections."""
        return process_cpu_ns(self.processes[0])

    def resident_bytes(self) -> int:
        """Return the memory of all its processes; what they share is shared out (proportional set size)."""
        return sum(_proportional_bytes(process) for process in self.children())

    def parent_bytes(self) -> int:
        """Return the resident memory of the process that has the connections."""
        return resident(self.processes[0])

    def peak_bytes(self) -> int:
        """Return the most that the process with the connections ever held."""
        return _status_bytes(self.processes[0], "VmHWM")

    def own_peak_bytes(self) -> int:
        """Return what it held then that another process of its kind would hold once more: all but files' pages."""
        return self.peak_bytes() - _status_bytes(self.processes[0], "RssFile")


def process_cpu_ns(process: int) -> int:
    """Return the CPU time of a process's threads, in the scheduler's nanoseconds; those that have ended are left out."""
    total = 0
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[0])
    return total


def _children(process: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(each) for each in (task / "children").read_text().split()]
    return found


def _proportional_bytes(process: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def resident(process: int) -> int:
    """Return the resident memory of a process."""
    return _status_bytes(process, "VmRSS")


def _status_bytes(process: int, name: str) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


class _Socket(Peer):
    def __init__(self, name: str, process: int, path: str) -> None:
        super().__init__(name, [process])
        self.path = path
        self._connections: list[Connection] = []

    async def connect(self, shard_id: str) -> Connection:
        connection = Connection(*await asyncio.open_unix_connection(self.path, limit=_LINE_LIMIT))
        self._connections.append(connection)
        await connection.exchange(initialize(shard_id))
        return connection

    async def close(self) -> None:
        """Close every connection."""
        for each in self._connections:
            each.writer.close()
            with contextlib.suppress(OSError):
                await each.writer.wait_closed()


@contextlib.asynccontextmanager
async def _serving(name: str, *arguments: str) -> AsyncIterator[Peer]:
    """Run a script that listens on a Unix socket, whose path comes after its arguments."""
    with tempfile.TemporaryDirectory(prefix="hot-") as folder:
        path = f"{folder}/socket"
        command = [sys.executable, *arguments, path]
        process = await asyncio.create_subprocess_exec(
            *command, env=environment(), stdin=asyncio.subprocess.PIPE, cwd=folder
        )
        try:
            async with asyncio.timeout(_START_SECONDS):
                while not os.path.exists(path):  # noqa: ASYNC240, PTH110  # never blocks
                    if process.returncode is not None:
                        raise RuntimeError(f"{name} did not start: exit code {process.returncode}")
                    await asyncio.sleep(0.05)
            peer = _Socket(name, process.pid, path)
            try:
                yield peer
            finally:
                await peer.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


@contextlib.asynccontextmanager
async def echo() -> AsyncIterator[Peer]:
    """Run a server that reads lines and answers each, and does nothing with them."""
    async with _serving("raw echo", "-m", "bench.hot.echo_server") as peer:
        yield peer


@contextlib.asynccontextmanager
async def relay() -> AsyncIterator[Peer]:
    """Run the echo that hands each line to another process first."""
    async with _serving("raw relay", "-m", "bench.hot.relay_server") as peer:
        yield peer


@contextlib.asynccontextmanager
async def mldserver(
    workers: str = "inline", handler: str = "touch", *, watched: bool = False, shown: bool = False
) -> AsyncIterator[Peer]:
    """Run a whole server, its engine a small one in the same process. ``watched``, which costs it 4 % of a processor:
    ``busy_ms`` can be asked. ``shown``: with an admin endpoint on loopback, whose address its log tells.
    """
    arguments = ("bench.hot.whole_server", workers, handler, "watched" * watched + "shown" * shown)
    async with _serving(f"mldserver, {workers}", "-m", *arguments) as peer:
        yield peer


def busy_ms(server: Peer) -> list[float]:
    """Return how long (ms) a watched server's event loop has worked in one go, each time that was long."""
    assert isinstance(server, _Socket)
    return [float(line) for line in (Path(server.path).parent / BUSY).read_text().splitlines()]


@contextlib.asynccontextmanager
async def prober(server: Peer) -> AsyncIterator[list[float]]:
    """Let another process exchange small batches with a server; the list has the longest answer (ms) afterwards."""
    assert isinstance(server, _Socket)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.hot.prober",
        server.path,
        env=environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    await process.stdout.readline()
    found: list[float] = []
    yield found
    printed, _ = await process.communicate(b"over")
    found.append(float(printed))


def environment() -> dict[str, str]:
    """Return what a script of the benchmarks runs with."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))}


class _Kclpy(Peer):
    """One process a shard, on pipes, as its daemon runs it."""

    async def connect(self, shard_id: str) -> Connection:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).parent / "kclpy_process.py"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT,
        )
        self.processes.append(process.pid)
        self.running.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        connection = Connection(process.stdout, process.stdin)
        await connection.exchange(initialize(shard_id))
        return connection

    def __init__(self) -> None:
        super().__init__("amazon_kclpy", [])
        self.running: list[asyncio.subprocess.Process] = []


@contextlib.asynccontextmanager
async def kclpy() -> AsyncIterator[Peer]:
    """Be ready to run amazon_kclpy."""
    peer = _Kclpy()
    try:
        yield peer
    finally:
        for process in peer.running:
            process.kill()
            await process.wait()
