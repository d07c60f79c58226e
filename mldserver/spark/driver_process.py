"""A driver's process as the server holds it: started, spoken with, read, killed. A thin shell.

The child leads a session and a process group of its own, so that a Ctrl-C on the terminal does not reach it, and one
signal ends it with its JVM. What it prints is read to the end, or its pipes would fill up and stop it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, NamedTuple

from mldserver.spark.driver_messages import Decoder, Message, encode
from mldserver.spark.spark_log import Lines

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

__all__ = ["DriverProcess", "driver_command"]

_READ_BYTES = 8192
"""Of output at a time: thousands of empty lines at most."""

_PAUSE_SECONDS = 0.01

_KILL_SECONDS = 10
"""How long a killed group may take to be gone, and its pipes to close."""


def driver_command() -> list[str]:
    """Return the command line of a driver, but for its ``--fd N``."""
    return [sys.executable, "-m", "mldserver.spark.driver"]


class _Output(NamedTuple):
    """Our side of a pipe that the child writes to."""

    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport


class DriverProcess:
    """One child. Made by ``start``; ``kill`` must be awaited in the end, whatever happens."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        outputs: tuple[_Output, _Output],
    ) -> None:
        """Hold a child that runs, this side of its socket, and the pipes of its stdout and stderr."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._outputs = outputs

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> DriverProcess:
        """Start a child with one end of a socket pair. Raises OSError."""
        async with contextlib.AsyncExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(theirs.close)
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            failed = undo.enter_context(contextlib.ExitStack())
            failed.callback(writer.close)
            outputs, ends = [], []
            for _ in ("stdout", "stderr"):
                output, end = await _open_pipe()
                undo.callback(os.close, end)
                failed.callback(output.transport.close)
                outputs.append(output)
                ends.append(end)
            process = await asyncio.create_subprocess_exec(
                *command,
                "--fd",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=ends[0],
                stderr=ends[1],
                env=dict(environment),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
            failed.pop_all()
        return cls(process, reader, writer, (outputs[0], outputs[1]))

    @property
    def pid(self) -> int:
        """The child's process id, which is its group's too."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; negative for a signal, None while it runs."""
        return self._process.returncode

    def send(self, message: Message) -> None:
        """Send a message; when the child is gone, ``messages`` ends, and that is where it is noticed."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def messages(self) -> AsyncGenerator[Message, None]:
        """Yield the child's messages until its end of the socket is closed. Raises WireError for anything else."""
        decoder = Decoder()
        with contextlib.suppress(ConnectionError):
            while data := await self._reader.read(1 << 16):
                for message in decoder.feed(data):
                    yield message

    async def read_output(self, stdout: Callable[[str], bool], stderr: Callable[[str], bool]) -> None:
        """Pass on every line that the child, its JVM and its workers print, until all of them are gone.

        What it is passed to returns False when that is too much of it: then the child is made to wait a little.
        """
        out, err = self._outputs
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_pass_lines(out.reader, stdout))
            tasks.create_task(_pass_lines(err.reader, stderr))

    def signal_group(self) -> None:
        """Kill the child and all of its group, at once, without waiting."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def hang_up(self) -> None:
        """Let ``messages`` end, whoever holds the other end of the socket."""
        self._writer.transport.abort()

    async def wait(self) -> int:
        """Wait for the child's end and return its exit code."""
        return await self._process.wait()

    async def kill(self) -> None:
        """Kill the group and wait until the child is reaped. May be called at any time, and again.

        The pipes are closed here, not awaited: Spark's Python workers lead groups of their own and hold them for a
        moment longer than the JVM lives, or than the event loop does.
        """
        self.signal_group()
        self._writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_SECONDS):
                await self._process.wait()
                with contextlib.suppress(ConnectionError):
                    await self._writer.wait_closed()
        for output in self._outputs:
            output.transport.close()
        # A closed transport lets go of its pipe in the loop's next turn.
        await asyncio.sleep(0)


async def _open_pipe() -> tuple[_Output, int]:
    """Open a pipe; return the side that is read here, and the descriptor that the child writes to."""
    ours, theirs = os.pipe()
    reader = asyncio.StreamReader()
    file = os.fdopen(ours, "rb", buffering=0)
    try:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), file
        )
    except BaseException:
        file.close()
        os.close(theirs)
        raise
    return _Output(reader, transport), theirs


async def _pass_lines(stream: asyncio.StreamReader, take: Callable[[str], bool]) -> None:
    lines = Lines()
    while data := await stream.read(_READ_BYTES):
        passed = [take(line) for line in lines.feed(data)]
        # Even lines that nobody keeps cost time: whoever floods the pipe waits, others on the event loop do not.
        await asyncio.sleep(0 if all(passed) else _PAUSE_SECONDS)
    for line in lines.end():
        take(line)
