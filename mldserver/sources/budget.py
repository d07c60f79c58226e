"""One bound on what all connections together hold of unread lines. Synchronous; readers are paused through calls.

A line may have 256 MiB, and there may be a thousand connections: a limit for each is no bound. While the sum is above
the budget, every reader that has an incomplete line is paused, but the one whose line is oldest: it can always finish
(its own time-out sees to that, which is not extended while others wait), so that there is always progress.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["ReadBudget", "Reader"]


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

    def __init__(self, limit: int) -> None:
        """Pause readers while more than ``limit`` bytes are held."""
        self._limit = limit
        self._partial: dict[Reader, int] = {}  # in the order in which the lines began
        self._whole: dict[Reader, int] = {}
        self._paused: set[Reader] = set()
        self._held = 0

    @property
    def held(self) -> int:
        """Bytes held in all."""
        return self._held

    @property
    def has_room(self) -> bool:
        """Whether the limit is not reached."""
        return self._held < self._limit

    @property
    def others_wait(self) -> bool:
        """Whether readers are paused because of those that are not."""
        return bool(self._paused)

    def set_partial(self, reader: Reader, size: int) -> None:
        """Note the size of a reader's incomplete line; 0: it has none."""
        self._set(self._partial, reader, size)

    def set_whole(self, reader: Reader, size: int) -> None:
        """Note the size of a reader's line that is being worked on; 0: none is any more."""
        self._set(self._whole, reader, size)

    def forget(self, reader: Reader) -> None:
        """Note that a reader is gone."""
        self._paused.discard(reader)
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
        if self._held <= self._limit and not self._paused:
            return
        waiting = set(list(self._partial)[1:]) if self._held > self._limit else set()
        changed = self._paused ^ waiting
        self._paused = waiting
        for reader in changed:
            if reader in waiting:
                reader.pause()
            else:
                reader.resume()
