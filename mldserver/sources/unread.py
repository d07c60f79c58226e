"""One limit on the unread bytes of all connections together. Synchronous; readers are paused and resumed by calls.

A line may have 256 MiB, and there may be a thousand connections: a limit for each connection would not protect the memory.
While the sum exceeds the budget, every reader with an incomplete line is paused, except the reader whose line is the oldest.
That line can always be completed, or its time-out ends the connection, so there is always progress.

Below the budget, only as many readers are resumed as there is room for, those that have waited longest first. If each
completed line resumed all of a thousand readers, the next bytes would pause them again, which costs more than it gains.
"""

from __future__ import annotations

from typing import Final, Protocol

_STEP_BYTES: Final = 1024 * 1024
"""Room for which one more reader goes on; most lines are shorter."""


class Reader(Protocol):
    """Something that reads, and can be told to wait."""

    def pause(self) -> None:
        """Stop reading; the time does not count against the peer."""

    def resume(self) -> None:
        """Read on."""


class ReadBudget:
    """Counts bytes of incomplete lines, and of whole lines that are being worked on, over all readers."""

    def __init__(self, limit: int, *, step: int = _STEP_BYTES) -> None:
        """Pause readers while more than ``limit`` bytes are held; let one more go on for each ``step`` of room."""
        self.limit = limit
        self._step = step
        self._partial: dict[Reader, int] = {}  # in the order in which the lines began
        self.paused: dict[Reader, None] = {}
        """The paused readers, in the order in which they were paused; read only."""
        self.held = 0
        """Bytes held in all; read only."""

    @property
    def has_room(self) -> bool:
        """Whether the limit is not reached."""
        return self.held < self.limit

    def set_partial(self, reader: Reader, size: int) -> None:
        """Note the size of a reader's incomplete line; 0: it has none."""
        if not size and reader in self.paused:
            self._resume(reader)
        self.held += size - self._partial.get(reader, 0)
        if size:
            self._partial[reader] = size
        else:
            self._partial.pop(reader, None)
        self._balance()

    def hold(self, change: int) -> None:
        """Add ``change`` bytes (may be negative) to the size of the lines that are being processed."""
        self.held += change
        self._balance()

    def forget(self, reader: Reader, whole: int) -> None:
        """Note that a reader is gone, with lines of ``whole`` bytes that are being worked on."""
        self.paused.pop(reader, None)
        self.held -= self._partial.pop(reader, 0) + whole
        self._balance()

    def _balance(self) -> None:
        """Pause readers while the limit is exceeded, else resume as many as there is room for."""
        if self.held > self.limit:
            # Only the reader with the oldest incomplete line continues.
            oldest = next(iter(self._partial), None)
            if oldest in self.paused:
                self._resume(oldest)
            if len(self._partial) - len(self.paused) > 1:
                others = [reader for reader in self._partial if reader is not oldest]
                for reader in [each for each in others if each not in self.paused]:
                    self.paused[reader] = None
                    reader.pause()
        elif self.paused:
            # How many readers may have an incomplete line at once; those that are not paused already count.
            room = 1 + (self.limit - self.held) // self._step
            running = len(self._partial) - len(self.paused)
            for _ in range(min(len(self.paused), room - running)):
                self._resume(next(iter(self.paused)))

    def _resume(self, reader: Reader) -> None:
        del self.paused[reader]
        reader.resume()
