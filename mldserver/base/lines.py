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
        self._unfinished = bytearray()
        self._was_cut = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes, without their line ends; keep the unfinished rest."""
        end_of_line, *line_starts = data.split(b"\n")
        self._add(end_of_line)
        lines = []
        for start in line_starts:  # each follows a line end, which completes the line before
            lines.append(self._complete_line())
            self._add(start)
        return lines

    def finish(self) -> list[bytes]:
        """Return the unfinished last line, or an empty list if there is none."""
        return [self._complete_line()] if self._unfinished else []

    def _add(self, part: bytes) -> None:
        """Append to the unfinished line as many bytes as it may have; note whether bytes were dropped."""
        room = None if self._longest is None else self._longest - len(self._unfinished)
        self._was_cut |= room is not None and len(part) > room
        self._unfinished += part[:room]

    def _complete_line(self) -> bytes:
        """Return the unfinished line, marked if it was cut, and begin an empty one."""
        line = bytes(self._unfinished).removesuffix(b"\r") + (_CUT if self._was_cut else b"")
        self._unfinished, self._was_cut = bytearray(), False
        return line


class TextLines(LineSplitter):
    """Splits what a process prints into lines of text, in bounded memory."""

    def __init__(self) -> None:
        super().__init__(LONGEST_LINE)

    def feed_text(self, data: bytes) -> list[str]:
        """Return the lines that ``data`` completes, as ``feed``; invalid UTF-8 is replaced."""
        return [line.decode("utf-8", "replace") for line in self.feed(data)]

    def finish_text(self) -> list[str]:
        """Return the unfinished last line, or an empty list if there is none."""
        return [line.decode("utf-8", "replace") for line in self.finish()]
