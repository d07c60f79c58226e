"""Datagrams with descriptors beside them, from the loop and from threads."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mldserver.workers.channel import INLINE_BYTES, Channel, pair, send_now

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Ends:
    """Two channels that note what comes."""

    def __init__(self) -> None:
        self.here, self.there = pair()
        self.received: list[tuple[bytes, list[bytes]]] = []
        self.ended = 0
        self.sender = Channel(self.here, receive=lambda *_: None, ended=self._end)
        self.receiver = Channel(self.there, receive=self._receive, ended=self._end)

    def _receive(self, data: bytes, files: list[int]) -> None:
        contents = []
        for file in files:
            contents.append(os.pread(file, 100, 0))
            os.close(file)
        self.received.append((data, contents))

    def _end(self) -> None:
        self.ended += 1

    async def come(self, number: int) -> None:
        async with asyncio.timeout(10):
            while len(self.received) < number:  # noqa: ASYNC110  # a socket has no event for a test to wait on
                await asyncio.sleep(0)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    before = _descriptors()
    made = Ends()
    yield made
    made.close()
    assert _descriptors() == before, "no descriptor is left open"


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def memory(content: bytes) -> int:
    file = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(file, content)
    return file


async def test_messages_of_any_size_keep_their_borders_and_order(ends: Ends) -> None:
    messages = [b"", b"a", b"b" * (INLINE_BYTES - 1), b"c" * INLINE_BYTES, b"d" * 1_000_000, b"e"]
    for message in messages:
        ends.sender.send(message)
    await ends.come(len(messages))
    assert [data for data, _ in ends.received] == messages


@pytest.mark.parametrize("size", [10, 100_000])
async def test_a_descriptor_goes_along_and_stays_the_senders_to_close(ends: Ends, size: int) -> None:
    file = memory(b"beside")
    ends.sender.send(b"x" * size, (file,))
    os.close(file)
    await ends.come(1)
    assert ends.received == [(b"x" * size, [b"beside"])]


async def test_what_the_socket_does_not_take_at_once_waits_with_its_descriptors(ends: Ends) -> None:
    file = memory(b"late")
    number = 0
    while not ends.sender.backlog:
        ends.sender.send(b"x" * 30_000)
        number += 1
    ends.sender.send(b"last", (file,))
    os.close(file)
    await ends.come(number + 1)
    assert ends.received[-1] == (b"last", [b"late"])
    assert ends.sender.backlog == 0


async def test_the_end_is_told_once_and_sending_after_it_does_nothing(ends: Ends) -> None:
    ends.receiver.close()
    async with asyncio.timeout(10):
        while not ends.ended:  # noqa: ASYNC110  # see come
            await asyncio.sleep(0)
    ends.sender.send(b"to nobody")
    assert ends.ended == 1


async def test_what_waits_is_let_go_of_when_the_channel_is_closed(ends: Ends) -> None:
    file = memory(b"never")
    while not ends.sender.backlog:
        ends.sender.send(b"x" * 30_000, (file,))
    os.close(file)
    ends.close()


async def test_a_thread_sends_past_the_loop_while_there_is_room(ends: Ends) -> None:
    sent = 0
    while send_now(ends.here, b"x" * 20_000):
        sent += 1
    assert not send_now(ends.here, b"y", wait_seconds=0.01)
    await ends.come(sent)
    assert await asyncio.to_thread(send_now, ends.here, b"z" * 50_000, wait_seconds=1)
    await ends.come(sent + 1)
    assert ends.received[-1] == (b"z" * 50_000, [])


async def test_a_thread_is_told_that_nobody_is_there(ends: Ends) -> None:
    ends.receiver.close()
    with pytest.raises(OSError, match=r"(?i)broken pipe|reset|not connected"):
        send_now(ends.here, b"x")
