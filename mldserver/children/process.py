"""A child process as the server holds it: started, signalled, read, waited for, killed with all that it has started.

It leads a session and a process group of its own: a Ctrl-C on the terminal does not reach it, and one signal ends all of
it. What it prints is read to the end, or its pipes would fill up and stop it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING

from mldserver.children.channel import pair
from mldserver.children.output import Output

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence


class ChildProcess:
    """A process that has begun. ``close`` must be awaited in the end, whatever happens."""

    def __init__(
        self, process: asyncio.subprocess.Process, outputs: Sequence[Output], end: socket.socket | None
    ) -> None:
        """Own a process and the pipes that it writes to."""
        self._process = process
        self._closed = False
        self.outputs = outputs
        self.end = end
        """This side of the socket that it was started with, if it was: the caller's to close."""

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: Sequence[Callable[[list[str]], bool]],
        talks: bool = False,
    ) -> ChildProcess:
        """Start a process. Raises OSError.

        ``output`` takes the lines of its standard output and standard error: each, or both together when it is one (see
        ``Output``). ``talks``: it gets one end of a socket pair, whose number is its last argument.
        """
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as failed:
            ours: socket.socket | None = None
            passed: tuple[int, ...] = ()
            if talks:
                ours, theirs = pair()
                failed.callback(ours.close)
                undo.callback(theirs.close)
                passed = (theirs.fileno(),)
            outputs, pipes = [], []
            for take in output:
                reading, writing = os.pipe()
                outputs.append(Output(reading, take))
                failed.callback(outputs[-1].close)
                undo.callback(os.close, writing)
                pipes.append(writing)
            process = await asyncio.create_subprocess_exec(
                *command,
                *map(str, passed),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipes[0],
                stderr=pipes[-1],
                env=dict(environment),
                pass_fds=passed,
                start_new_session=True,
            )
            failed.pop_all()
        return cls(process, outputs, ours)

    @property
    def pid(self) -> int:
        """The process's id, which is its group's too."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; negative for a signal, None while it runs."""
        return self._process.returncode

    def signal(self, number: signal.Signals) -> None:
        """Send the process alone a signal, if it lives."""
        # Not through the process object: its look at whether the process lives would take its exit code from the loop.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and what is left of its group, at once, without waiting."""
        if self._closed:
            return  # its number may be another's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.signal(signal.SIGKILL)  # it may have left its group

    async def wait(self) -> int:
        """Wait for its end and return its exit code."""
        return await self._process.wait()

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Kill it, wait for its end, and read what it has printed last. Closing again does nothing.

        Its pipes are waited for no longer than ``drain_seconds``: processes that have left its group may hold them.
        """
        if self._closed:
            return
        self.kill()
        await self.wait()
        self.kill()  # what it has started, and left behind
        self._closed = True
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_seconds):
                    for output in self.outputs:
                        await output.ended.wait()
        finally:
            for output in self.outputs:
                output.close()


def ending(exit_code: int) -> str:
    """Return how a process ended, for people."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    with contextlib.suppress(ValueError):
        return f"killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return f"killed by signal {-exit_code}"
