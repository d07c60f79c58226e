"""Lines that wait, are lost, and are told of, with pipes that are read when the test says so."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mldserver.errors import OperatorError
from mldserver.observe.writer import LogOutput, LogWriter

pytestmark = pytest.mark.quick


def told(lines: int, stamp: str) -> bytes:
    return f"lost {lines} {stamp}".encode()


class Gate:
    """A descriptor's ``write`` that waits until it is opened."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.open = threading.Event()
        self.waiting = threading.Event()
        self.error: OSError | None = None

    def write(self, _fd: int, data: memoryview) -> int:
        self.waiting.set()
        self.open.wait()
        if self.error is not None:
            raise self.error
        self.taken.append(bytes(data))
        return len(data)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def writer_of(gate: Gate) -> Iterator[Callable[..., LogWriter]]:
    made: list[LogWriter] = []

    def make(**room: int) -> LogWriter:
        output = LogOutput(os.open(os.devnull, os.O_WRONLY), write=gate.write)  # type: ignore[arg-type]  # memoryviews only
        made.append(LogWriter(output, told, **room))
        return made[-1]

    yield make
    gate.open.set()
    for each in made:
        each.close()


def stalled(writer: LogWriter, gate: Gate) -> None:
    """Let the thread hang in the write of a first line."""
    assert writer.line(b"first", stamp="0")
    gate.waiting.wait()


def settle(writer: LogWriter) -> None:
    """Return when everything is written or lost, and the thread waits for a line again."""
    while True:
        with writer._changed:
            if writer._idle and not writer._queue:
                return
        time.sleep(0.001)


def test_lines_keep_their_order(writer_of: Callable[..., LogWriter], gate: Gate) -> None:
    gate.open.set()
    writer = writer_of()
    for number in range(100):
        writer.line(b"%d" % number, stamp="")
    settle(writer)
    assert b"".join(gate.taken) == b"".join(b"%d\n" % number for number in range(100))


def test_what_finds_no_room_is_lost_and_told_of_where_it_is_missing(
    writer_of: Callable[..., LogWriter], gate: Gate
) -> None:
    writer = writer_of(room=3 * 201, reserve=201)
    stalled(writer, gate)
    assert [writer.line(b"x", stamp=str(number)) for number in range(1, 7)] == [True] * 3 + [False] * 3
    assert writer.line(b"!", stamp="7", urgent=True)
    assert not writer.line(b"!", stamp="8", urgent=True)
    assert not writer.line(b"x", stamp="9")
    gate.open.set()
    settle(writer)
    assert gate.taken == [b"first\n", *[b"x\n"] * 3, b"lost 3 7\n", b"!\n"]
    assert writer.line(b"again", stamp="10")
    settle(writer)
    assert gate.taken[-2:] == [b"lost 2 10\n", b"again\n"]
    assert writer.lost == 5


def test_alone_a_line_may_be_longer_than_the_room(writer_of: Callable[..., LogWriter], gate: Gate) -> None:
    writer = writer_of(room=10, reserve=0)
    stalled(writer, gate)
    assert writer.line(b"x" * 100, stamp="1")
    assert not writer.line(b"y", stamp="2")
    gate.open.set()
    assert writer.close()
    assert gate.taken == [b"first\n", b"x" * 100 + b"\n", b"lost 1 1\n"], "the end reports what is left"


def test_lines_that_cannot_be_written_count_with_those_that_found_no_room(
    writer_of: Callable[..., LogWriter], gate: Gate
) -> None:
    writer = writer_of(room=201, reserve=0)
    stalled(writer, gate)
    assert writer.line(b"x", stamp="1")
    assert not writer.line(b"x", stamp="2")
    gate.error = OSError(28, "No space left on device")
    gate.open.set()
    settle(writer)
    gate.error = None
    assert writer.line(b"y", stamp="3")
    settle(writer)
    assert gate.taken == [b"lost 3 3\n", b"y\n"]


def test_the_end_does_not_wait_for_ever_and_nothing_is_taken_after_it(
    writer_of: Callable[..., LogWriter], gate: Gate
) -> None:
    writer = writer_of()
    stalled(writer, gate)
    assert writer.line(b"x", stamp="1")
    assert not writer.close(0)
    assert not writer.line(b"y", stamp="2")
    gate.open.set()
    assert writer.close()
    assert gate.taken == [b"first\n", b"lost 2 0\n"]


def test_the_end_writes_what_waits(writer_of: Callable[..., LogWriter], gate: Gate) -> None:
    writer = writer_of()
    stalled(writer, gate)
    assert writer.line(b"x", stamp="1")
    gate.open.set()
    assert writer.close()
    assert gate.taken == [b"first\n", b"x\n"]


@pytest.mark.parametrize("closed", ["reader", "descriptor"])
def test_a_reader_that_is_gone_and_a_descriptor_that_is_closed_do_no_harm(closed: str) -> None:
    read, write = os.pipe()
    output = LogOutput(os.dup(write))
    os.close(write)
    if closed == "reader":
        os.close(read)
    else:
        output.close()
    writer = LogWriter(output, told)
    for _ in range(3):
        assert writer.line(b"x", stamp="")
    settle(writer)
    assert writer.close()
    if closed == "descriptor":
        assert os.read(read, 1) == b""
        os.close(read)


def test_a_pipe_that_nobody_reads_loses_lines_and_tells_of_them_when_it_is_read_again() -> None:
    read, write = os.pipe()
    writer = LogWriter(LogOutput(write), told, room=10_000, reserve=0)
    taken = 0
    while writer.line(b"x" * 999, stamp="s"):
        taken += 1
    data = os.read(read, 1 << 16)
    while not writer.line(b"again", stamp="t"):
        data += os.read(read, 1 << 16)
    while b"again" not in data:
        data += os.read(read, 1 << 16)
    lost = writer.lost
    assert data == b"".join([b"x" * 999 + b"\n"] * taken) + b"lost %d t\nagain\n" % lost
    assert writer.close()
    os.close(read)


def test_lines_before_a_rotation_go_to_the_old_file_and_later_ones_to_the_new(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    writer = LogWriter(LogOutput(path), told)
    writer.line(b"one", stamp="")
    settle(writer)
    rotated = path.rename(tmp_path / "x.log.1")
    writer.line(b"two", stamp="")
    writer.reopen()
    writer.line(b"three", stamp="")
    settle(writer)
    (tmp_path / "x.log").rename(tmp_path / "x.log.2")
    path.mkdir()
    with pytest.raises(OperatorError, match="cannot be opened: Is a directory"):
        writer.reopen()
    writer.line(b"four", stamp="")
    assert writer.close()
    assert rotated.read_bytes() == b"one\ntwo\n"
    assert (tmp_path / "x.log.2").read_bytes() == b"three\nfour\n"


def test_a_stream_is_not_opened_again(writer_of: Callable[..., LogWriter]) -> None:
    writer = writer_of()
    assert writer.path is None
    writer.reopen()
    settle(writer)


def test_a_named_pipe_that_nobody_reads_is_not_waited_for_when_it_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    output = LogOutput(path)
    first = output._fd
    writer = LogWriter(output, told)
    writer.reopen()
    writer.line(b"x", stamp="1")
    settle(writer)
    assert output._fd != first
    assert os.get_blocking(output._fd), "a reader that is slow must not lose lines"
    assert os.read(reader, 10) == b"x\n"
    os.close(reader)
    with pytest.raises(OperatorError, match="cannot be opened"):
        writer.reopen()
    writer.line(b"y", stamp="2")
    settle(writer)
    assert writer.lost == 1
    assert writer.close()
