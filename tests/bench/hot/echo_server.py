"""The floor: uvloop receives the same bytes into one buffer, and answers each line."""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

__all__: list[str] = []

_BUFFER = bytearray(256 << 10)
_ANSWER = b'{"action":"status","responseFor":"processRecords"}\n'


class Echo(asyncio.BufferedProtocol):
    """Answers a line when its end has come, without a look at it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> bytearray:  # the interface
        """Give the one buffer."""
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """Answer, if these bytes end a line. The client waits for the answer: no second line is behind the first."""
        if _BUFFER[nbytes - 1] == 10:
            self._transport.write(_ANSWER)


async def serve(path: str) -> None:
    """Listen until killed."""
    server = await asyncio.get_running_loop().create_unix_server(Echo, path)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
