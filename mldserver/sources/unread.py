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
        ...

    def resume(self) -> None:
        """Read on."""
        ...


class ReadBudget:
    """Counts bytes of incomplete lines, and of whole lines that are being worked on, over all readers."""

    def __init__(self, limit: int, *, step: int = _STEP_BYTES) -> None:
        """Pause readers while more than ``limit`` bytes are held; let one more go on for each ``step`` of room."""
        self.limit = limit
        self._step = step
        self._partial: dict[Reader, int] = {}  # in the order in which the lines began
        self._whole: dict[Reader, int] = {}
        self._paused: dict[Reader, None] = {}  # in the order in which they began to wait
        self._held = 0

    @property
    def held(self) -> int:
        """Bytes held in all."""
        return self._held

    @property
    def has_room(self) -> bool:
        """Whether the limit is not reached."""
        return self._held < self.limit

    @property
    def others_wait(self) -> bool:
        """Whether readers are paused because of those that are not."""
        return bool(self._paused)

    def set_partial(self, reader: Reader, size: int) -> None:
        """Note the size of a reader's incomplete line; 0: it has none."""
        if not size and reader in self._paused:
            self._resume(reader)
        self._set(self._partial, reader, size)

    def set_whole(self, reader: Reader, size: int) -> None:
        """Note the size of a reader's line that is being worked on; 0: none is any more."""
        self._set(self._whole, reader, size)

    def forget(self, reader: Reader) -> None:
        """Note that a reader is gone."""
        self._paused.pop(reader, None)
        self._held -= self._partial.pop(reader, 0) + self._whole.pop(reader, 0)
        self._balance()

    def _set(self, sizes: dict[Reader, int], reader: Reader, size: int) -> None:
        self._held += size - sizes.get(reader, 0)
        if size:
            sizes[reader] = size
        else:
            sizes.pop(reader, None)
        self._balance()

    def _balance(self) -> None:
        if self._held > self.limit:
            # Only the oldest goes on.
            oldest = next(iter(self._partial), None)
            if oldest in self._paused:
                self._resume(oldest)
            if len(self._partial) - len(self._paused) > 1:
                for reader in [
                    each for each in self._partial if each not in self._paused and each is not oldest
                ]:
                    self._paused[reader] = None
                    reader.pause()
        elif self._paused:
            # As many go on as there is room for.
            room = 1 + (self.limit - self._held) // self._step
            for _ in range(min(len(self._paused), room - len(self._partial) + len(self._paused))):
                self._resume(next(iter(self._paused)))

    def _resume(self, reader: Reader) -> None:
        del self._paused[reader]
        reader.resume()
