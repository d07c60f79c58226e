"""Room in memory that two processes share: which bytes are taken. A pure allocator, first fit.

First fit keeps to the beginning, whose pages are warm: a first touch of a page costs microseconds, a copy into it
nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["Arena"]

_ALIGN = 64


class Arena:
    """Hands out ranges of ``size`` bytes."""

    def __init__(self, size: int) -> None:
        """Begin with everything free."""
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []
        """Ranges (offset, length), in order, never adjacent."""
        self._taken: dict[int, int] = {}

    @property
    def free(self) -> int:
        """How many bytes are free, in however many pieces."""
        return sum(length for _, length in self._free)

    def take(self, size: int) -> int | None:
        """Return the offset of ``size`` free bytes, taken from now on; None when no piece is long enough."""
        wanted = max(_ALIGN, -(-size // _ALIGN) * _ALIGN)
        for place, (offset, length) in enumerate(self._free):
            if length >= wanted:
                if length == wanted:
                    del self._free[place]
                else:
                    self._free[place] = (offset + wanted, length - wanted)
                self._taken[offset] = wanted
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Let go of what ``take`` returned. Raises KeyError for anything else."""
        length = self._taken.pop(offset)
        place = bisect_left(self._free, (offset, 0))
        if place < len(self._free) and self._free[place][0] == offset + length:
            length += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == offset:
            before = self._free[place - 1]
            self._free[place - 1] = (before[0], before[1] + length)
        else:
            self._free.insert(place, (offset, length))
