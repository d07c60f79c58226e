"""A line on its way to a worker, as often as that takes."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import TYPE_CHECKING, Final

from mldserver.runtime.workers.memory import line_file, made
from mldserver.runtime.workers.wire import Place

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from mldserver.protocol.messages import Line
    from mldserver.runtime.workers.process import WorkerProcess

__all__ = ["Held"]

INLINE_BYTES: Final = 4096
"""Shorter lines go inside their message: one copy more is cheaper there than keeping account of room."""


class Held:
    """Keeps a line until its batch is done: another process may have to be given it again."""

    def __init__(self, line: Line) -> None:
        """Keep ``line``; a long bytearray is emptied once it lies in a file."""
        self._line = line
        self._length = len(line)
        self._file: int | None = None

    async def __aenter__(self) -> Self:
        """Begin."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let go of the file, if there is one: beside the loop, as freeing 200 MB takes the kernel 25 ms."""
        file, self._file = self._file, None
        if file is not None:
            # Not waited for: nobody needs to know when, and a cancellation must not keep it open.
            asyncio.get_running_loop().run_in_executor(None, os.close, file)

    async def lay(self, process: WorkerProcess) -> tuple[Place, tuple[int, ...], int | None]:
        """Put the line where the process can read it; return where, the files to send, and its offset in the arena.

        Raises WorkerGone.
        """
        if self._length <= INLINE_BYTES:
            return Place(self._length, inline=bytes(self._line)), (), None
        if process.room_for(self._length):
            offset = await process.put(self._line)
            return Place(self._length, offset=offset), (), offset
        if self._file is None:
            self._file = await made(partial(line_file, self._line), os.close)
        return Place(self._length), (self._file,), None
