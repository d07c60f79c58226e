from __future__ import annotations

import io
import sys
import threading

import pytest

from mldserver.observe.logging import CaughtStream, caught_output

pytestmark = pytest.mark.quick


def test_lines_are_passed_on_when_they_are_whole() -> None:
    lines: list[str] = []
    stream = CaughtStream(lines.append)
    print("a", 1, end="", file=stream, flush=True)
    assert lines == []
    print("b\r\nc\n\nd", end="", file=stream)
    assert lines == ["a 1b", "c", ""]
    stream.finish()
    stream.finish()
    assert lines == ["a 1b", "c", "", "d"]


def test_it_is_a_text_stream_that_is_no_terminal() -> None:
    stream = CaughtStream(lambda _text: None)
    assert (stream.writable(), stream.readable(), stream.isatty(), stream.encoding) == (
        True,
        False,
        False,
        "utf-8",
    )
    assert stream.buffer.writable()
    with pytest.raises(io.UnsupportedOperation):
        stream.fileno()


def test_bytes_are_taken_for_utf8_whatever_their_chunking() -> None:
    lines: list[str] = []
    stream = CaughtStream(lines.append)
    for piece in (b"\xc3", b"\xa4\xff", b"\n"):
        assert stream.buffer.write(piece) == len(piece)
    assert lines == ["ä\ufffd"]


def test_text_without_an_end_is_passed_on_in_pieces() -> None:
    lines: list[str] = []
    stream = CaughtStream(lines.append)
    for _ in range(5):
        stream.write("x" * 30_000)
    stream.write("\n")
    assert [len(line) for line in lines] == [65_536, 65_536, 150_000 - 2 * 65_536]


def test_threads_do_not_mix_their_lines() -> None:
    lines: list[str] = []
    stream = CaughtStream(lines.append)
    turn = threading.Barrier(2)

    def say(word: str) -> None:
        for _ in range(20):
            turn.wait()
            stream.write(word)
            turn.wait()
            stream.write("!\n")

    threads = [threading.Thread(target=say, args=(word,)) for word in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(lines) == ["left!"] * 20 + ["right!"] * 20


def test_what_the_log_itself_prints_does_not_come_back() -> None:
    fallback = io.StringIO()
    lines: list[str] = []

    def emit(line: str) -> None:
        lines.append(line)
        stream.write("from the log\n")

    stream = CaughtStream(emit, fallback=fallback)
    stream.write("hello\n")
    assert lines == ["hello"]
    assert fallback.getvalue() == "from the log\n"


def test_without_a_fallback_it_goes_nowhere() -> None:
    lines: list[str] = []

    def emit(line: str) -> None:
        lines.append(line)
        stream.write("from the log\n")

    stream = CaughtStream(emit)
    stream.write("hello\n")
    assert lines == ["hello"]


def test_a_log_that_fails_is_not_mistaken_for_one_that_prints() -> None:
    lines: list[str] = []

    def emit(line: str) -> None:
        if line == "bad":
            raise ValueError(line)
        lines.append(line)

    stream = CaughtStream(emit)
    with pytest.raises(ValueError, match="bad"):
        stream.write("bad\n")
    stream.write("good\n")
    assert lines == ["good"]


def test_prints_are_caught_for_a_while() -> None:
    former = sys.stdout, sys.stderr
    said: list[tuple[str, str]] = []
    with caught_output(lambda stream, text: said.append((stream, text))):
        print("to out")
        print("to err", file=sys.stderr)
        print("without end", end="")
    assert (sys.stdout, sys.stderr) == former
    assert said == [("stdout", "to out"), ("stderr", "to err"), ("stdout", "without end")]
