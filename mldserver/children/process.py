"""A child process of the server: started, signalled, read, waited for, killed with its descendants.

It leads a new session and process group: a Ctrl-C on the terminal does not reach it, and one signal ends the whole
group. The server reads its output to the end, since full pipes would block it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from mldserver.base.lines import TextLines
from mldserver.children.channel import pair

_READ_BYTES: Final = 8192
"""At a time: thousands of empty lines at most."""
_PAUSE_SECONDS: Final = 0.05
_LIMITS: Final = ("memory.max", "memory.current")
_REST_BYTES: Final = 1 << 20
"""Read at most of what is left at the end; a pipe holds 64 KiB (Linux)."""


class ChildOutput:
    """The read end of a pipe, on the event loop: what a child prints, within bounds, line by line.

    After too many lines the server pauses reading, so that the child blocks. This is not asyncio's subprocess pipe:
    an event loop may take a process for alive until its pipes have ended, and unread output, or another process that
    has inherited the pipes, would hide its death.
    """

    def __init__(self, file: int, take: Callable[[list[str]], bool]) -> None:
        """Own ``file`` from now on; ``take`` gets its lines, and returns False when they are too many for now."""
        self._file = file
        self._take = take
        self._lines = TextLines()
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._open = True
        self.ended = asyncio.Event()
        """Set when nothing more is read."""
        os.set_blocking(file, False)
        self._loop.add_reader(file, self._readable)

    def go_on(self) -> None:
        """End a pause in reading at once."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
            self._loop.add_reader(self._file, self._readable)

    def close(self) -> None:
        """Read what is left, and close the pipe, even if another process holds it open. Closing again does nothing."""
        rest = _REST_BYTES
        while self._open and rest > 0 and (data := self._read()):
            self._take(self._lines.feed_text(data))
            rest -= len(data)
        self._end()

    def _readable(self) -> None:
        """Read what has come, and pass its lines on; pause reading if the receiver has too many lines for now."""
        data = self._read()
        if data is None:
            return
        if not data:
            self._end()
        elif not self._take(self._lines.feed_text(data)):
            self._loop.remove_reader(self._file)
            self._pause = self._loop.call_later(_PAUSE_SECONDS, self.go_on)

    def _read(self) -> bytes | None:
        """Return what is there; nothing at the end, None when nothing is there now."""
        try:
            return os.read(self._file, _READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return None

    def _end(self) -> None:
        if self._open:
            self._open = False
            self.go_on()
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self.ended.set()
            self._take(self._lines.finish_text())


class ChildProcess:
    """A process that has begun. ``close`` must be awaited in the end, whatever happens."""

    def __init__(
        self, process: asyncio.subprocess.Process, outputs: Sequence[ChildOutput], end: socket.socket | None
    ) -> None:
        self._process = process
        self.pid = process.pid
        """The process's id, which is its group's too."""
        self.wait = process.wait
        """Waits for its end and returns its exit code."""
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
        keep: Sequence[int] = (),
    ) -> ChildProcess:
        """Start a process. Raises OSError.

        ``output``: callbacks for the lines of its standard output and standard error, or one for both (see ``ChildOutput``).
        ``talks``: it gets one end of a socket pair, whose descriptor's number is its last argument.
        ``keep``: descriptors of this process that it inherits too.
        """
        with contextlib.ExitStack() as childs_ends, contextlib.ExitStack() as on_error:
            our_end: socket.socket | None = None
            passed: tuple[int, ...] = ()
            if talks:
                our_end, child_end = pair()
                on_error.callback(our_end.close)
                childs_ends.callback(child_end.close)
                passed = (child_end.fileno(),)
            outputs, pipes = [], []
            for take_lines in output:
                reading, writing = os.pipe()
                outputs.append(ChildOutput(reading, take_lines))
                on_error.callback(outputs[-1].close)
                childs_ends.callback(os.close, writing)
                pipes.append(writing)
            process = await asyncio.create_subprocess_exec(
                *command,
                *map(str, passed),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipes[0],
                stderr=pipes[-1],
                env=dict(environment),
                pass_fds=(*passed, *keep),
                start_new_session=True,
            )
            on_error.pop_all()
        return cls(process, outputs, our_end)

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

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Kill it, wait for its end, and read what it has printed last. Closing again does nothing.

        Its pipes are waited for no longer than ``drain_seconds``: processes that have left its group may hold them.
        """
        if self._closed:
            return
        self.kill()
        await self.wait()
        self.kill()  # its descendants that are left
        self._closed = True
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_seconds):
                    for output in self.outputs:
                        await output.ended.wait()
        finally:
            for output in self.outputs:
                output.close()


def resident_bytes(pid: int) -> int | None:
    """Return the memory of a process; None when it is gone, or on a system that does not say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def available_bytes() -> int | None:
    """Return the memory that new processes can take, here and in this cgroup; None on a system that does not say."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        return None
    with contextlib.suppress(OSError, ValueError):  # no limit, or no cgroup of version 2
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text("ascii")) for name in _LIMITS)
        found.append(limit - used)
    return min(found, default=None)


def ending(exit_code: int) -> str:
    """Return how a process ended, for people."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    with contextlib.suppress(ValueError):
        return f"killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return f"killed by signal {-exit_code}"
