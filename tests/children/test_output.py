"""What comes out of a child's pipe."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from mldserver.children import process
from mldserver.children.process import ChildOutput

pytestmark = pytest.mark.quick


class Pipe:
    """Both ends; what is written is read in the loop's next turns."""

    def __init__(self) -> None:
        reader, self.writer = os.pipe()
        self.lines: list[str] = []
        self.most = 10**9
        self.output = ChildOutput(reader, self._take)

    def _take(self, lines: list[str]) -> bool:
        self.lines += lines
        return len(self.lines) <= self.most

    async def write(self, data: bytes, *, turns: int = 5) -> None:
        os.write(self.writer, data)
        for _ in range(turns):
            await asyncio.sleep(0)

    def end(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1


@pytest.fixture
async def pipe() -> AsyncIterator[Pipe]:
    made = Pipe()
    yield made
    made.end()
    made.output.close()


async def test_lines_are_taken_when_they_are_whole_and_the_last_one_at_the_end(pipe: Pipe) -> None:
    await pipe.write(b"one\r\n\ntw")
    assert pipe.lines == ["one", ""]
    await pipe.write(b"o\n\xff\nlast")
    assert pipe.lines == ["one", "", "two", "\ufffd"]
    pipe.end()
    for _ in range(5):
        await asyncio.sleep(0)
    assert pipe.lines[-1] == "last"


async def test_what_is_left_at_the_close_is_taken_and_closing_again_does_nothing(pipe: Pipe) -> None:
    os.write(pipe.writer, b"last\nwords")
    pipe.output.close()
    pipe.output.close()
    assert pipe.lines == ["last", "words"]


async def test_a_pipe_that_another_process_still_holds_is_let_go_of(pipe: Pipe) -> None:
    await pipe.write(b"a\n")
    pipe.output.close()
    with pytest.raises(BrokenPipeError):
        os.write(pipe.writer, b"b\n")
    assert pipe.lines == ["a"]


async def test_whoever_takes_too_many_lines_for_now_gets_no_more_for_a_while_and_all_of_them_at_the_end(
    pipe: Pipe,
) -> None:
    pipe.most = 2
    await pipe.write(b"x\n" * 3)
    await pipe.write(b"z\n" * 100)
    assert "z" not in pipe.lines, "the pipe is left alone for a while"
    pipe.output.close()
    assert pipe.lines == ["x"] * 3 + ["z"] * 100


async def test_a_pipe_that_was_left_alone_is_read_on_by_itself_or_when_that_is_asked_for(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe.most = 0
    await pipe.write(b"x\n")
    await pipe.write(b"y\n")
    pipe.output.go_on()
    await pipe.write(b"z\n")
    assert pipe.lines == ["x", "y", "z"]
    pipe.output.go_on()
    monkeypatch.setattr(process, "_PAUSE_SECONDS", 0.0)
    await pipe.write(b"1\n")
    await pipe.write(b"2\n", turns=20)
    assert pipe.lines[3:] == ["1", "2"]


async def test_nothing_there_is_not_the_end(pipe: Pipe) -> None:
    pipe.output._readable()
    await pipe.write(b"here\n")
    assert pipe.lines == ["here"]
