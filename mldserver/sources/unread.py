"""One bound on what all connections together hold of unread lines. Synchronous; readers are paused through calls.

A line may have 256 MiB, and there may be a thousand connections: a limit for each is no bound. While the sum is above
the budget, every reader that has an incomplete line is paused, but the one whose line is oldest: it can always finish
(its own time-out sees to that, which is not extended while others wait), so that there is always progress.

Below the budget as many go on as there is room for, those first that have waited longest. Were all of them let go by each
line that is done, only to be stopped again by the next bytes, a thousand that wait would cost more than they bring.
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
        """Who waits because of those that do not, in the order in which they began to; read only."""
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
        """Note by how much more, or less, the lines take that are being worked on."""
        self.held += change
        self._balance()

    def forget(self, reader: Reader, whole: int) -> None:
        """Note that a reader is gone, with lines of ``whole`` bytes that are being worked on."""
        self.paused.pop(reader, None)
        self.held -= self._partial.pop(reader, 0) + whole
        self._balance()

    def _balance(self) -> None:
        if self.held > self.limit:
            # Only the oldest goes on.
            oldest = next(iter(self._partial), None)
            if oldest in self.paused:
                self._resume(oldest)
            if len(self._partial) - len(self.paused) > 1:
                for reader in [
                    each for each in self._partial if each not in self.paused and each is not oldest
                ]:
                    self.paused[reader] = None
                    reader.pause()
        elif self.paused:
            # As many go on as there is room for.
            room = 1 + (self.limit - self.held) // self._step
            for _ in range(min(len(self.paused), room - len(self._partial) + len(self.paused))):
                self._resume(next(iter(self.paused)))

    def _resume(self, reader: Reader) -> None:
        del self.paused[reader]
        reader.resume()
