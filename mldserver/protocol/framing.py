"""Lines out of bytes: any chunking, no quadratic joins, one bound on memory.

A line ends with LF; CRLF is accepted; blank lines are skipped (the Java skips them too, KCL 3.1.3). Each byte is
searched once for a line end, and copied once: into its line. A large line's first copy costs more than all else that is
done with it here (its memory is touched for the first time), so there is no second one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mldserver.errors import FramingError

if TYPE_CHECKING:
    from mldserver.protocol.messages import Line

_EXCERPT: Final = 80


class LineFramer:
    """Collects bytes, gives whole lines. Holds at most one incomplete line of at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        """Refuse lines longer than ``limit`` bytes (line end not counted, a CR is)."""
        self._limit = limit
        self._partial = bytearray()
        self.error: FramingError | None = None
        """Set once a line was too long. From then on every byte is dropped: line ends mean nothing any more."""

    @property
    def pending(self) -> int:
        """Bytes of the incomplete line held so far."""
        return len(self._partial)

    @property
    def pending_blank(self) -> bool:
        """Whether the incomplete line is nothing but a little white space, such as the CR of a CRLF."""
        return self.pending <= _EXCERPT and self._partial.isspace()

    @property
    def excerpt(self) -> bytes:
        """The start of the incomplete line, for a log."""
        return bytes(self._partial[:_EXCERPT])

    def feed(self, data: bytes | bytearray, size: int | None = None) -> list[Line]:
        """Take the first ``size`` bytes of ``data`` (default: all); return the lines they complete, without their ends.

        ``data`` may be used again afterwards. Never raises: a line above the limit sets ``error``; the lines before it
        are returned.
        """
        lines: list[Line] = []
        if self.error is not None:
            return lines
        stop, start = len(data) if size is None else size, 0
        if not self._partial and 1 < stop <= self._limit and data.find(b"\n", 0, stop) == stop - 1:
            # One whole line, as nearly always: the rest of this is for those that are not.
            whole = bytes(memoryview(data)[: stop - 1]).removesuffix(b"\r")
            return [whole] if whole and not whole.isspace() else lines
        with memoryview(data) as view:
            while (end := data.find(b"\n", start, stop)) >= 0:
                if not self._fits(end - start, view[start:]):
                    return lines
                line = self._complete(view[start:end])
                if line and not line.isspace():
                    lines.append(line)
                start = end + 1
            if self._fits(stop - start, view[start:stop]):
                self._partial += view[start:stop]
        return lines

    def feed_eof(self) -> int:
        """Take the end of the input: return the length of the line that was cut off, 0 when there was none.

        A line without its end is dropped: it may be any prefix of what was meant, so it is never acted upon.
        """
        cut_off = 0 if self._partial.isspace() else len(self._partial)
        self._partial = bytearray()
        return cut_off

    def _fits(self, more: int, rest: memoryview) -> bool:
        size = len(self._partial) + more
        if size <= self._limit:
            return True
        shown = (self.excerpt + bytes(rest[: min(more, _EXCERPT)]))[:_EXCERPT]
        self.error = FramingError(
            f"A line is longer than the limit of {self._limit} bytes.",
            did="The connection was closed.",
            advice="Raise the line limit if the stream's batches are really that large, or lower maxRecords.",
            excerpt=shown.decode("ascii", "replace"),
        )
        self._partial = bytearray()
        return False

    def _complete(self, rest: memoryview) -> Line:
        if not self._partial:
            return bytes(rest).removesuffix(b"\r")
        self._partial += rest
        # A fresh buffer each time: one huge line must not leave its memory with an idle connection.
        whole, self._partial = self._partial, bytearray()
        if whole.endswith(b"\r"):
            del whole[-1:]
        return whole
