"""The whole journey on loopback, in processes of their own: emulated AWS, the real Java daemon, the server.

``Stack`` starts and stops the parts, puts records, and looks at what is durable where. While it is open, a sampler
compares the lease table's checkpoints with the ledger's positions.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aioboto3
import pyarrow.dataset as ds
from support import serve_quickly
from support.processes import held_port
from support.spark_classes import QUICK

REGION = "us-east-1"
STREAM = "orders"
APP = "orders-app"
LEDGER = "_mldserver/ledger.sqlite"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "emulated",
    "AWS_SECRET_ACCESS_KEY": "emulated",
    "AWS_EC2_METADATA_DISABLED": "true",
}
PUT_LIMIT = 500
"""Records of one PutRecords call (AWS limit)."""

SMALL_JVM = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")

FAST_DAEMON = {
    # Intervals at which the KCL looks after leases: by default a start takes one to three minutes.
    "failoverTimeMillis": "3000",
    "leaseAssignmentIntervalMillis": "1000",
    "shardSyncIntervalMillis": "2000",
    "parentShardPollIntervalMillis": "500",
    "workerMetricsReporterFreqInMillis": "500",
    "inMemoryWorkerMetricsCaptureFrequencyMillis": "500",
    "skipShardSyncAtWorkerInitializationIfLeasesExist": "true",
    "schedulerInitializationBackoffTimeMillis": "500",
    "taskBackoffTimeMillis": "200",
    "listShardsBackoffTimeInMillis": "200",
    "metricsLevel": "NONE",
}


@dataclass
class Samples:
    """What the sampler saw."""

    taken: int = 0
    ahead: list[str] = field(default_factory=list)
    """Checkpoints that were ahead of the ledger: each one a broken promise."""


class Stack:
    """One emulator, and a host: one server at a time, one ``mldserver kcl`` at a time. ``beside`` gives another host."""

    def __init__(self, folder: Path, handler: str, cache: Path = Path(os.devnull, "cache")) -> None:
        self.folder = folder
        self._cache = cache
        self.host = ""
        self._hosts = [self]
        self.out = folder / "out"
        self.handler = handler
        self.environment: dict[str, str] = {}
        """Beside this process's own, of server and daemon."""
        self.properties = FAST_DAEMON
        """Of each daemon, unless a start changes them."""
        self.samples = Samples()
        self.url = self.address = ""
        """Of the emulator and the server, while it is running."""
        self._held = contextlib.ExitStack()
        self._emulator: subprocess.Popen[bytes] | None = None
        self.server: subprocess.Popen[bytes] | None = None
        self.daemon: subprocess.Popen[bytes] | None = None
        self._session = aioboto3.Session("emulated", "emulated", region_name=REGION)
        self.kinesis: Any = None
        self.dynamodb: Any = None

    # Parts.

    def beside(self, host: str) -> Stack:
        """Return another host of the same pipeline, with a server and a daemon of its own."""
        other = copy.copy(self)
        other.host, other.address = host, f"127.0.0.1:{self._held.enter_context(held_port())}"
        other.server = other.daemon = None
        self._hosts.append(other)
        return other

    @contextlib.asynccontextmanager
    async def running(self, shards: int) -> AsyncIterator[Stack]:
        """Start the emulator with a stream, sample while open, and leave no process behind."""
        script = Path(__file__).with_name("emulator.py")
        with self._held:
            listener = self._held.enter_context(socket.create_server(("127.0.0.1", 0)))
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self.address = f"127.0.0.1:{self._held.enter_context(held_port())}"
            descriptor = listener.fileno()
            self._emulator = self._start("emulator", [str(script), str(descriptor)], pass_fds=(descriptor,))
            try:
                async with (
                    self._session.client("kinesis", endpoint_url=self.url) as self.kinesis,
                    self._session.client("dynamodb", endpoint_url=self.url) as self.dynamodb,
                ):
                    await self.kinesis.create_stream(StreamName=STREAM, ShardCount=shards)
                    async with asyncio.TaskGroup() as tasks:
                        sampler = tasks.create_task(self._sample())
                        yield self
                        sampler.cancel()
            finally:
                ours = [process for host in self._hosts for process in (host.daemon, host.server)]
                for process in (*ours, self._emulator):
                    if process is not None:
                        process.kill()
                        process.wait()

    def start_server(self, **settings: str) -> None:
        """Start ``mldserver serve``; ``settings`` are its options."""
        options = {
            "listen": self.address,
            "out": str(self.out),
            "cache-dir": str(self._cache),
            "spark-conf": QUICK,
            "flush-interval": "500 ms",
            "quiet-time": "10 min",
            "idle-time": "10 min",
            "stream": STREAM,
            "region": REGION,
            "endpoint-url": self.url,
            "spark-master": "local[1]",
            "log-format": "json",
            "log-level": "debug",
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }
        arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
        # As ``mldserver serve``, but ListShards is asked for more often.
        command = ["-P", serve_quickly.__file__, '{"list_seconds": 0.5}', self.handler, *arguments]
        self.server = self._start("server", command)

    def start_daemon(self, retrieval: str = "polling", **changed: str) -> None:
        """Start ``mldserver kcl``; ``changed`` are properties of the daemon."""
        of_polling = {"idleTimeBetweenReadsInMillis": "500"} if retrieval == "polling" else {}
        wanted = self.properties | of_polling | changed
        properties = [text for pair in wanted.items() for text in ("--property", "=".join(pair))]
        java = [f"--java-option={option}" for option in SMALL_JVM]
        told = ["--stream", STREAM, "--app", APP, "--region", REGION, "--connect", self.address]
        told += ["--endpoint-url", self.url, "--retrieval", retrieval]
        command = ["-m", "mldserver", "kcl", *told, *properties, *java, "--log-format", "json"]
        self.daemon = self._start("daemon", command)

    def _start(
        self, name: str, arguments: list[str], pass_fds: tuple[int, ...] = ()
    ) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **CREDENTIALS, "PYTHONPATH": str(self.folder), **self.environment}
        with self._log(name).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                pass_fds=pass_fds,
            )

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}{self.host}.log"

    async def end(self, process: subprocess.Popen[bytes] | None, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        assert process is not None
        assert process.poll() is None, f"{process.args!r} had exited before"
        process.send_signal(number)
        return await asyncio.to_thread(process.wait, 600)

    def jvms(self) -> list[int]:
        """Return the daemon's JVM: its process id, or none."""
        assert self.daemon is not None
        return [pid for pid in _descendants(self.daemon.pid) if _name(pid) == "java"]

    def sparks(self) -> list[int]:
        """Return the processes of the server's Spark, its JVM and its driver; none before the JVM is there."""
        assert self.server is not None
        found = _descendants(self.server.pid)
        return found if any(_name(pid) == "java" for pid in found) else []

    def kill_jvm(self) -> bool:
        """Kill the daemon's JVM, which its supervisor brings back; False when there is none now."""
        found = self.jvms()
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(found)

    def daemon_events(self) -> list[dict[str, Any]]:
        """Return what ``mldserver kcl`` has logged."""
        return _events(self._log("daemon"))

    def server_events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of this name that ``mldserver serve`` has logged."""
        return [event for event in _events(self._log("server")) if event["event"] == name]

    # Input.

    async def put(self, rows: Iterable[dict[str, Any]]) -> None:
        """Put rows as JSON records, in order; the partition key is the row's ``key``."""
        records = [{"Data": json.dumps(row).encode(), "PartitionKey": row["key"]} for row in rows]
        for at in range(0, len(records), PUT_LIMIT):
            answer = await self.kinesis.put_records(StreamName=STREAM, Records=records[at : at + PUT_LIMIT])
            assert answer["FailedRecordCount"] == 0

    async def last_sequences(self) -> dict[str, int]:
        """Return the last sequence number of each shard, read from the stream itself; 0 for an empty shard."""
        last = {}
        for shard in (await self.kinesis.list_shards(StreamName=STREAM))["Shards"]:
            name = shard["ShardId"]
            told = {"StreamName": STREAM, "ShardId": name, "ShardIteratorType": "TRIM_HORIZON"}
            iterator = (await self.kinesis.get_shard_iterator(**told))["ShardIterator"]
            records = (await self.kinesis.get_records(ShardIterator=iterator))["Records"]
            last[name] = int(records[-1]["SequenceNumber"]) if records else 0
        return last

    # What is durable.

    async def leases(self, of: str = "checkpoint") -> dict[str, str]:
        """Return the lease table's checkpoint, or owner, of each shard; empty while there is no table."""
        try:
            found = await self.dynamodb.scan(TableName=APP, ConsistentRead=True)
        except self.dynamodb.exceptions.ResourceNotFoundException:
            return {}
        return {item["leaseKey"]["S"]: item[of]["S"] for item in found["Items"] if of in item}

    def positions(self) -> dict[str, tuple[int, bool]]:
        """Return the ledger's position of each shard (0: none) and whether the shard has ended."""
        rows = self.query("SELECT shard_id, json_extract(position, '$[0]'), ended_ms FROM shards")
        return {shard: (int(sequence or 0), ended is not None) for shard, sequence, ended in rows}

    def windows(self) -> dict[str, str]:
        """Return the state of each window that the ledger knows."""
        return dict(self.query("SELECT window_id, state FROM windows"))

    def query(self, query: str) -> list[tuple[Any, ...]]:
        """Ask the ledger; nothing while there is none."""
        path = self.out / LEDGER
        if not path.exists():
            return []
        with contextlib.closing(sqlite3.connect(path, timeout=30)) as ledger:
            try:
                return ledger.execute(query).fetchall()
            except sqlite3.OperationalError as error:
                if "no such table" in str(error):  # it is being created
                    return []
                raise

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of every published window, as any reader of Parquet sees them."""
        # Not the folder itself: Arrow would list the server's private files too, which come and go meanwhile.
        files = [str(path) for path in self.out.glob("window=*/*.parquet")]
        rows: list[dict[str, Any]] = (
            ds.dataset(files, format="parquet").to_table().to_pylist() if files else []
        )
        return rows

    async def _sample(self) -> None:
        while True:
            # The checkpoints first: positions only grow, so one read later may only be further.
            leases = await self.leases()
            positions = self.positions()
            for shard, checkpoint in leases.items():
                position, ended = positions.get(shard, (0, False))
                ahead = checkpoint == "SHARD_END" and not ended
                if ahead or (checkpoint.isdigit() and int(checkpoint) > position):
                    self.samples.ahead.append(f"{shard}: lease {checkpoint}, ledger {position}")
            self.samples.taken += bool(leases)
            await asyncio.sleep(0.4)

    # Waiting.

    async def until(self, what: str, reached: Callable[[], bool], *, limit: float = 600) -> None:
        """Wait until something is so. When it takes longer than ``limit`` seconds, fail with the ends of all logs and with ``waits``."""
        deadline = time.monotonic() + limit
        while not reached():
            for name, process in (("server", self.server), ("daemon", self.daemon)):
                assert process is None or process.poll() is None, (
                    f"{name} exited while waiting: {what}\n{self.tails()}"
                )
            assert time.monotonic() < deadline, (
                f"not within {limit} s: {what}\n{self.tails()}\nWhat the JVMs wait for: {self.waits()}"
            )
            await asyncio.sleep(0.1)

    async def until_durable(self, *, limit: float = 600) -> None:
        """Wait until the ledger's positions are those of the last records."""
        wanted = await self.last_sequences()

        def reached() -> bool:
            now = self.positions()
            return all(now.get(shard, (0, False))[0] >= last for shard, last in wanted.items())

        await self.until(f"positions {wanted}", reached, limit=limit)

    async def until_owned(self, owner: str, *, limit: float = 600) -> None:
        """Wait until a worker has the leases of all shards."""
        async with asyncio.timeout(limit):
            while set((await self.leases("leaseOwner")).values()) != {owner}:  # noqa: ASYNC110  # a table
                await asyncio.sleep(0.5)

    async def until_checkpointed(self, wanted: dict[str, str], *, limit: float = 600) -> None:
        """Wait until the lease table has these checkpoints."""
        async with asyncio.timeout(limit):
            while not wanted.items() <= (await self.leases()).items():  # noqa: ASYNC110  # a table, not an event
                await asyncio.sleep(0.5)

    def waits(self) -> Path:
        """Write the host's shortages, all TCP sockets, and the threads of each daemon's JVM to a file; return its path.

        A thread's ``cpu`` beside its ``elapsed``, and the share of time in ``/proc/pressure`` that processes were stalled, show
        whether the host was too busy.
        """
        jvms = [pid for host in self._hosts if host.daemon is not None for pid in host.jvms()]
        path = self.folder / "waits.log"
        with path.open("wb", buffering=0) as log:
            pressure = ["grep", "", "/proc/pressure/cpu", "/proc/pressure/memory", "/proc/pressure/io"]
            for command in (pressure, ["ss", "-tanp"], *(["jstack", "-l", str(pid)] for pid in jvms)):
                log.write(f"== {command}\n".encode())
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    subprocess.run(command, stdout=log, stderr=log, timeout=30, check=False)
        return path

    def tails(self) -> str:
        """Return the ends of the logs."""
        logs = (host._log(name) for host in self._hosts for name in ("server", "daemon", "emulator"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-6000:]}" for log in logs if log.exists())


def _events(log: Path) -> list[dict[str, Any]]:
    # The last line may still be written.
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    except OSError:
        return ""
