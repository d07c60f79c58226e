"""Show a command's result: one document, as text (facts and tables) or as JSON. Both have the same names.

A name ends in its value's unit, and that decides how text shows the value: ``…_ms`` is a time of day, ``lag_ms`` and
``…_seconds`` are durations, ``bytes`` and ``…_bytes`` are sizes. Text leaves out facts that do not apply.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from cyclopts import Parameter
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mldserver.cli import ReaderGone
from mldserver.observe.log_lines import harmless

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNBOUNDED: Final = sys.maxsize
"""Columns where no terminal bounds them: a line stays a line for grep, and whole."""

AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="One JSON document, for other programs.")]


def answer(as_json: bool, document: Any, *text: RenderableType) -> None:  # noqa: FBT001  # the command's own flag
    """Write a result to standard output: the document as JSON, or its text. Without ``text`` all of the document."""
    if as_json:
        write_json(document)
    else:
        write_text(*(text or parts(document)))


def write_json(document: Any) -> None:
    """Write one JSON document to standard output. Sequence numbers must be text: they have up to 60 digits."""
    # Not with orjson, which refuses integers above 64 bits and file names that are not UTF-8.
    write((json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))


def parts(document: Mapping[str, Any], /, **columns: str) -> list[RenderableType]:
    """Return a document as text: its facts, then a table for each list of rows, with the named columns or all."""
    lists = {name: rows for name, rows in document.items() if _is_rows(rows)}
    shown: list[RenderableType] = [details({k: v for k, v in document.items() if k not in lists})]
    for name, rows in lists.items():
        shown += ["", table(rows, columns.get(name, ""), title=_words(name))]
    return shown


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def table(rows: Sequence[Mapping[str, Any]], columns: str = "", *, title: str = "") -> Table:
    """Return rows as a table with these columns, names separated by spaces; without names, every column of the first row."""
    names = columns.split() or list(rows[0] if rows else ())
    grid = Table(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for name in names:
        numeric = any(isinstance(row[name], int | float) for row in rows)
        grid.add_column(
            _words(name),
            justify="right" if numeric and not name.endswith("at_ms") else "left",
            overflow="fold",
        )
    for row in rows:
        grid.add_row(*(plain(first_line(cell(name, row[name]))) for name in names))
    return grid


def details(facts: Mapping[str, Any]) -> Table:
    """Return names and values, a line each, without values that do not apply; a terminal folds long values."""
    grid = Table.grid(padding=(0, 2))
    for _ in range(2):
        grid.add_column(overflow="fold")
    for name, value in facts.items():
        if _applies(value):
            grid.add_row(plain(_words(name)), plain(cell(name, value)))
    return grid


def _applies(value: object) -> bool:
    return value is not None and value is not False and value not in ("", (), [], {})


def cell(name: str, value: Any) -> str:
    """Return a value as text, in the form that its name asks for; a dash for None and what is empty."""
    if isinstance(value, Mapping):
        inner = [
            _words(key) if one is True else f"{_words(key)} {cell(key, one)}"
            for key, one in value.items()
            if _applies(one) and one != 0
        ]
        return ", ".join(inner) or "none"
    if not _applies(value):
        return "-"
    if isinstance(value, bool):
        return "yes"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, int | float):
        return _number(name, value)
    return str(value)


def _number(name: str, value: float) -> str:
    name = name.removesuffix("/s")
    if name == "lag_ms":
        return span(value / 1000)
    if name.endswith("_ms"):
        return moment(int(value))
    if name.endswith("seconds"):
        return span(value)
    if name.endswith("bytes"):
        return size(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}"


def _words(name: str) -> str:
    """Return a name as people read it, without the unit."""
    for unit in ("_ms", "_seconds"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def moment(ms: int | None) -> str:
    """Return a time as ISO 8601 in UTC, to the second unless it has more; a dash for none."""
    if ms is None:
        return "-"
    try:
        at = _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:  # a column may hold anything
        return f"{ms} ms"
    return at.isoformat(timespec="milliseconds" if ms % 1000 else "seconds").replace("+00:00", "Z")


_SPANS: Final = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def span(seconds: float) -> str:
    """Return a duration in one or two units."""
    whole_seconds = round(seconds)
    for factor, unit, rest_factor, rest_unit in _SPANS:
        if whole_seconds >= factor:
            many, rest = divmod(whole_seconds, factor)
            return f"{many} {unit}" + (f" {rest // rest_factor} {rest_unit}" if rest >= rest_factor else "")
    return f"{seconds:.1f} s" if seconds >= 1 else f"{round(seconds * 1000)} ms"


def size(amount: float) -> str:
    """Return bytes in the binary unit that makes a short number."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:  # noqa: PLR2004  # of each unit
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 10 else f"{amount:.1f} {unit}"  # noqa: PLR2004  # three digits
        amount /= 1024
    return f"{amount:,.1f} TiB"


def plain(value: object) -> Text:
    """Return what peers and handlers have written without control characters, and with no meaning as markup."""
    return Text("\n".join(harmless(line) for line in str(value).splitlines()))


def first_line(text: str | None) -> str:
    """Return the first line of an error, say; empty for none."""
    return next(iter((text or "").splitlines()), "")


def write_text(*shown: RenderableType) -> None:
    """Write tables and lines to standard output."""
    write(as_bytes(*shown))


def as_bytes(*shown: RenderableType) -> bytes:
    """Return tables and lines for standard output: in the width of the terminal, or unbounded and without escapes."""
    text = io.StringIO()
    terminal = sys.stdout.isatty()
    console = Console(
        file=text,
        force_terminal=terminal or None,
        width=Console().width if terminal else _UNBOUNDED,
        highlight=False,
    )
    for part in shown:
        console.print(part)
    lines = [line.rstrip() for line in text.getvalue().split("\n")]
    # A segment's path may hold bytes that are not UTF-8.
    return "\n".join(lines).encode("utf-8", "backslashreplace")


def write(data: bytes) -> None:
    """Write bytes to standard output as they are. A reader that has ended does not end the command."""
    with contextlib.suppress(ReaderGone):
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
