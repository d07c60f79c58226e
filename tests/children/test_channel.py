"""Frames of messages with descriptors beside them, from the loop and from threads."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mldserver.children.channel import (
    FRAME_BYTES,
    Channel,
    Message,
    WireError,
    pair,
    receive_now,
    send_now,
)

pytestmark = pytest.mark.quick


class Text(Message, frozen=True):
    data: bytes
    files: int = 0


class Ends:
    """Two channels that note what comes."""

    def __init__(self) -> None:
        self.here, self.there = pair()
        self.received: list[tuple[bytes, list[bytes]]] = []
        self.ended: list[str | None] = []
        self.sender = Channel[Text](self.here, Text, receive=lambda *_: None, ended=self.ended.append)
        self.receiver = Channel[Text](self.there, Text, receive=self._receive, ended=self.ended.append)

    def _receive(self, message: Text, files: list[int]) -> None:
        contents = []
        for _ in range(message.files):
            file = files.pop(0)
            contents.append(os.pread(file, 100, 0))
            os.close(file)
        self.received.append((message.data, contents))

    def send(self, data: bytes, *contents: bytes) -> None:
        self.sender.send(Text(data, len(contents)), tuple(map(memory, contents)))

    async def come(self, number: int) -> None:
        async with asyncio.timeout(800):
            while len(self.received) < number:  # noqa: ASYNC110  # a socket has no event for a test to wait on
                await asyncio.sleep(0)

    async def over(self) -> None:
        async with asyncio.timeout(800):
            while not self.ended:  # noqa: ASYNC110  # see come
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
    sizes = [0, 1, *range(FRAME_BYTES - 16, FRAME_BYTES + 2), 1_000_000, 1]
    for size in sizes:
        ends.send(b"x" * size)
    await ends.come(len(sizes))
    assert [len(data) for data, _ in ends.received] == sizes


async def test_what_one_turn_sends_is_one_datagram(ends: Ends) -> None:
    ends.receiver.close()
    here, there = pair()
    sender = Channel[Text](here, Text, receive=lambda *_: None, ended=lambda _: None)
    for number in range(100):
        sender.send(Text(b"%d" % number))
    await asyncio.sleep(0)
    assert [message.data for message in receive_now(there, Text)] == [b"%d" % number for number in range(100)]
    sender.send(Text(b"next"))
    sender.flush()
    assert receive_now(there, Text) == [Text(b"next")]
    sender.close()
    assert receive_now(there, Text) == []
    there.close()


async def test_what_may_wait_goes_after_its_time_or_with_the_next_that_may_not(ends: Ends) -> None:
    ends.receiver.close()
    here, there = pair()
    there.setblocking(False)
    sender = Channel[Text](here, Text, receive=lambda *_: None, ended=lambda _: None)
    for data, within in ((b"1", 60), (b"2", 60), (b"3", 0)):
        await asyncio.sleep(0)
        with pytest.raises(BlockingIOError):
            receive_now(there, Text)
        sender.send(Text(data), within_seconds=within)
    await asyncio.sleep(0)
    assert receive_now(there, Text) == [Text(b"1"), Text(b"2"), Text(b"3")]
    sender.send(Text(b"4"), within_seconds=0.001)
    there.setblocking(True)
    assert await asyncio.to_thread(receive_now, there, Text) == [Text(b"4")]
    sender.close()
    there.close()


@pytest.mark.parametrize("size", [10, 100_000])
async def test_descriptors_go_along_with_their_messages_and_are_closed_here(ends: Ends, size: int) -> None:
    for number in range(100):
        ends.send(b"x" * size, b"beside %d" % number, b"and")
    await ends.come(100)
    assert [contents for _, contents in ends.received] == [
        [b"beside %d" % number, b"and"] for number in range(100)
    ]


async def test_what_the_socket_does_not_take_at_once_waits_with_its_descriptors(ends: Ends) -> None:
    number = 0
    while not ends.sender._waiting:
        ends.send(b"x" * 30_000)
        ends.sender.flush()
        number += 1
    ends.send(b"last", b"late")
    await ends.come(number + 1)
    assert ends.received[-1] == (b"last", [b"late"])
    assert not ends.sender._waiting


async def test_while_too_many_descriptors_are_on_their_way_a_frame_waits(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_fds, refusals = socket.send_fds, 3

    def refused(*arguments: Any) -> int:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise OSError(errno.ETOOMANYREFS, "too many references")
        return send_fds(*arguments)

    monkeypatch.setattr(socket, "send_fds", refused)
    ends.send(b"first", b"file")
    await asyncio.sleep(0)
    ends.send(b"second")
    await ends.come(2)
    assert (ends.received, ends.ended) == ([(b"first", [b"file"]), (b"second", [])], [])


async def test_the_end_is_told_once_and_sending_after_it_does_nothing(ends: Ends) -> None:
    ends.receiver.close()
    await ends.over()
    ends.send(b"to nobody", b"with this")
    assert ends.ended == [None]


async def test_what_is_no_message_ends_the_channel(ends: Ends) -> None:
    ends.here.send(b"\xff")
    await ends.over()
    assert "are no messages" in str(ends.ended[0])


async def test_what_can_neither_go_as_it_is_nor_in_a_file_ends_the_channel(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    file = memory(b"beside")
    monkeypatch.setattr(os, "memfd_create", full)
    ends.sender.send(Text(b"x" * FRAME_BYTES, 1), (file,))
    ends.sender.send(Text(b"behind it", 1), (os.dup(file),))
    await ends.over()
    assert ends.ended[0] == "a message cannot be sent: [Errno 24] Too many open files"
    assert ends.received == []


async def test_a_file_that_cannot_be_filled_is_not_left_open(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "fdopen", full)
    ends.send(b"x" * FRAME_BYTES)
    await ends.over()
    assert ends.ended[0] == "a message cannot be sent: [Errno 12] Cannot allocate memory"


async def test_a_frame_that_the_kernel_refuses_ends_the_channel(ends: Ends) -> None:
    ends.here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
    ends.send(b"x" * 20_000, b"beside")
    ends.sender.flush()
    ends.send(b"behind it")
    await ends.over()
    assert ends.ended[0] == "a message cannot be sent: [Errno 90] Message too long"


async def test_what_a_side_sent_last_comes_though_it_had_not_read_all_when_it_ended(ends: Ends) -> None:
    ends.sender.close()
    here, there = pair()
    ends.receiver.close()
    ends.receiver = Channel[Text](there, Text, receive=ends._receive, ended=ends.ended.append)
    ends.receiver.send(Text(b"never read"))
    ends.receiver.flush()
    send_now(here, Text(b"one"))
    send_now(here, Text(b"two"))
    here.close()
    await ends.over()
    assert (ends.received, ends.ended) == ([(b"one", []), (b"two", [])], [None])


async def test_what_is_there_can_be_received_at_once(ends: Ends) -> None:
    for data in (b"one", b"two"):
        ends.send(data)
        ends.sender.flush()
    ends.receiver.drain()
    assert ends.received == [(b"one", []), (b"two", [])]
    ends.receiver.close()
    ends.receiver.drain()


async def test_whoever_sends_without_an_end_holds_up_nobody() -> None:
    here, there = pair()
    send_now(here, Text(b"x"))
    channel = Channel[Text](there, Text, receive=lambda *_: send_now(here, Text(b"x")), ended=print)
    channel.drain()
    channel.close()
    here.close()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (WireError("it was not asked for"), "it was not asked for"),
        (KeyError(7), "a message cannot be taken: KeyError: 7"),
    ],
)
async def test_what_the_receiver_refuses_or_cannot_take_ends_the_channel(error: Exception, told: str) -> None:
    here, there = pair()
    ended: list[str | None] = []

    def refuse(*_: object) -> None:
        raise error

    channel = Channel[Text](there, Text, receive=refuse, ended=ended.append)
    send_now(here, Text(b"x"))
    async with asyncio.timeout(800):
        while not ended:  # noqa: ASYNC110  # see come
            await asyncio.sleep(0)
    assert ended == [told]
    channel.close()
    here.close()


async def test_what_waits_is_let_go_of_when_the_channel_is_closed(ends: Ends) -> None:
    while not ends.sender._waiting:
        ends.send(b"x" * 30_000, b"never")
        ends.sender.flush()
    ends.send(b"nor this", b"either")
    ends.close()


async def test_a_thread_sends_past_the_loop_while_there_is_room(ends: Ends) -> None:
    sent = 0
    while send_now(ends.here, Text(b"x" * 20_000)):
        sent += 1
    assert not send_now(ends.here, Text(b"y"), wait_seconds=0.01)
    await ends.come(sent)
    assert await asyncio.to_thread(send_now, ends.here, Text(b"z" * 50_000), wait_seconds=1)
    await ends.come(sent + 1)
    assert ends.received[-1] == (b"z" * 50_000, [])


def test_a_thread_waits_for_room_whatever_number_its_socket_has() -> None:
    here, there = pair()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    try:
        far = socket.socket(fileno=fcntl.fcntl(here, fcntl.F_DUPFD_CLOEXEC, 1500))
        far.setblocking(False)
        while send_now(far, Text(b"x" * 20_000)):
            pass
        assert not send_now(far, Text(b"y"), wait_seconds=0.001)
        far.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        here.close()
        there.close()


async def test_a_thread_is_told_that_nobody_is_there(ends: Ends) -> None:
    ends.receiver.close()
    with pytest.raises(OSError, match=r"(?i)broken pipe|reset|not connected"):
        send_now(ends.here, Text(b"x"))


def test_a_datagram_that_is_too_long_is_no_frame() -> None:
    here, there = pair()
    here.send(b"x" * (FRAME_BYTES + 2))
    with pytest.raises(WireError, match="cut off"):
        receive_now(there, Text)
    for end in (here, there):
        end.close()
