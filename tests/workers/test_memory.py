"""Lines and rows in memory that two processes share; here both are this one."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from workers.kit import descriptors

from mldserver.protocol.messages import Version
from mldserver.runtime.interface import MLDLine
from mldserver.workers import shared_memory
from mldserver.workers.shared_memory import (
    CHUNK_BYTES,
    Arena,
    Held,
    Mark,
    line_file,
    made,
    rows_bytes,
    rows_file,
    rows_from,
    rows_in,
)

SIZE = 1 << 16
ROWS = pa.table({"id": [1, 2, None], "name": ["a", "b", "ç"]})


def test_lines_are_seen_on_the_other_side_as_they_were_put_in() -> None:
    arena = Arena(SIZE)
    other = memoryview(mmap.mmap(arena.fd, SIZE, prot=mmap.PROT_READ))
    lines = [os.urandom(size) for size in (1, 64, 1999, 5000)]
    placed = [(arena.put(line), line) for line in lines]
    for offset, line in placed:
        assert offset is not None
        assert bytes(other[offset : offset + len(line)]) == line
    assert arena.put(b"x" * (SIZE // 4 + 1)) is None, "others need room too"
    for offset, _ in placed:
        arena.give_back(offset or 0)
    assert arena.take(SIZE - 64) is not None, "all but the mark is free again"
    assert arena.put(b"x") is None
    arena.close()


def test_the_mark_outlives_its_writer_and_counts_calls_that_overlap() -> None:
    arena = Arena(SIZE)
    assert not arena.marked
    mark = Mark(arena.fd)
    mark.add(1)
    mark.add(1)
    mark.add(-1)
    del mark
    assert arena.marked
    Mark(arena.fd).add(0)
    assert not arena.marked
    arena.close()


@pytest.mark.parametrize("size", [1, CHUNK_BYTES, 2 * CHUNK_BYTES + 17])
def test_a_line_of_its_own_file_is_whole_there_and_gone_here(size: int) -> None:
    line = bytearray(os.urandom(size))
    copy = bytes(line)
    file = line_file(line)
    assert line == b""
    assert mmap.mmap(file, size, prot=mmap.PROT_READ)[:] == copy
    os.close(file)
    file = line_file(copy)
    assert len(copy) == size, "bytes stay"
    os.close(file)


@pytest.mark.parametrize("copied", [0, 1 << 20], ids=["mapped", "read"])
def test_rows_come_back_from_a_file_and_hold_no_descriptor_when_it_is_closed(
    monkeypatch: pytest.MonkeyPatch, copied: int
) -> None:
    monkeypatch.setattr(shared_memory, "COPIED_BYTES", copied)
    open_before, allocated = descriptors(), pa.total_allocated_bytes()
    file, size = rows_file(ROWS)
    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)
    rows = rows_in(file, size)
    os.close(file)
    assert rows == ROWS
    assert (descriptors(), pa.total_allocated_bytes()) == (open_before, allocated)


def test_rows_come_back_from_a_message() -> None:
    assert rows_from(rows_bytes(ROWS)) == ROWS


def test_what_is_no_arrow_stream_is_refused() -> None:
    with pytest.raises(pa.ArrowInvalid):
        rows_from(b"not arrow at all")


async def test_a_file_that_is_made_when_nobody_waits_for_it_any_more_is_closed() -> None:
    go, closed = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def make() -> int:
        go.wait()
        return line_file(b"x")

    def close(file: int) -> None:
        os.close(file)
        loop.call_soon_threadsafe(closed.set)

    before = descriptors()
    making = asyncio.create_task(made(make, close))
    await asyncio.sleep(0)
    making.cancel()
    await asyncio.wait({making})
    assert making.cancelled()
    go.set()
    await closed.wait()
    assert descriptors() == before


async def test_what_is_made_comes_back_and_so_does_why_it_cannot_be() -> None:
    assert await made(lambda: 7, print) == 7
    with pytest.raises(ZeroDivisionError):
        await made(lambda: 1 // 0, print)


async def test_a_long_lines_file_is_closed_however_busy_other_threads_are_and_nobody_waits_for_that() -> None:
    go = threading.Event()
    executor = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(executor)
    before = descriptors()
    held = Held(MLDLine(bytearray(b"x" * 100), Version.V2))
    held.own_file = line_file(b"x")
    executor.submit(go.wait)
    held.let_go()
    assert descriptors() == before + 1
    go.set()
    await asyncio.to_thread(int)
    assert descriptors() == before
