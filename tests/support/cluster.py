"""Spark's own parts as processes on loopback: a standalone master, workers of one core, a Spark Connect server.

Each is killed, paused and started again as a test likes. All end with the block, and with the process of the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pyspark
import pytest
from support.processes import group_members, held_port
from support.spark_classes import archive_options

from mldserver.children import parent_death

__all__ = ["CONF", "NOT_BLINDED", "Part", "Parts", "can_blind", "spark_parts"]

SMALL_JVM: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_OF_A_PART: Final = " ".join([SMALL_JVM, *archive_options()])
"""A driver finds the archive by its setting ``cache_dir``."""

CONF: Final = {
    # Executors look for the driver at the host's own address otherwise.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "600m",
    # Whatever `python3` is on the path may be another version.
    "spark.pyspark.python": sys.executable,
    "spark.executor.extraJavaOptions": _OF_A_PART,
}
"""What a session's configuration needs on these workers."""

_SPARK_CLASS: Final = Path(pyspark.__file__).parent / "bin" / "spark-class"
_STAND_ALONE: Final = "org.apache.spark.deploy"
_ALONE: Final = (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"])
"""What gives a process a tree of mounts of its own: as root, and as anyone."""
NOT_BLINDED: Final = "no process can be given mounts of its own here"


def _blinded(folder: Path | str) -> list[str] | None:
    """Return the beginning of a command line whose process sees ``folder`` empty; None where that cannot be had."""
    covered = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(folder)]
    for alone in _ALONE:
        with contextlib.suppress(OSError):
            if subprocess.run([*alone, *covered, "true"], check=False, capture_output=True).returncode == 0:
                return [*alone, *covered]
    return None


def can_blind(folder: Path) -> bool:
    """Whether a process can be started here that does not see what is in a folder. In CI it must."""
    can = _blinded(folder) is not None
    if os.environ.get("CI") == "true" and not can:
        pytest.fail(f"{NOT_BLINDED}. CI=true, so nothing is left out: allow user namespaces to this user.")
    return can


class Part:
    """One of Spark's processes, with the executors that it has started."""

    def __init__(
        self, tasks: asyncio.TaskGroup, command: Sequence[str], environment: Mapping[str, str], up: str
    ) -> None:
        """Prepare; ``up``: what it prints when it can be used."""
        self._tasks = tasks
        self._command, self._environment, self._up = command, environment, up
        self._groups: list[int] = []
        self._drain: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process
        self.printed: deque[str] = deque(maxlen=500)
        """The last lines of its log."""

    async def start(self) -> None:
        """Start it, where it was before if it was killed, and return once it can be used."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            limit=1 << 20,
            start_new_session=True,
        )
        self._groups.append(self._process.pid)
        while not await self._line():
            pass
        self._drain = self._tasks.create_task(self._read_on())

    async def _line(self) -> bool:
        """Keep a line; return whether it says that the part is up."""
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode("utf-8", "replace").rstrip()
        assert line or not self._process.stdout.at_eof(), "\n".join(["It ended:", *self.printed])
        self.printed.append(line)
        return self._up in line

    async def _read_on(self) -> None:
        with contextlib.suppress(AssertionError):
            while True:
                await self._line()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def executors(self) -> list[int]:
        """Return the executors that live: processes that a worker has started, whether it lives itself or not."""
        members = [pid for group in self._groups for pid in group_members(group)]
        return [pid for pid in members if b"CoarseGrainedExecutorBackend" in _command_line(pid)]

    def pause(self) -> None:
        """Stop its clock, and that of its executors: it lives and says nothing."""
        os.killpg(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on after a pause."""
        os.killpg(self.pid, signal.SIGCONT)

    async def kill(self, *, executors: bool = False) -> None:
        """Kill the process at once; its executors too, or they are left to notice it themselves."""
        if executors:
            os.killpg(self.pid, signal.SIGKILL)
        elif self._process.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
        await self._process.wait()

    async def close(self) -> None:
        """Leave nothing of it behind."""
        for group in self._groups:
            if group_members(group):
                os.killpg(group, signal.SIGKILL)
        if self._groups:
            await self._process.wait()
        if self._drain is not None:
            self._drain.cancel()


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


class Parts:
    """Starts parts; ``spark_parts`` ends them."""

    def __init__(self, folder: Path, tasks: asyncio.TaskGroup) -> None:
        """``folder``: where workers have their own ones."""
        self._folder = folder
        self._tasks = tasks
        self._parts: list[Part] = []
        self._held = contextlib.ExitStack()
        self._port = 0
        self._workers = 0

    @property
    def url(self) -> str:
        """The master's address, for ``spark_master``."""
        return f"spark://127.0.0.1:{self._port}"

    async def cluster(self, workers: int) -> tuple[Part, list[Part]]:
        """Start a master and workers."""
        master = await self.master()
        return master, [await self.worker() for _ in range(workers)]

    async def master(self) -> Part:
        """Start the master of a standalone cluster."""
        self._port = self._held.enter_context(held_port())
        where = ["--host", "127.0.0.1", "--port", str(self._port), "--webui-port", "0"]
        return await self._started([f"{_STAND_ALONE}.master.Master", *where], "New state: ALIVE")

    async def worker(self, *, blind: Path | None = None) -> Part:
        """Start a worker of one core, with a loopback address of its own, and wait until the master knows it.

        ``blind``: a folder that it and its executors see empty (``can_blind``); what they write there nobody else sees.
        """
        self._workers += 1
        host = f"127.0.0.{self._workers}"
        folder = self._folder / f"worker-{self._workers}"
        of_its_own = ["--host", host, "--cores", "1", "--memory", "1g", "--webui-port", "0"]
        return await self._started(
            [f"{_STAND_ALONE}.worker.Worker", *of_its_own, "--work-dir", str(folder), self.url],
            "Successfully registered with master",
            blind=blind,
            SPARK_LOCAL_IP=host,
        )

    async def connect_server(
        self, master: str = "local[1]", conf: Mapping[str, str] | None = None, *, blind: Path | None = None
    ) -> tuple[Part, str]:
        """Start a Spark Connect server whose session is on ``master``; return it and its address.

        ``blind``: as of a worker.
        """
        port = self._held.enter_context(held_port())
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(port),
            "spark.master": master,
            "spark.ui.enabled": "false",
            "spark.driver.defaultJavaOptions": _OF_A_PART,
            **CONF,
            **(conf or {}),
        }
        options = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        name = "org.apache.spark.sql.connect.service.SparkConnectServer"
        part = await self._started(
            ["org.apache.spark.deploy.SparkSubmit", "--class", name, *options, "spark-internal"],
            "Spark Connect server started",
            blind=blind,
            PYSPARK_PYTHON=sys.executable,
        )
        return part, f"sc://127.0.0.1:{port}"

    async def _started(
        self, arguments: Sequence[str], up: str, *, blind: Path | None = None, **environment: str
    ) -> Part:
        before = [] if blind is None else _blinded(blind)
        assert before is not None, NOT_BLINDED
        tied = [sys.executable, "-ISE", parent_death.__file__, str(os.getpid())]
        of_daemons = {
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "512m",
            "SPARK_DAEMON_JAVA_OPTS": _OF_A_PART,
            "SPARK_LAUNCHER_OPTS": SMALL_JVM,
        }
        around = {**os.environ, **of_daemons, **environment}
        part = Part(self._tasks, [*before, *tied, str(_SPARK_CLASS), *arguments], around, up)
        self._parts.append(part)
        await part.start()
        return part

    async def close(self) -> None:
        """End all parts, the last first."""
        with self._held:
            for part in reversed(self._parts):
                await part.close()


@contextlib.asynccontextmanager
async def spark_parts(folder: Path) -> AsyncIterator[Parts]:
    """Give what starts Spark's parts; in the end none is left."""
    async with asyncio.TaskGroup() as tasks:
        parts = Parts(folder, tasks)
        try:
            yield parts
        finally:
            await parts.close()
