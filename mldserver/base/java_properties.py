"""Java's properties files: text to pairs and back, as ``java.util.Properties`` reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_SPACE: Final = " \t\f"
_GOES_ON: Final = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")
"""An odd number of backslashes at the end of a line."""
_PAIR: Final = re.compile(r"((?:\\.|[^\\=: \t\f])*)[ \t\f]*(?:[=:][ \t\f]*)?(.*)")
_ESCAPE: Final = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)")
_CONTROLS: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def from_text(text: str) -> dict[str, str]:
    """Return the pairs of a file; of a key that comes again the last. Raises ValueError, which names the line."""
    pairs: dict[str, str] = {}
    lines = enumerate(re.split(r"\r\n|\r|\n", text), 1)
    for number, written in lines:
        line = written.lstrip(_SPACE)
        if not line or line[0] in "#!":
            continue
        while _GOES_ON.search(line):
            line = line[:-1] + next(lines, (0, ""))[1].lstrip(_SPACE)
        pair = _PAIR.fullmatch(line)
        assert pair is not None, "no backslash stands alone at the end, and all else matches"
        try:
            pairs[_plain(pair[1])] = _plain(pair[2])
        except ValueError as error:
            raise ValueError(f"line {number} has a \\u that names no character") from error
    return pairs


def _plain(escaped: str) -> str:
    """Return text without its escapes. Raises ValueError."""

    def char(escape: re.Match[str]) -> str:
        if escape[1] == "u":
            raise ValueError("four digits are wanted")
        return chr(int(escape[1][1:], 16)) if escape[1][1:] else _CONTROLS.get(escape[1], escape[1])

    # Java writes a character beyond U+FFFF as two halves.
    return _ESCAPE.sub(char, escaped).encode("utf-16-le", "surrogatepass").decode("utf-16-le")


def as_text(properties: Mapping[str, str]) -> str:
    """Return the text of a properties file: ASCII, with escapes where ``java.util.Properties`` needs them."""
    return "".join(f"{_escaped(name, ' =:')} = {_escaped(value)}\n" for name, value in properties.items())


def _escaped(text: str, special: str = "") -> str:
    written = []
    for index, char in enumerate(text):
        if char == "\\" or char in special or (index == 0 and char in " #!"):
            written.append(f"\\{char}")
        elif " " <= char <= "~":
            written.append(char)
        else:
            units = char.encode("utf-16-be")
            written.extend(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
    return "".join(written)
