"""What comes out of a worker's pipe."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest

from mldserver.observe.stdout_capture import BURST, Printed
from mldserver.workers import stdout
from mldserver.workers.stdout import Output

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Pipe:
    """Both ends; what is written is read in the loop's next turns."""

    def __init__(self) -> None:
        reader, self.writer = os.pipe()
        self.now = 0.0
        self.output = Output(reader, printed=Printed(lambda: self.now))

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


def told(logged: list[dict[str, Any]]) -> list[str]:
    return [event["text"] for event in logged if event["event"] == "handler.output"]


def lost(logged: list[dict[str, Any]]) -> int:
    return sum(event["lines"] for event in logged if event["event"] == "log.lost")


async def test_lines_are_told_when_they_are_whole_and_empty_ones_are_not(
    pipe: Pipe, logged: list[dict[str, Any]]
) -> None:
    await pipe.write(b"one\r\n\ntw")
    assert told(logged) == ["one"]
    await pipe.write(b"o\n\xff\n")
    assert told(logged) == ["one", "two", "\ufffd"]
    assert pipe.output.last_words == "one\n\ntwo\n\ufffd"


async def test_what_has_no_end_is_told_in_pieces_and_at_the_end(
    pipe: Pipe, logged: list[dict[str, Any]]
) -> None:
    await pipe.write(b"x" * 12_000 + b"y")
    assert told(logged) == ["x" * 8192]
    pipe.end()
    for _ in range(5):
        await asyncio.sleep(0)
    assert "".join(told(logged)[1:]) == "x" * 3808 + "y"


async def test_what_is_left_at_the_close_is_told_and_closing_again_does_nothing(
    pipe: Pipe, logged: list[dict[str, Any]]
) -> None:
    os.write(pipe.writer, b"last\nwords")
    pipe.output.close()
    pipe.output.close()
    assert told(logged) == ["last", "words"]


async def test_a_pipe_that_another_process_still_holds_is_let_go_of(
    pipe: Pipe, logged: list[dict[str, Any]]
) -> None:
    await pipe.write(b"a\n")
    pipe.output.close()
    with pytest.raises(BrokenPipeError):
        os.write(pipe.writer, b"b\n")
    assert told(logged) == ["a"]


async def test_after_stacks_were_asked_for_lines_are_kept_and_not_told(
    pipe: Pipe, logged: list[dict[str, Any]]
) -> None:
    await pipe.write(b"before\n")
    pipe.output.only_keep()
    await pipe.write(b"File a.py, line 1\n")
    assert told(logged) == ["before"]
    assert pipe.output.last_words == "File a.py, line 1"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waits."""
    monkeypatch.setattr(stdout, "_PAUSE_SECONDS", 0.0)


@pytest.mark.usefixtures("hasty")
async def test_a_flood_is_cut_and_what_was_left_out_is_counted(
    pipe: Pipe, logged: list[dict[str, Any]]
) -> None:
    await pipe.write(b"x\n" * (BURST + 500))
    assert (len(told(logged)), lost(logged)) == (BURST, 0)
    pipe.now += 1
    await pipe.write(b"y\n", turns=20)
    assert told(logged)[BURST:] == ["y"]
    assert lost(logged) == 500


async def test_a_flood_is_slowed_and_at_the_end_all_of_it_is_accounted_for(
    pipe: Pipe, logged: list[dict[str, Any]]
) -> None:
    await pipe.write(b"x\n" * BURST + b"y\n")
    pipe.now += 60
    await pipe.write(b"z\n" * 100)
    assert "z" not in told(logged), "the pipe is left alone for a while"
    pipe.output.close()
    assert told(logged) == ["x"] * BURST + ["z"] * 100
    assert lost(logged) == 1


async def test_stacks_are_read_at_once_behind_a_flood(pipe: Pipe, logged: list[dict[str, Any]]) -> None:
    await pipe.write(b"x\n" * (BURST + 1))
    pipe.output.only_keep()
    await pipe.write(b"y\n" * 2000 + b"here\n")
    assert pipe.output.last_words.endswith("here")
    assert len(told(logged)) == BURST


async def test_nothing_there_is_not_the_end(pipe: Pipe, logged: list[dict[str, Any]]) -> None:
    pipe.output._readable()
    await pipe.write(b"here\n")
    assert told(logged) == ["here"]
