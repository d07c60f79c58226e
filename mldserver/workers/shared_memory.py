"""Memory that server and worker share: lines on their way in, and Arrow streams on their way back.

Measured here (2 cores, ns a record of a 145 KB line of 500): copying into warm shared memory 25, sending it over the
socket 130, a fresh file in memory 90, most of it for pages that are touched for the first time.

``Arena`` says which bytes are taken: first fit, since a first touch of a page costs microseconds and a copy into a warm
one nanoseconds. ``Room`` gives lines their range, in the order of asking. Whoever gives room back wakes as many of those
who wait as it is enough for, and nobody else: with 2,000 lines on their way, a look by each of them at each line that is
done would be most of the server's work.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import struct
import threading
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from mldserver.protocol.messages import Line

__all__ = [
    "CHUNK_BYTES",
    "Arena",
    "Descriptors",
    "Mark",
    "Room",
    "SharedArena",
    "line_file",
    "made",
    "mapped",
    "rows_bytes",
    "rows_file",
    "rows_from",
]

_T = TypeVar("_T")

Descriptors = list[int]
"""Open files that came with a message; whoever takes the message closes them."""

CHUNK_BYTES: Final = 4 << 20
MARK_BYTES: Final = 64
_MARK: Final = struct.Struct("=q")


class Mark:
    """At the arena's beginning: how many calls into the handler are under way. Outlives whoever writes it."""

    def __init__(self, file: int) -> None:
        """Write into the arena that is ``file``."""
        self._map = mmap.mmap(file, mmap.PAGESIZE)
        self._lock = threading.Lock()
        self._count = 0

    def add(self, number: int) -> None:
        """Count a call that begins (1) or ends (-1); from any thread."""
        with self._lock:
            self._count += number
            _MARK.pack_into(self._map, 0, self._count)


class SharedArena:
    """Room for the lines that one worker has in hand."""

    def __init__(self, size: int) -> None:
        """Make the memory; pages cost nothing before they are touched."""
        self.size = size
        self.fd = os.memfd_create("mldserver-lines", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)
        self._view = memoryview(self._map)
        self._arena = Arena(size)
        self._arena.take(MARK_BYTES)

    def take(self, size: int) -> int | None:
        """Return the offset of room for a line, or None when there is none now."""
        return self._arena.take(size)

    def put(self, line: Line, offset: int) -> None:
        """Copy a line into its room."""
        self._view[offset : offset + len(line)] = line

    def writer(self, line: Line, offset: int) -> Callable[[], None]:
        """Return what copies a line into its room without holding the interpreter. To be called once, in any thread.

        New pages cost far more than the copy; and the arena may be closed meanwhile.
        """
        file = os.dup(self.fd)

        def write() -> None:
            try:
                with memoryview(line) as view:
                    _write(file, view, offset)
            finally:
                os.close(file)

        return write

    @property
    def marked(self) -> bool:
        """Whether the handler is in the worker's hands, or was when that ended."""
        return bool(_MARK.unpack_from(self._view)[0])

    def give_back(self, offset: int) -> None:
        """The line at ``offset`` is done with."""
        self._arena.give_back(offset)

    def close(self) -> None:
        """Let go of the memory."""
        self._view.release()
        self._map.close()
        os.close(self.fd)


async def made(make: Callable[[], _T], close: Callable[[_T], None]) -> _T:
    """Return what ``make`` makes in another thread; when the caller is cancelled meanwhile, it is closed once it is there."""
    making = asyncio.get_running_loop().run_in_executor(None, make)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(lambda done: None if done.exception() else close(done.result()))
        raise


def line_file(line: Line) -> int:
    """Return a file in memory that holds the line, and no other copy of it any more if it is a bytearray. Blocking.

    What was copied is let go of from the end on, so that a line of 200 MB never takes that twice.
    """
    file = os.memfd_create("mldserver-line", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, len(line))
        end = len(line)
        while end:
            start = max(0, end - CHUNK_BYTES)
            with memoryview(line) as view, view[start:end] as part:
                _write(file, part, start)
            if isinstance(line, bytearray):
                del line[start:]
            end = start
    except BaseException:
        os.close(file)
        raise
    return file


def _write(file: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        with data[done:] as rest:
            done += os.pwrite(file, rest, offset + done)


def mapped(file: int, length: int) -> mmap.mmap:
    """Return a file's bytes without a copy; the file may be closed."""
    return mmap.mmap(file, length, prot=mmap.PROT_READ)


def rows_file(rows: pa.Table) -> tuple[int, int]:
    """Return a file in memory with the rows as an Arrow stream, and its size."""
    file = os.memfd_create("mldserver-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with pa.OSFile(f"/proc/self/fd/{file}", "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
        # Whoever maps it must not be hurt by what becomes of it here.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return file, os.fstat(file).st_size
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(file)
        raise


def rows_bytes(rows: pa.Table) -> bytes:
    """Return the rows as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return bytes(sink.getvalue())


def rows_from(source: bytes | mmap.mmap) -> pa.Table:
    """Return the rows of an Arrow stream; they lie where it lies. Raises pyarrow.ArrowInvalid for anything else."""
    with pa.ipc.open_stream(pa.py_buffer(source)) as reader:
        return reader.read_all()


_ALIGN = 64


class Arena:
    """Hands out ranges of ``size`` bytes."""

    def __init__(self, size: int) -> None:
        """Begin with everything free."""
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []
        """Ranges (offset, length), in order, never adjacent."""
        self._taken: dict[int, int] = {}

    @property
    def free(self) -> int:
        """How many bytes are free, in however many pieces."""
        return sum(length for _, length in self._free)

    def take(self, size: int) -> int | None:
        """Return the offset of ``size`` free bytes, taken from now on; None when no piece is long enough."""
        wanted = max(_ALIGN, -(-size // _ALIGN) * _ALIGN)
        for place, (offset, length) in enumerate(self._free):
            if length >= wanted:
                if length == wanted:
                    del self._free[place]
                else:
                    self._free[place] = (offset + wanted, length - wanted)
                self._taken[offset] = wanted
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Let go of what ``take`` returned. Raises KeyError for anything else."""
        length = self._taken.pop(offset)
        place = bisect_left(self._free, (offset, 0))
        if place < len(self._free) and self._free[place][0] == offset + length:
            length += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == offset:
            before = self._free[place - 1]
            self._free[place - 1] = (before[0], before[1] + length)
        else:
            self._free.insert(place, (offset, length))


class _Arena(Protocol):
    def take(self, size: int, /) -> int | None: ...
    def give_back(self, offset: int, /) -> Any: ...


class Room:
    """Who has room in one arena, and who waits for it."""

    def __init__(self, arena: _Arena) -> None:
        """Hand out what ``arena`` has free."""
        self._arena = arena
        self._waiting: deque[tuple[int, asyncio.Future[int | None]]] = deque()
        """How many bytes each wants, first come first; cancelled ones are passed over."""
        self._closed = False

    def at_once(self, size: int) -> int | None:
        """Return the offset of ``size`` bytes; None when there are none, or when others wait for them already."""
        return None if self._waiting else self._arena.take(size)

    async def wait(self, size: int) -> int | None:
        """Return the offset of ``size`` bytes once it is this caller's turn; None when there will be none any more.

        To be asked for no more than the whole arena can hold. A caller that is cancelled has taken nothing.
        """
        if self._closed:
            return None
        future: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, future))
        self._hand_out()
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and (offset := future.result()) is not None:
                self._arena.give_back(offset)
            self._hand_out()
            raise

    def give_back(self, offset: int) -> None:
        """Let go of room; those who wait come first. Raises KeyError for what is not taken."""
        self._arena.give_back(offset)
        if self._waiting:
            self._hand_out()

    def close(self) -> None:
        """Let nobody wait any longer."""
        self._closed = True
        for _, future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    def _hand_out(self) -> None:
        while self._waiting:
            size, future = self._waiting[0]
            if not future.done():
                # A long line is not passed by short ones, or it might wait for ever.
                offset = self._arena.take(size)
                if offset is None:
                    return
                future.set_result(offset)
            self._waiting.popleft()
