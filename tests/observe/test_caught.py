"""What a handler prints in this process, line by line."""

from __future__ import annotations

import sys

import pytest

from mldserver.observe.logging import caught_output

pytestmark = pytest.mark.quick


def test_prints_are_caught_line_by_line_for_a_while() -> None:
    former = sys.stdout, sys.stderr
    said: list[tuple[str, str]] = []
    with caught_output(lambda stream, text: said.append((stream, text))):
        print("to", 1, end="", flush=True)
        assert said == []
        print("b\r\nc\n")
        print("to err", file=sys.stderr)
        for piece in (b"\xc3", b"\xa4\xff", b"\n"):
            assert sys.stdout.buffer.write(piece) == len(piece)
        print("\ud800")
        assert not sys.stdout.isatty()
        print("without end", end="")
    assert (sys.stdout, sys.stderr) == former
    lines = ["to 1b", "c", "", "ä\ufffd", "\\ud800", "without end"]
    assert said == [
        *(("stdout", line) for line in lines[:3]),
        ("stderr", "to err"),
        *(("stdout", line) for line in lines[3:]),
    ]


def test_a_log_that_fails_once_gets_the_next_line() -> None:
    lines: list[str] = []

    def emit(_stream: str, line: str) -> None:
        if line == "bad":
            raise ValueError(line)
        lines.append(line)

    with caught_output(emit):
        with pytest.raises(ValueError, match="bad"):
            print("bad")
        print("good")
    assert lines == ["good"]
