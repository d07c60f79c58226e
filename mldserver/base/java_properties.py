"""Writes Java's properties files, as ``java.util.Properties`` reads them."""

from __future__ import annotations

from collections.abc import Mapping


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
