"""``mldserver help``: the pages of the documentation, in the terminal."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Final

from cyclopts import App
from rich.console import Console

import mldserver
from mldserver.cli.ledger_tool import table, tell
from mldserver.errors import OperatorError

DOCS: Final = Path(mldserver.__file__).parent / "docs"
_PROSE_WIDTH: Final = 110

_HELP = """
Show a page of the documentation. Without a topic: list the pages.

```
mldserver help
mldserver help handlers
mldserver help settings | less
```

In a terminal it is set for reading; elsewhere it is the page's Markdown.
"""

app = App(name="help", help=_HELP, help_format="markdown")


@app.default
def show_page(topic: str | None = None, /) -> int:
    """Show the page of that name, or the list. Raises OperatorError when there is no such page."""
    pages = {path.stem: path for path in sorted(DOCS.glob("*.md"))}
    if topic is None:
        summaries = [list(filter(None, path.read_text("utf-8").splitlines()))[1] for path in pages.values()]
        listing = table("", ("page", "what it tells"), zip(pages, summaries, strict=True))
        tell(
            listing,
            "",
            "Read one with `mldserver help PAGE`; a command's options with `mldserver COMMAND --help`.",
        )
        return 0
    if topic not in pages:
        near = difflib.get_close_matches(topic, pages, n=3, cutoff=0.5)
        raise OperatorError(
            f"There is no page {topic!r}.",
            advice=f"{'Near to it' if near else 'There'} are: {', '.join(near or pages)}.",
        )
    text = pages[topic].read_text("utf-8")
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return 0
    from rich.markdown import Markdown  # noqa: PLC0415  # nothing else needs it

    console = Console(file=sys.stdout)
    console.print(Markdown(text), width=min(console.width, _PROSE_WIDTH))
    return 0
