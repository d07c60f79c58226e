"""``mldserver serve`` in a process of its own, over a settings file: what it logs, what it has started, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from support import serve_quickly

__all__ = ["Function", "Host", "hosting", "settings_text"]

_PATIENCE_SECONDS: Final = 400.0


@dataclass(frozen=True, slots=True)
class Function:
    """One function of a server: its name, the text of its module, and the keys of its table."""

    name: str
    text: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def settings_text(functions: tuple[Function, ...], **shared: Any) -> str:
    """Return the text of a settings file: shared keys, then a table for each function."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in shared.items()]
    for function in functions:
        lines += ["", f"[functions.{function.name}]"]
        given = {"handler": f"{function.name}_handler", **function.settings}
        lines += [f"{key} = {json.dumps(value)}" for key, value in given.items()]
    return "\n".join(lines) + "\n"


class Host:
    """A folder in which servers run one after the other, each over the same settings file."""

    def __init__(self, folder: Path, log: str = "log") -> None:
        """Use a folder that has ``mldserver.toml`` and the handlers' modules."""
        self.folder = folder
        self.environ: dict[str, str] = {}
        """Variables of the next server, in addition to this process's."""
        self.constants: dict[str, Any] = {}
        """``Settings.constants`` of the next server."""
        self.process: asyncio.subprocess.Process | None = None
        self._log = folder / log
        self._read_from = 0

    @property
    def pid(self) -> int:
        """The id of the server's process."""
        return self.running.pid

    @property
    def running(self) -> asyncio.subprocess.Process:
        """The server's process, or the latest one."""
        assert self.process is not None
        return self.process

    async def start(self, *arguments: str) -> None:
        """Start a server. ``arguments`` replace the settings file's tables."""
        self._read_from = self._log.stat().st_size if self._log.exists() else 0
        program = (
            ["-P", serve_quickly.__file__, json.dumps(self.constants)]
            if self.constants
            else ["-m", "mldserver", "serve"]
        )
        path = os.pathsep.join((str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])))
        environ = {"MLDSERVER_ADMIN": "127.0.0.1:0", **os.environ, "PYTHONPATH": path, **self.environ}
        with (self.folder / "printed").open("ab") as printed:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, *program, *arguments),
                cwd=self.folder,
                env=environ,
                stdout=printed,
                stderr=printed,
            )

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield what the present server has logged."""
        if not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._read_from)
            *lines, _unfinished = file.read().split(b"\n")
        yield from map(json.loads, lines)

    def named(self, *names: str, function: str | None = None) -> list[dict[str, Any]]:
        """Return the present server's events of these names; of one function, if it is named."""
        return [
            event
            for event in self.events()
            if event["event"] in names and function in {None, event.get("pipeline")}
        ]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once a condition holds. Raises AssertionError if the server ends before, or takes far too long."""
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while not condition():
                    if self.running.returncode is not None and not condition():
                        raise AssertionError(
                            f"the server has ended ({self.running.returncode}): {self.tail()}"
                        )
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"this never came: {self.tail()}") from None

    async def address(self, function: str) -> str:
        """Return where a function listens, once it does."""
        await self.until(lambda: bool(self.named("server.listening", function=function)))
        return str(self.named("server.listening", function=function)[-1]["address"])

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        if self.running.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.running.send_signal(signal.SIGKILL)

    async def killed(self) -> None:
        """Kill it, and return once it is gone."""
        self.kill()
        await self.running.wait()

    async def stopped(self) -> int:
        """Stop it in order, and return its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.running.terminate()
        async with asyncio.timeout(_PATIENCE_SECONDS):
            return await self.running.wait()

    def tail(self) -> str:
        """Return the last lines of the log, and what the server has printed."""
        printed = (self.folder / "printed").read_text("utf-8", "replace")
        lines = self._log.read_text("utf-8", "replace").splitlines() if self._log.exists() else []
        return "\n".join([*lines[-25:], printed[-2000:]])


@contextlib.asynccontextmanager
async def hosting(folder: Path, *functions: Function, **shared: Any) -> AsyncIterator[Host]:
    """Write modules and settings, and leave no server behind. The block starts it."""
    _write(folder, functions, shared)
    host = Host(folder)
    try:
        yield host
    finally:
        if host.process is not None:
            await host.killed()


def _write(folder: Path, functions: tuple[Function, ...], shared: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for function in functions:
        (folder / f"{function.name}_handler.py").write_text(function.text, "utf-8")
    keys = {"out": "out", "log_file": "log", "log_format": "json", **shared}
    (folder / "mldserver.toml").write_text(settings_text(functions, **keys), "utf-8")
