from __future__ import annotations

import errno
import os
import pty
from collections.abc import Iterator
from pathlib import Path

import pytest

from mldserver.observe.writer import LogOutput

pytestmark = pytest.mark.quick


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[tuple[Path, LogOutput]]:
    path = tmp_path / "deep" / "x.log"
    output = LogOutput(path)
    yield path, output
    output.close()


def fresh(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def test_lines_are_appended(log_file: tuple[Path, LogOutput]) -> None:
    path, output = log_file
    assert output.line(b"one")
    LogOutput(path).close()
    assert output.line(b"two")
    assert path.read_bytes() == b"one\ntwo\n"
    assert not output.is_terminal


def test_after_a_rotation_lines_go_to_the_new_file_and_none_is_lost(log_file: tuple[Path, LogOutput]) -> None:
    path, output = log_file
    output.line(b"one")
    rotated = path.rename(path.with_suffix(".1"))
    output.line(b"two")
    output.swap(fresh(path))
    output.line(b"three")
    assert rotated.read_bytes() == b"one\ntwo\n"
    assert path.read_bytes() == b"three\n"


def test_a_stream_is_not_taken_away(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    output = LogOutput(os.dup(fd))
    output.line(b"x")
    output.close()
    os.write(fd, b"still open")
    os.close(fd)
    assert (tmp_path / "out").read_bytes() == b"x\nstill open"


def test_a_terminal_is_known_as_one() -> None:
    master, slave = pty.openpty()
    output = LogOutput(slave)
    assert output.is_terminal
    output.close()
    os.close(master)


def test_a_full_disk_loses_lines_and_says_so() -> None:
    output = LogOutput(os.open("/dev/full", os.O_WRONLY))
    assert not output.line(b"x")
    assert not output.line(b"y")
    output.close()


def test_a_line_that_the_full_disk_cut_off_does_not_swallow_the_next(
    log_file: tuple[Path, LogOutput],
) -> None:
    path, file = log_file
    room = iter([4, 0, 0, 1, 0])

    def write(fd: int, data: memoryview) -> int:
        if not (taken := next(room, len(data))):
            raise OSError(errno.ENOSPC, "full")
        return os.write(fd, data[:taken])

    output = LogOutput(os.open(path, os.O_WRONLY | os.O_APPEND), write=write)  # type: ignore[arg-type]  # it is called with memoryviews only
    assert not output.line(b"one, cut off")
    assert not output.line(b"two, lost")
    assert not output.line(b"three, lost but for the end that it gives the first")
    assert output.line(b"four")
    assert output.line(b"five")
    output.close()
    assert path.read_bytes() == b"one,\nfour\nfive\n"
    assert file.line(b"six")
    assert path.read_bytes() == b"one,\nfour\nfive\nsix\n"


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_file_whose_last_line_was_cut_off_is_gone_on_with_on_a_line_of_its_own(
    tmp_path: Path, end: bytes
) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"cut off" + end)
    output = LogOutput(path)
    output.line(b"one")
    path.rename(tmp_path / "old.log")
    path.write_bytes(b"of another" + end)
    output.swap(fresh(path))
    output.line(b"two")
    output.line(b"three")
    output.close()
    assert (tmp_path / "old.log").read_bytes() == b"cut off\none\n"
    assert path.read_bytes() == b"of another\ntwo\nthree\n"


def test_a_reader_that_went_away_does_no_harm() -> None:
    read, write = os.pipe()
    os.close(read)
    output = LogOutput(write)
    assert not output.line(b"x")
    output.close()


def test_what_is_logged_after_the_end_is_lost() -> None:
    output = LogOutput(os.open(os.devnull, os.O_WRONLY))
    output.close()
    output.close()
    assert not output.line(b"x")


def test_a_line_is_written_whole_however_little_the_kernel_takes() -> None:
    read, write = os.pipe()
    turns = iter([3, BlockingIOError(errno.EAGAIN, "full"), 1])

    def little(fd: int, data: memoryview) -> int:
        turn = next(turns, len(data))
        if isinstance(turn, BlockingIOError):
            raise turn
        return os.write(fd, data[:turn])

    output = LogOutput(write, write=little)  # type: ignore[arg-type]  # it is called with memoryviews only
    assert output.line(b"a whole line")
    output.close()
    assert os.read(read, 100) == b"a whole line\n"
    os.close(read)
