"""Splits bytes into lines."""

from __future__ import annotations

from typing import Final

LONGEST_LINE: Final = 64 * 1024
"""Bytes of a line that are kept of what a process prints; a query plan, or a list of leases, can have megabytes."""
_CUT: Final = " … cut".encode()


class LineSplitter:
    """Splits bytes of any chunking into lines."""

    def __init__(self, longest: int | None = None) -> None:
        """``longest``: how many bytes of a line are kept, so that memory is bounded; None: all."""
        self._longest = longest
        self._begun = bytearray()
        self._cut = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete, without their ends."""
        first, *others = data.split(b"\n")
        self._add(first)
        lines = []
        for part in others:
            lines += self._end()
            self._add(part)
        return lines

    def finish(self) -> list[bytes]:
        """Return the last line if it has no end."""
        return self._end() if self._begun else []

    def _add(self, part: bytes) -> None:
        room = None if self._longest is None else self._longest - len(self._begun)
        self._cut |= room is not None and len(part) > room
        self._begun += part[:room]

    def _end(self) -> list[bytes]:
        line = bytes(self._begun).removesuffix(b"\r") + (_CUT if self._cut else b"")
        self._begun, self._cut = bytearray(), False
        return [line]


class TextLines(LineSplitter):
    """Splits what a process prints into lines of text, in bounded memory."""

    def __init__(self) -> None:
        super().__init__(LONGEST_LINE)

    def feed_text(self, data: bytes) -> list[str]:
        """Return the lines that are complete, without their ends."""
        return [line.decode("utf-8", "replace") for line in self.feed(data)]

    def finish_text(self) -> list[str]:
        """Return the last line if it has no end."""
        return [line.decode("utf-8", "replace") for line in self.finish()]
