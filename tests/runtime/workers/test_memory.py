"""Lines and rows in memory that two processes share; here both are this one."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mldserver.runtime.workers.memory import (
    CHUNK_BYTES,
    Mark,
    SharedArena,
    line_file,
    mapped,
    rows_bytes,
    rows_file,
    rows_from,
)

SIZE = 1 << 16
ROWS = pa.table({"id": [1, 2, None], "name": ["a", "b", "ç"]})


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@given(st.lists(st.binary(min_size=1, max_size=5000), max_size=12))
@settings(max_examples=50)
def test_lines_are_seen_on_the_other_side_as_they_were_put_in_either_way(lines: list[bytes]) -> None:
    arena = SharedArena(SIZE)
    other = memoryview(mapped(arena.fd, SIZE))
    placed = []
    for number, line in enumerate(lines):
        offset = arena.take(len(line))
        if offset is None:
            continue
        if number % 2:
            arena.put(line, offset)
        else:
            arena.writer(line, offset)()
        placed.append((offset, line))
    for offset, line in placed:
        assert bytes(other[offset : offset + len(line)]) == line
        arena.give_back(offset)
    everything = arena.take(SIZE - 64)
    assert everything is not None, "all but the mark is free again"
    arena.close()


def test_a_line_may_still_be_copied_when_the_arena_is_closed() -> None:
    before = descriptors()
    arena = SharedArena(SIZE)
    write = arena.writer(bytearray(b"x" * 1000), 64)
    arena.close()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(write).result()
    assert descriptors() == before


def test_the_mark_outlives_its_writer_and_counts_calls_that_overlap() -> None:
    arena = SharedArena(SIZE)
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
    assert mapped(file, size)[:] == copy
    os.close(file)
    file = line_file(copy)
    assert len(copy) == size, "bytes stay"
    os.close(file)


def test_rows_come_back_from_a_file_without_a_copy_and_stay_when_it_is_closed() -> None:
    file, size = rows_file(ROWS)
    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)
    rows = rows_from(mapped(file, size))
    os.close(file)
    before = pa.total_allocated_bytes()
    assert rows == ROWS
    assert pa.total_allocated_bytes() == before


def test_rows_come_back_from_a_message() -> None:
    assert rows_from(rows_bytes(ROWS)) == ROWS


def test_what_is_no_arrow_stream_is_refused() -> None:
    with pytest.raises(pa.ArrowInvalid):
        rows_from(b"not arrow at all")
