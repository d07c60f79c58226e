"""The floor of a second process: the echo, but each line is laid into shared memory and told to a child before it is answered.

No protocol, no order, no time-outs, one connection: what framing and handing over cost at the very least.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import sys
from typing import cast

import uvloop

__all__: list[str] = []

_BUFFER = bytearray(256 << 10)
_ROOM = 256 << 20
_ANSWER = b'{"action":"status","responseFor":"processRecords"}\n'


class Relay(asyncio.BufferedProtocol):
    """Answers a line when the child has."""

    def __init__(self, shared: mmap.mmap, child: socket.socket) -> None:
        """Share ``shared`` with ``child``."""
        self._shared = memoryview(shared)
        self._child = child
        self._size = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self._transport = cast("asyncio.Transport", transport)
        asyncio.get_running_loop().add_reader(self._child, self._answered)

    def get_buffer(self, sizehint: int) -> bytearray:  # the interface
        """Give the one buffer."""
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """Lay the bytes beside those before; tell the child of the line that they end."""
        end = self._size + nbytes
        self._shared[self._size : end] = memoryview(_BUFFER)[:nbytes]
        self._size = end
        if _BUFFER[nbytes - 1] == 10:
            self._size = 0
            self._child.send(b"%d" % end)

    def _answered(self) -> None:
        self._child.recv(64)
        self._transport.write(_ANSWER)


def _be_child(end: socket.socket) -> None:
    while told := end.recv(64):
        end.send(told)


async def serve(path: str) -> None:
    """Listen until killed."""
    shared = mmap.mmap(-1, _ROOM)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:  # nothing has been started yet that a fork could hurt
        ours.close()
        _be_child(theirs)
        os._exit(0)
    theirs.close()
    ours.setblocking(False)
    server = await asyncio.get_running_loop().create_unix_server(lambda: Relay(shared, ours), path)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
