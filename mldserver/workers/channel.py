"""One end of the socket between server and worker: datagrams that keep their borders, and descriptors beside them.

``SOCK_SEQPACKET``: a message is there as a whole or not at all, from however many threads it is sent. What is longer
than the socket takes at once goes into a file in memory, whose descriptor is sent in its place.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import select
import socket
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mldserver.workers.shared_memory import Descriptors

__all__ = ["Channel", "pair", "send_now"]

INLINE_BYTES: Final = 32 * 1024
"""The longest message that is a datagram of its own; sockets hold about 200 KiB (Linux: ``wmem_default``)."""
_MOST_DESCRIPTORS: Final = 2
_ROOM_BESIDE: Final = socket.CMSG_LEN(_MOST_DESCRIPTORS * array.array("i").itemsize)
_CUT: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_PLAIN: Final = b"\x00"
_IN_FILE: Final = b"\x01"


def pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """Sends and receives messages on the event loop. Descriptors that are sent stay the sender's to close."""

    def __init__(
        self, end: socket.socket, *, receive: Callable[[bytes, Descriptors], None], ended: Callable[[], None]
    ) -> None:
        """Own ``end`` from now on; ``receive`` gets each message, ``ended`` is called once when no more can come."""
        self._socket = end
        end.setblocking(False)
        self._receive = receive
        self._ended = ended
        self._waiting: deque[tuple[bytes, Sequence[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, self._readable)
        self._open = True

    @property
    def backlog(self) -> int:
        """How many messages wait for the other side."""
        return len(self._waiting)

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send, now or when there is room. After the end it does nothing: the end itself is told of by ``ended``."""
        if not self._open:
            return
        packed, kept = _packed(data, descriptors)
        if not self._waiting and self._try(packed, kept):
            _close(kept)
            return
        if not self._waiting:
            self._loop.add_writer(self._socket, self._writable)
        self._waiting.append((packed, kept))

    def close(self) -> None:
        """Let go of the socket; ``ended`` is not called."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            for _, kept in self._waiting:
                _close(kept)
            self._waiting.clear()

    def _try(self, packed: bytes, descriptors: Sequence[int]) -> bool:
        try:
            if descriptors:
                socket.send_fds(self._socket, [packed], descriptors)
            else:
                self._socket.send(packed)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True  # the reader learns of the end
        return True

    def _writable(self) -> None:
        while self._waiting:
            packed, kept = self._waiting[0]
            if not self._try(packed, kept):
                return
            self._waiting.popleft()
            _close(kept)
        self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        # One message at a time: looking whether there is another costs more than being called again when there is.
        try:
            data, told, flags, _ = self._socket.recvmsg(
                INLINE_BYTES + 1, _ROOM_BESIDE, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, told, flags = b"", [], 0
        descriptors = _descriptors(told) if told else []
        if not data or flags & _CUT:
            _close(descriptors)
            self.close()
            self._ended()
            return
        self._pass_on(data, descriptors)

    def _pass_on(self, data: bytes, descriptors: list[int]) -> None:
        if data[:1] == _IN_FILE and descriptors:
            with os.fdopen(descriptors.pop(0), "rb") as file:
                self._receive(file.read(), descriptors)
        else:
            self._receive(data[1:], descriptors)


def send_now(end: socket.socket, data: bytes, *, wait_seconds: float = 0.0) -> bool:
    """Send a message from any thread, past the loop. Returns False when there is no room, or none in that time.

    Raises OSError when the other side is gone.
    """
    packed, kept = _packed(data, ())
    try:
        for wait in (wait_seconds, None):
            try:
                socket.send_fds(end, [packed], kept)
            except (BlockingIOError, InterruptedError):
                if not wait:
                    return False
                select.select([], [end], [], wait)
            else:
                return True
    finally:
        _close(kept)
    return False


def _descriptors(told: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that came beside a message."""
    found = array.array("i")
    for level, kind, data in told:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _packed(data: bytes, descriptors: Sequence[int]) -> tuple[bytes, Sequence[int]]:
    """Return a datagram, and descriptors of its own that it takes along."""
    kept = [os.dup(each) for each in descriptors]
    if len(data) < INLINE_BYTES:
        return _PLAIN + data, kept
    file = os.memfd_create("mldserver-message", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(file), "wb") as writer:
        writer.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    return _IN_FILE, [file, *kept]


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        with contextlib.suppress(OSError):
            os.close(each)
