"""A life of a server as users start it: ``mldserver serve``, with Spark."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

from crash.lives import Plan
from support import serve_quickly
from support.serving import ALL_CONSTANTS

from mldserver.base.kill_points import KILL_VARIABLE
from mldserver.spark.driver_session import driver_command

_DRIVER: Final = (driver_command()[-1], "Spark driver")
"""In its arguments: before it is told its title, and then."""
_UNDONE: Final = """
SELECT (SELECT count(*) FROM windows WHERE state <> 'published')
     + (SELECT count(*) FROM segments WHERE revision = 0)
     + (SELECT count(*) FROM late_segments)
"""


class SparkLife:
    """``mldserver serve`` in a process of its own."""

    def __init__(self, plan: Plan, step: str | None) -> None:
        """Prepare a life that ends at ``step``, or nowhere."""
        self._plan = plan
        self._step = step
        self._process: asyncio.subprocess.Process | None = None
        self._before = 0
        self._over = asyncio.Event()

    @property
    def armed(self) -> bool:
        """Whether it will end by itself at a step."""
        return self._step is not None

    async def start(self) -> None:
        """Start the server."""
        settings = self._plan.settings.items()
        constants = json.dumps({name: value for name, value in settings if name in ALL_CONSTANTS})
        told = {
            f"MLDSERVER_{name.upper()}": _shown(value)
            for name, value in settings
            if name not in ALL_CONSTANTS
        }
        known = [self._plan.python_path, *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = os.environ | told | {"PYTHONPATH": os.pathsep.join(known)}
        if self._step is not None:
            environ[KILL_VARIABLE] = self._step
        self._before = _listened(self._plan)
        command = ["-P", serve_quickly.__file__, constants, self._plan.handler, "--out", str(self._plan.out)]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *command, env=environ, cwd=self._plan.python_path
        )

    def stream_is_over(self) -> None:
        """Stop it once the ledger says that all is published."""
        self._over.set()

    def kill(self) -> None:
        """Kill the server; Spark must notice by itself."""
        self._send(self._running.pid, signal.SIGKILL)

    @property
    def computes(self) -> bool:
        """Whether Spark works on a window: an attempt's folder is there, and its output is not visible yet."""
        staging = self._plan.out / "_mldserver" / "staging"
        return any(folder.is_dir() for folder in staging.glob("*/*")) if staging.exists() else False

    def kill_spark(self, *, jvm: bool) -> bool:
        """Kill Spark's driver, or only its JVM; False when there is none now."""
        # Its other children run handlers. One that was forked and has not become itself yet has our server's command.
        drivers = [
            child
            for child in _children(self._running.pid)
            if any(name in _command(child) for name in _DRIVER)
        ]
        found = [child for driver in drivers for child in _children(driver)] if jvm else drivers
        for pid in found:
            self._send(pid, signal.SIGKILL)
        return bool(found)

    async def ended(self) -> int:
        """Return the exit code."""
        async with asyncio.TaskGroup() as group:
            stopping = group.create_task(self._stop_when_done())
            code = await self._running.wait()
            stopping.cancel()
        return code

    async def _stop_when_done(self) -> None:
        await self._over.wait()
        # A server that has not come so far takes no signal in good order yet.
        while _listened(self._plan) == self._before or self._undone():  # noqa: ASYNC110  # another process has no event to wait on
            await asyncio.sleep(0.1)
        self._send(self._running.pid, signal.SIGTERM)

    def _undone(self) -> int:
        ledger = self._plan.out / "_mldserver" / "ledger.sqlite"
        with closing(sqlite3.connect(ledger, timeout=30)) as db:
            return int(db.execute(_UNDONE).fetchone()[0])

    @property
    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    def _send(self, pid: int, number: signal.Signals) -> None:
        if self._running.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _listened(plan: Plan) -> int:
    """Return how often servers have begun to listen."""
    log: Path = plan.settings["log_file"]
    return log.read_bytes().count(b'"server.listening"') if log.exists() else 0


def _shown(value: Any) -> str:
    return f"{value * 1000:g} ms" if isinstance(value, float) else str(value)


def _command(pid: int) -> str:
    """Return a process's arguments; none once it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace")
    return ""


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    return []
