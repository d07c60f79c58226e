"""The documentation as tests read it: its pages, and the examples in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["DOCS", "PAGES", "ROOT", "Example", "examples", "prose"]

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "mldserver" / "docs"
PAGES: Final = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    """A block of code on a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def examples() -> list[Example]:
    """Return the blocks of code of all pages."""
    return [
        Example(page.name, text.count("\n", 0, match.start()) + 1, match[1], match[2])
        for page, text in ((page, page.read_text("utf-8")) for page in PAGES)
        for match in _FENCE.finditer(text)
    ]


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return _FENCE.sub("", page.read_text("utf-8"))
