"""One end of the socket between the server and a child: messages in MessagePack, with file descriptors.

A frame is one datagram (``SOCK_SEQPACKET``): it is there as a whole or not at all, from however many threads frames are
sent. It holds an array of messages. Messages sent in one turn of the event loop share a frame, together with deferred
messages from shortly before. A frame too long for the socket goes into a file in memory, whose descriptor is sent in
its place.

Both sides are the same program. Malformed bytes raise WireError: the caller must not trust the other side any more.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import functools
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

M = TypeVar("M")

Descriptors = list[int]
"""Open files that came with a frame, in the order of its messages; each message's receiver removes that message's files."""

FRAME_BYTES: Final = 32 * 1024
"""The longest frame that is sent as a plain datagram; sockets hold about 200 KiB (Linux: ``wmem_default``)."""
_MOST_DESCRIPTORS: Final = 32
_ANCILLARY_BYTES: Final = socket.CMSG_LEN(_MOST_DESCRIPTORS * array.array("i").itemsize)
_TRUNCATED: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_ARRAY: Final = struct.Struct(">BI")
_ARRAY_TAG: Final = 0xDD
"""MessagePack's array of up to 2³² elements."""
_IN_FILE: Final = b"\x00"
_DRAINED_FRAMES: Final = 1024
"""Reads at most so many frames at once: a socket holds fewer, but another process that inherited it may keep
writing."""


class WireError(ValueError):
    """The other side does not speak this protocol."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A message; its class's name is its tag."""


pair: Final = functools.partial(socket.socketpair, socket.AF_UNIX, socket.SOCK_SEQPACKET)
"""Makes a connected pair of sockets."""

_encoder = msgspec.msgpack.Encoder(enc_hook=str)


def encode(message: Message) -> bytes:
    """Return the message's bytes. Values that MessagePack cannot hold become text.

    These are objects, numbers beyond 64 bits, and lone surrogates that a user's texts may hold.
    """
    try:
        return _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError):
        return _encoder.encode(encodable(msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=str)))


def encodable(value: Any) -> Any:
    """Return a value that can be encoded: lone surrogates are escaped, numbers beyond 64 bits become text."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    if isinstance(value, dict):
        return {encodable(key): encodable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [encodable(each) for each in value]
    return value


@functools.cache
def _decoder(kinds: Any) -> msgspec.msgpack.Decoder[list[Any]]:
    return msgspec.msgpack.Decoder(list[kinds])


def decode(kinds: Any, frame: bytes | memoryview) -> list[Any]:
    """Return a frame's messages, which are of the classes ``kinds`` (a union). Raises WireError."""
    try:
        return _decoder(kinds).decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"{len(frame)} bytes are no messages: {error}") from None


class Channel(Generic[M]):
    """Sends and receives messages on the event loop. Descriptors that are sent are closed here."""

    def __init__(
        self,
        end: socket.socket,
        kinds: Any,
        *,
        receive: Callable[[M, Descriptors], None],
        ended: Callable[[str | None], None],
    ) -> None:
        """Own ``end`` from now on; ``receive`` gets each message, which is one of ``kinds`` (a union of classes).

        ``ended`` is called once when no more can come or go: with what is wrong, unless the other side has ended.
        """
        self._socket = end
        end.setblocking(False)
        self._kinds = kinds
        self._receive = receive
        self._ended = ended
        self.unsent: list[bytes] = []
        """The messages of the next frame. Read only."""
        self._flush_scheduled = False
        """Whether the next frame is sent at the end of this turn of the loop."""
        self._bytes = 0
        self._files: Descriptors = []
        self._waiting: deque[tuple[bytes, Descriptors]] = deque()
        """Frames that the socket had no room for."""
        self._buffer = memoryview(bytearray(FRAME_BYTES + 1))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, self._receive_frame)
        self._open = True

    def send(self, message: Message, files: Sequence[int] = (), *, within_seconds: float = 0.0) -> None:
        """Send a message at the end of this turn of the loop, or within ``within_seconds`` together with others.

        After the end of the channel this does nothing: ``ended`` reports the end. Raises nothing.
        """
        encoded = encode(message)
        too_long = self._bytes + len(encoded) > FRAME_BYTES - _ARRAY.size
        if self.unsent and (too_long or len(self._files) + len(files) >= _MOST_DESCRIPTORS):
            self.flush()
        if not self._open:
            _close(files)
            return
        if within_seconds and not self.unsent:
            self._loop.call_later(within_seconds, self.flush)
        elif not within_seconds and not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)
        self.unsent.append(encoded)
        self._bytes += len(encoded)
        self._files += files

    def flush(self) -> None:
        """Send the collected messages now as one frame. If the socket has no room, send it once the socket is writable."""
        self._flush_scheduled = False
        if not self.unsent:
            return
        messages, files = self.unsent, self._files
        self.unsent, self._bytes, self._files = [], 0, []
        try:
            data, files = _datagram(messages, files)
        except (
            OSError
        ) as error:  # no descriptor, or no memory: end the channel, so that no caller waits for an answer
            _close(files)
            self._fail(f"a message cannot be sent: {error}")
            return
        if self._waiting or not self._send_datagram(data, files):
            if not self._waiting:
                self._loop.add_writer(self._socket, self._send_waiting)
            self._waiting.append((data, files))

    def close(self) -> None:
        """Close the socket and drop unsent messages; ``ended`` is not called."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            for _, files in self._waiting:
                _close(files)
            _close(self._files)
            self._waiting.clear()
            self.unsent.clear()

    def _send_datagram(self, data: bytes, files: Descriptors) -> bool:
        """Send a frame and close its files; return False if it must be sent again later. An error ends the channel."""
        try:
            if files:
                socket.send_fds(self._socket, [data], files)
                _close(files)
            else:
                self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return False
        except (BrokenPipeError, ConnectionResetError):
            _close(files)  # the next read reports the end
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                return False  # too many descriptors of this user are in flight: some will arrive
            _close(files)  # the frame is lost, for example because it is too long for this socket
            self._loop.call_soon(self._fail, f"a message cannot be sent: {error}")
        return True

    def _send_waiting(self) -> None:
        """Send frames that waited, since the socket is writable again."""
        while self._waiting:
            if not self._send_datagram(*self._waiting[0]):
                return
            self._waiting.popleft()
        self._loop.remove_writer(self._socket)

    def drain(self) -> None:
        """Receive what has arrived, such as the last messages before the other side ended."""
        for _ in range(_DRAINED_FRAMES):
            if not self._open or not self._receive_frame():
                return

    def _receive_frame(self) -> bool:
        """Receive a frame and pass its messages on; return False if there was none. The end, or an error, closes the channel."""
        # One frame a call: the loop calls again if there is another, which costs less than to look.
        files: Descriptors = []
        wrong: str | None = None
        try:
            frame, files = _read(self._socket, self._buffer)
            if frame is None:
                return False
            if frame:
                for message in decode(self._kinds, frame):
                    self._receive(message, files)
                    if not self._open:
                        break
                return True
        except WireError as error:
            wrong = str(error)
        except Exception as error:  # noqa: BLE001  # the message is lost: the caller that waits for it must learn that
            wrong = f"a message cannot be taken: {type(error).__name__}: {error}"
        finally:
            _close(files)
        self._fail(wrong)
        return False

    def _fail(self, what: str | None) -> None:
        """Report the end of the channel, and close it. ``what``: what is wrong; None: the other side has ended."""
        if self._open:
            try:
                # Before the close: the other side kills a peer whose socket it finds closed.
                self._ended(what)
            finally:
                self.close()


def send_now(
    end: socket.socket, message: Message, files: Sequence[int] = (), *, wait_seconds: float = 0.0
) -> bool:
    """Send a message from any thread, without the event loop. ``files`` are closed here.

    Returns False if the socket stays full for ``wait_seconds``. Raises OSError if the other side is gone.
    """
    data, files = _datagram([encode(message)], [*files])
    try:
        for wait in (wait_seconds, None):
            try:
                socket.send_fds(end, [data], files)
            except (BlockingIOError, InterruptedError):
                if not wait:
                    return False
                writable = select.poll()  # not select(), which knows 1,024 descriptors
                writable.register(end, select.POLLOUT)
                writable.poll(wait * 1000)
            else:
                return True
    finally:
        _close(files)
    return False


def receive_now(end: socket.socket, kinds: Any) -> list[Any]:
    """Wait for the next frame and return its messages; none at the end. Blocking.

    Raises WireError, and BlockingIOError when a non-blocking socket holds no frame.
    """
    messages, files = receive_with_files(end, kinds)
    _close(files)
    return messages


def receive_with_files(end: socket.socket, kinds: Any) -> tuple[list[Any], Descriptors]:
    """Do as ``receive_now`` does, and return the files that came, too: they belong to the caller."""
    frame, files = _read(end, memoryview(bytearray(FRAME_BYTES + 1)))
    if frame is None:
        raise BlockingIOError
    try:
        return (decode(kinds, frame) if frame else []), files
    except WireError:
        _close(files)
        raise


def _datagram(messages: list[bytes], files: Descriptors) -> tuple[bytes, Descriptors]:
    """Return the datagram of a frame, and its descriptors. A frame that is too long goes into a file in memory."""
    data = _ARRAY.pack(_ARRAY_TAG, len(messages)) + b"".join(messages)
    if len(data) <= FRAME_BYTES:
        return data, files
    file = os.memfd_create("mldserver-frame", os.MFD_CLOEXEC)
    try:
        with os.fdopen(file, "wb", closefd=False) as writer:
            writer.write(data)
    except BaseException:
        os.close(file)
        raise
    return _IN_FILE, [file, *files]


def _read(end: socket.socket, buffer: memoryview) -> tuple[bytes | memoryview | None, Descriptors]:
    """Return a frame and its descriptors: an empty frame at the end, None when nothing is there now.

    Raises WireError when the frame is truncated.
    """
    try:
        try:
            size, ancillary, flags, _ = end.recvmsg_into([buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            # The other side ended with frames unread. The socket reports that once, before that side's last frames.
            size, ancillary, flags, _ = end.recvmsg_into([buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    except (BlockingIOError, InterruptedError):
        return None, []
    except OSError:
        return b"", []
    files = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    descriptors = list(files)
    if flags & _TRUNCATED:
        _close(descriptors)
        raise WireError(
            "a frame is cut off: it is too long, or this process has no descriptor left for its files"
        )
    if size == 1 and descriptors:  # ``_IN_FILE``: the first file holds the frame
        file = descriptors.pop(0)
        try:
            return os.pread(file, os.fstat(file).st_size, 0), descriptors
        finally:
            os.close(file)
    return buffer[:size], descriptors


def _close(files: Sequence[int]) -> None:
    for each in files:
        with contextlib.suppress(OSError):
            os.close(each)
