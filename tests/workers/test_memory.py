"""Lines and rows in memory that two processes share; here both are this one."""

from __future__ import annotations

import mmap
import os

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
        arena.free(offset or 0)
    assert arena.allocate(SIZE - 64) is not None, "all but the mark is free again"
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


def test_a_line_without_room_is_kept_in_a_file_until_its_batch_is_done() -> None:
    before = descriptors()
    held = Held(MLDLine(bytearray(b"x" * 100), Version.V2))
    files = [held.file(), held.file()]
    assert [os.pread(file, 200, 0) for file in files] == [b"x" * 100] * 2
    for file in files:
        os.close(file)
    held.close()
    held.close()
    assert descriptors() == before
