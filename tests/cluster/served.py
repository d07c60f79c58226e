"""A server as users start it, ``mldserver serve`` on a Spark master, with a daemon that plays it a stream in portions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
from support import serve_quickly
from support.cluster import CONF, SMALL_JVM
from support.serving import until
from support.spark_classes import spark_cache

from mldserver.children import parent_death
from mldserver.testing import FakeMLD, FakeStream, Habits

HANDLER = '''
"""Keeps every record; the executor that computes a row opens the record's gate, if it has one."""
from mldserver import batches

schema = "id BIGINT NOT NULL, gate STRING"
windows = batches(max_rows=100, max_age="1 second")


def process_record(record):
    event = record.json()
    return event["id"], event["gate"]


def on_window(rows, window):
    return rows.selectExpr("id", "IF(gate IS NULL, NULL, java_method('scala.io.Source', 'fromFile', gate, 'UTF-8')) AS opened")
'''
_PATIENCE_SECONDS = 240
CONSTANTS = '{"settle_time_ms": 200, "retry_seconds": [0.5, 1]}'


class Served:
    """The server, killed and started again as a test likes, and the daemon beside it."""

    def __init__(self, folder: Path, master: str, **settings: str) -> None:
        """Lay the handler into ``folder``; nothing is started."""
        self.folder, self.out = folder, folder / "out"
        (folder / "kept.py").write_text(HANDLER)
        # A Spark Connect server has its own.
        conf = {} if master.startswith("sc:") else {**CONF, "spark.driver.extraJavaOptions": SMALL_JVM}
        told = {
            "out": str(self.out),
            "listen": "127.0.0.1:0",
            "spark-master": master,
            "log-file": str(folder / "log.jsonl"),
            "cache-dir": str(spark_cache(folder)),
            "workers": "inline",
            "flush-interval": "50 ms",
            **settings,
        }
        options = [*told.items(), *(("spark-conf", f"{name}={value}") for name, value in conf.items())]
        self._options = [word for name, value in options for word in (f"--{name}", value)]
        self._process: asyncio.subprocess.Process
        self._stream = FakeStream(1, seed=1)
        habits = Habits(idle_seconds=0.2)
        self._daemon = FakeMLD(
            self._stream, "127.0.0.1:1", habits=habits, supervised=True, backoff_seconds=0.5
        )
        self._sent = 0
        self._killed = False
        self._gate: Path

    async def start(self) -> None:
        """Start the server."""
        tied = [sys.executable, "-ISE", parent_death.__file__, str(os.getpid())]
        self._process = await asyncio.create_subprocess_exec(
            *(*tied, sys.executable, "-P", serve_quickly.__file__, CONSTANTS, "kept", *self._options),
            cwd=self.folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(
                    [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
                ),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    async def ended(self) -> int:
        """Return the exit code once the server is gone."""
        await self.until(lambda: self._process.returncode is not None)
        return await self._process.wait()

    async def kill(self) -> None:
        """Kill the server, whose Spark must notice by itself, and start another."""
        self._killed = True
        self._process.kill()
        await self._process.wait()
        await self._listen()

    async def _listen(self) -> None:
        """Start the server, and tell the daemon where it listens."""
        before = len(self.log("server.listening"))
        await self.start()
        await self.until(lambda: len(self.log("server.listening")) > before)
        self._daemon.address = self.log("server.listening")[-1]["address"]

    @contextlib.asynccontextmanager
    async def fed(self) -> AsyncIterator[None]:
        """Start the server, and play it all that is sent while the block runs; then it stops in good order."""
        await self._listen()
        try:
            async with asyncio.TaskGroup() as group:
                playing = group.create_task(self._daemon.run())
                yield
                self._stream.end()
                await playing
            self._process.send_signal(signal.SIGTERM)
            assert await self.ended() == 0
            # A server that is killed is an end in the middle.
            violations = self._daemon.violations
            assert not [told for told in violations if not (self._killed and "EOF while" in told)]
        finally:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def send(self, *, held: bool = False) -> None:
        """Put the rows of one window into the stream; ``held``: it is computed no further than until ``let_go``."""
        if held:
            self._gate = self.folder / f"gate-{self._sent}"
            # Who opens it to read waits until somebody opens it to write.
            os.mkfifo(self._gate)
        for number in range(self._sent, self._sent + 100):
            # Those before it have a file begun, by which `until_computing` knows.
            gate = str(self._gate) if held and number % 10 == 9 else None
            self._stream.put(json.dumps({"id": number, "gate": gate}).encode(), f"key-{number}")
        self._sent += 100

    def let_go(self) -> None:
        """Open the gate of the window that is held, for those that wait at it and for all that come later."""
        opened = os.open(self._gate, os.O_RDWR)
        free = self.folder / "free"
        free.touch()
        free.replace(self._gate)
        os.close(opened)

    def rows(self) -> Counter[int]:
        """Return the ids that readers of the output see."""
        files = [str(path) for path in self.out.glob("window=*/*.parquet")]
        return Counter(ds.dataset(files, format="parquet").to_table()["id"].to_pylist() if files else [])

    async def until_exact(self) -> None:
        """Wait until all that was sent is published; at no time is a row there twice."""

        def all_there() -> bool:
            rows = self.rows()
            assert not rows or max(rows.values()) == 1
            return rows.total() == self._sent

        await self.until(all_there)

    async def until_computing(self) -> None:
        """Wait until Spark works on a window, which must be held."""
        staging = self.out / "_mldserver" / "staging"

        def works() -> bool:
            # The folders of the window before may go while they are listed.
            with contextlib.suppress(FileNotFoundError):
                return any(staging.glob("*/*/_temporary/0/_temporary/attempt*"))
            return False

        await self.until(works)

    async def until(self, condition: Any) -> None:
        """Wait; where that takes too long, tell the log's end."""
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await until(condition)
        except TimeoutError:
            told = "\n".join(str(event)[:600] for event in self.log()[-30:])
            raise AssertionError(
                f"not within {_PATIENCE_SECONDS} s; the server's log ends with:\n{told}"
            ) from None

    def log(self, *names: str) -> list[dict[str, Any]]:
        """Return the server's events of these names, or all."""
        file = self.folder / "log.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if not names or event["event"] in names]
