"""Splits what a process prints into lines."""

from __future__ import annotations

from typing import Final

LONGEST_LINE: Final = 64 * 1024
"""Bytes of a line that are kept; a query plan, or a list of leases, can have megabytes."""
_CUT: Final = " … cut"


class Lines:
    """Splits bytes of any chunking into lines, in bounded memory."""

    def __init__(self) -> None:
        self._begun = bytearray()
        self._cut = False

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that are complete, without their ends. Bytes of a line beyond LONGEST_LINE are left out."""
        lines: list[str] = []
        for number, part in enumerate(data.split(b"\n")):
            if number:
                line = self._begun.decode("utf-8", errors="replace").rstrip("\r")
                lines.append(line + (_CUT if self._cut else ""))
                self._begun, self._cut = bytearray(), False
            room = LONGEST_LINE - len(self._begun)
            self._cut = self._cut or len(part) > room
            self._begun += part[:room]
        return lines

    def end(self) -> list[str]:
        """Return the last line if it has no end."""
        return self.feed(b"\n") if self._begun else []
