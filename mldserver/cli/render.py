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


def print_result(as_json: bool, document: Any, *text: RenderableType) -> None:  # noqa: FBT001  # the command's own flag
    """Print a command's result: the document as JSON, or else ``text``; without ``text``, the whole document as text."""
    if as_json:
        write_json(document)
    else:
        write_text(*(text or facts_and_tables(document)))


def write_json(document: Any) -> None:
    """Write one JSON document to standard output. Sequence numbers must be text: they have up to 60 digits."""
    # Not with orjson, which refuses integers above 64 bits and file names that are not UTF-8.
    write((json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))


def facts_and_tables(document: Mapping[str, Any], /, **columns: str) -> list[RenderableType]:
    """Return a document as text: its facts, then a table for each list of rows, with the named columns or all."""
    lists = {name: rows for name, rows in document.items() if _is_rows(rows)}
    shown: list[RenderableType] = [details({k: v for k, v in document.items() if k not in lists})]
    for name, rows in lists.items():
        shown += ["", table(rows, columns.get(name, ""), title=_label(name))]
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
            _label(name),
            justify="right" if numeric and not name.endswith("at_ms") else "left",
            overflow="fold",
        )
    for row in rows:
        grid.add_row(*(plain_text(first_line(format_value(name, row[name]))) for name in names))
    return grid


def details(facts: Mapping[str, Any]) -> Table:
    """Return names and values, a line each, without values that do not apply; a terminal folds long values."""
    grid = Table.grid(padding=(0, 2))
    for _ in range(2):
        grid.add_column(overflow="fold")
    for name, value in facts.items():
        if _applies(value):
            grid.add_row(plain_text(_label(name)), plain_text(format_value(name, value)))
    return grid


def _applies(value: object) -> bool:
    """Whether a value is shown at all: not None, False, or empty."""
    return value is not None and value is not False and value not in ("", (), [], {})


def format_value(name: str, value: Any) -> str:
    """Return a value as text; the name's ending says its unit (see the module). A dash for None and for empty values."""
    if isinstance(value, Mapping):
        items = [
            _label(key) if item is True else f"{_label(key)} {format_value(key, item)}"
            for key, item in value.items()
            if _applies(item) and item != 0
        ]
        return ", ".join(items) or "none"
    if not _applies(value):
        return "-"
    if isinstance(value, bool):
        return "yes"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, int | float):
        return _format_number(name, value)
    return str(value)


def _format_number(name: str, value: float) -> str:
    name = name.removesuffix("/s")
    if name == "lag_ms":
        return format_duration(value / 1000)
    if name.endswith("_ms"):
        return format_time(int(value))
    if name.endswith("seconds"):
        return format_duration(value)
    if name.endswith("bytes"):
        return format_size(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}"


def _label(name: str) -> str:
    """Return a name as people read it, without the unit."""
    for unit in ("_ms", "_seconds"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def format_time(ms: int | None) -> str:
    """Return a time as ISO 8601 in UTC, to the second unless it has more; a dash for none."""
    if ms is None:
        return "-"
    try:
        at = _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:  # a column may hold anything
        return f"{ms} ms"
    return at.isoformat(timespec="milliseconds" if ms % 1000 else "seconds").replace("+00:00", "Z")


_SPANS: Final = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def format_duration(seconds: float) -> str:
    """Return a duration in one or two units."""
    whole_seconds = round(seconds)
    for factor, unit, rest_factor, rest_unit in _SPANS:
        if whole_seconds >= factor:
            many, rest = divmod(whole_seconds, factor)
            return f"{many} {unit}" + (f" {rest // rest_factor} {rest_unit}" if rest >= rest_factor else "")
    return f"{seconds:.1f} s" if seconds >= 1 else f"{round(seconds * 1000)} ms"


def format_size(amount: float) -> str:
    """Return bytes in the binary unit that makes a short number."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:  # noqa: PLR2004  # of each unit
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 10 else f"{amount:.1f} {unit}"  # noqa: PLR2004  # three digits
        amount /= 1024
    return f"{amount:,.1f} TiB"


def plain_text(value: object) -> Text:
    """Return a text without control characters, which rich does not interpret as markup: peers and handlers may have written it."""
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
    is_terminal = sys.stdout.isatty()
    console = Console(
        file=text,
        force_terminal=is_terminal or None,
        width=Console().width if is_terminal else _UNBOUNDED,
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
