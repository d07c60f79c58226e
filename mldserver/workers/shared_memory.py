"""Memory that server and worker share: lines on their way in, and Arrow streams on their way back.

Measured (2 cores, µs of both sides for a line of 145 KB, 745 KB, 15 MB): a copy into warm shared memory 5, 23, 1,690; a
file in memory of its own 63, 229, 6,960, most of it for pages that are touched for the first time. That would be 10 to
19 % of a batch, so that lines go into one arena that is reused. A line that finds no room there gets a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from mldserver.protocol.messages import Line

if TYPE_CHECKING:
    from mldserver.runtime.interface import Payload

CHUNK_BYTES: Final = 4 << 20
COPIED_BYTES: Final = 1 << 19
"""Of rows that are read from their file, which is cheaper then than mapping it (µs for 67 KB, 560 KB, 2.2 MB: 31, 92, 620
against 89, 128, 250)."""
_ALIGN: Final = 64
_MARK: Final = struct.Struct("=q")


class Mark:
    """The count of running calls into the handler, at the arena's start. It outlives the process that writes it."""

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


class Arena:
    """Room for the lines that one worker has in hand: first fit, so that the pages that are touched stay few and warm."""

    def __init__(self, size: int) -> None:
        """Make the memory; pages cost nothing before they are touched."""
        self.size = size
        self.fd = os.memfd_create("mldserver-lines", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self._view = memoryview(self._map)
        self._free: list[tuple[int, int]] = [(_ALIGN, size - _ALIGN)]
        """Ranges (offset, length), in order, never adjacent; the mark is before them."""
        self.allocated: dict[int, int] = {}
        """The length of each line that has room here, by its offset."""

    @property
    def marked(self) -> bool:
        """Whether the handler is in the worker's hands, or was when that ended."""
        return bool(_MARK.unpack_from(self._view)[0])

    def allocate(self, size: int) -> int | None:
        """Return the offset of ``size`` free bytes, taken from now on; None when no range is long enough."""
        wanted = max(_ALIGN, -(-size // _ALIGN) * _ALIGN)
        for place, (offset, length) in enumerate(self._free):
            if length >= wanted:
                if length == wanted:
                    del self._free[place]
                else:
                    self._free[place] = (offset + wanted, length - wanted)
                self.allocated[offset] = wanted
                return offset
        return None

    def free(self, offset: int) -> None:
        """Let go of what ``allocate`` returned. Raises KeyError for anything else."""
        length = self.allocated.pop(offset)
        place = bisect_left(self._free, (offset, 0))
        if place < len(self._free) and self._free[place][0] == offset + length:
            length += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == offset:
            before = self._free[place - 1]
            self._free[place - 1] = (before[0], before[1] + length)
        else:
            self._free.insert(place, (offset, length))

    def put(self, line: Line) -> int | None:
        """Copy a line into free room; return its offset, or None if the line is very long or no room is long enough.

        Copying 15 MB takes 2 ms, or 7 ms into pages that are touched for the first time.
        """
        # A few long lines leave room for the short ones of others.
        offset = self.allocate(len(line)) if len(line) <= self.size // 4 else None
        if offset is not None:
            self._view[offset : offset + len(line)] = line
        return offset

    def close(self) -> None:
        """Let go of the memory."""
        self._view.release()
        self._map.close()
        os.close(self.fd)


class Held:
    """Keeps a payload's bytes until its batch is done: another process may need them again."""

    def __init__(self, payload: Payload) -> None:
        """Keep ``payload``; a line in a bytearray is emptied once it lies in a file."""
        self.form, self.line = payload.packed()
        self.length = len(self.line)
        self.own_file: int | None = None
        """Holds the bytes in place of ``line``, if they found no room in an arena."""

    def file(self) -> int:
        """Return a file that holds the bytes, for the caller to close. Copying 16 MB into new memory takes 7 ms."""
        if self.own_file is None:
            self.own_file = line_file(self.line)
        return os.dup(self.own_file)

    def close(self) -> None:
        """Close the file, if there is one."""
        if self.own_file is not None:
            os.close(self.own_file)
            self.own_file = None


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


def rows_from(source: bytes | pa.NativeFile) -> pa.Table:
    """Return the rows of an Arrow stream; they lie where it lies. Raises pyarrow.ArrowInvalid for anything else."""
    with pa.ipc.open_stream(source) as reader:
        return reader.read_all()


def rows_in(file: int, size: int) -> pa.Table:
    """Return the rows of a file of ``size`` bytes, which may be closed: they hold no descriptor, however many are kept.

    Raises as ``rows_from`` does.
    """
    if size <= COPIED_BYTES:
        return rows_from(os.pread(file, size, 0))
    with pa.memory_map(f"/proc/self/fd/{file}") as source:  # Python's mmap keeps a descriptor
        return rows_from(source)
