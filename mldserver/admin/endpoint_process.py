"""The endpoint's process: takes documents from the server, and serves permitted clients.

Not for people: ``python -m mldserver.admin.endpoint_process FD``. It yields to the server in everything: CPU, memory, life.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Final

import structlog
import uvloop
from structlog.typing import EventDict

from mldserver.admin.endpoint import Endpoint
from mldserver.admin.endpoint_messages import (
    Answered,
    Document,
    LogLine,
    Renew,
    Start,
    Steer,
    Taken,
    ToEndpoint,
)
from mldserver.base.service import entitle
from mldserver.base.tls import ServerTLS
from mldserver.children.channel import Channel, Descriptors
from mldserver.children.parent_death import die_with_parent

_NICE: Final = 5
"""A quarter of a processor that others want too: enough to answer at once, and no flood takes more."""
_MEMORY_BYTES: Final = 512 * 2**20
"""Beyond it the process ends, and a fresh one begins."""
_DESCRIPTORS: Final = 512


class EndpointChild:
    """The endpoint's side of the channel."""

    def __init__(self, end: socket.socket) -> None:
        """``end``: the socket to the server."""
        self._end = end
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answered]] = {}
        self._started: asyncio.Queue[tuple[Start, list[socket.socket]]] = asyncio.Queue()
        self._tls: ServerTLS | None = None
        self._renewed = asyncio.Event()
        self._documents: asyncio.Queue[bytes] = asyncio.Queue()
        self._channel: Channel[ToEndpoint]

    async def run(self) -> None:
        """Serve until the server's end."""
        self._channel = Channel(self._end, ToEndpoint, receive=self._receive, ended=lambda _: os._exit(0))
        structlog.configure(processors=[structlog.processors.add_log_level, self._log])
        start, (listener, *for_metrics) = await self._started.get()
        entitle(start.pipeline, "admin endpoint")
        self._tls = start.tls()
        endpoint = Endpoint(
            ask=self._ask,
            uid=os.getuid(),
            token_file=Path(start.token_file),
            guarded=start.guarded,
            insecure=start.insecure,
            tls=self._tls,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(endpoint.serve(listener))
            for other in for_metrics:
                group.create_task(endpoint.serve(other, metrics_only=True))
            group.create_task(endpoint.tell_refusals())
            group.create_task(self._read_again())
            while True:
                document = await self._documents.get()
                try:
                    endpoint.take(document)
                except Exception:  # noqa: BLE001  # the next may be better
                    traceback.print_exc()
                self._channel.send(Taken())

    async def _read_again(self) -> None:
        while await self._renewed.wait():
            self._renewed.clear()
            if self._tls is not None:
                await self._tls.read_again()

    async def _ask(self, act: str, argument: str, who: str) -> Answered:
        number = next(self._numbers)
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._channel.send(Steer(number, act, argument, who))
        try:
            return await answer
        finally:
            del self._asked[number]

    def _log(self, _logger: object, _method: str, fields: EventDict) -> EventDict:
        """Send an event to the server's log."""
        event, level = fields.pop("event"), fields.pop("level")
        self._channel.send(LogLine(level, event, dict(fields)))
        raise structlog.DropEvent

    def _receive(self, message: ToEndpoint, files: Descriptors) -> None:
        match message:
            case Start():
                listeners = [socket.socket(fileno=files.pop(0)) for _ in tuple(files)]
                self._started.put_nowait((message, listeners))
            case Document():
                self._documents.put_nowait(message.status)
            case Renew():
                self._renewed.set()
            case Answered() if message.number in self._asked:
                self._asked[message.number].set_result(message)


def main(arguments: list[str]) -> None:
    """Serve through the descriptor that ``arguments`` name. Never returns."""
    # Ctrl-C on a terminal is for the server, which ends this process with itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the server opens its log file again
    with contextlib.suppress(OSError, AttributeError):  # Linux
        die_with_parent()
        Path("/proc/self/oom_score_adj").write_text("900", encoding="ascii")
        # Where each session gets an equal share of the processors, niceness counts only within its own.
        Path("/proc/self/autogroup").write_text(str(_NICE), encoding="ascii")
    os.nice(_NICE)
    limit(resource.RLIMIT_DATA, _MEMORY_BYTES)
    limit(resource.RLIMIT_NOFILE, _DESCRIPTORS)
    end = socket.socket(fileno=int(arguments[0]))
    end.set_inheritable(False)
    uvloop.run(EndpointChild(end).run())


def limit(kind: int, most: int) -> None:
    """Limit what this process may have of a resource, unless a lower limit holds already."""
    hard = resource.getrlimit(kind)[1]
    allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (allowed, allowed))


if __name__ == "__main__":
    main(sys.argv[1:])
