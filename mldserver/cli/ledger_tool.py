"""What commands that read a ledger share: finding it, opening it while servers run, and showing results."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path  # cyclopts reads the annotations
from typing import Annotated, Any, Final

from cyclopts import Group, Parameter
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mldserver.base.clock import SystemClock
from mldserver.cli import ReaderGone, working_directory
from mldserver.config.locations import SqlitePlace
from mldserver.config.resolve import ledger_file, resolve
from mldserver.config.settings import Settings
from mldserver.errors import ConfigError, LedgerError, OperatorError
from mldserver.ledger.contract import LedgerState
from mldserver.ledger.operations import Ledger
from mldserver.ledger.sqlite_file import pipeline_of
from mldserver.observe.log_lines import harmless

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNBOUNDED: Final = sys.maxsize
"""Columns where no terminal bounds them: a line stays a line for grep, and whole."""

AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="One JSON document, for other programs.")]


@Parameter(name="*", group=Group("Where the ledger is"))
@dataclass(frozen=True, slots=True)
class Where:
    """Names a ledger, in the words of the server's settings; these count too, from variables and settings file."""

    out: str | None = None
    """Folder of output, segments and ledger: a path or a URI. [default: as for `mldserver serve`]"""
    ledger: str | None = None
    """`sqlite`, `sqlite:PATH`, or `dynamodb://TABLE?region=REGION`. [default: as for `mldserver serve`]"""
    pipeline: str | None = None
    """The pipeline's name. [default: what the ledger in the folder says; else as for `mldserver serve`]"""
    config: Path | None = None
    """Settings file. [default: mldserver.toml in the working directory, if it is there]"""

    def resolved(self, **more: object) -> Settings:
        """Return the settings that these words, ``more`` (raw, by name) and the server's own settings give."""
        return resolve(
            {"out": self.out, "ledger": self.ledger, "pipeline": self.pipeline, **more},
            environ=os.environ,
            folder=working_directory(),
            config=self.config,
            handler_required=False,
        )


HERE: Final = Where()
"""As for ``mldserver serve``."""


def settings_at(where: Where) -> Settings:
    """Return the settings that name a ledger; the pipeline's name comes from the ledger if that is a file."""
    settings = where.resolved()
    if isinstance(settings.ledger, SqlitePlace):
        pipeline = where.pipeline or pipeline_of(ledger_file(settings)) or settings.pipeline
        return dataclasses.replace(settings, pipeline=pipeline)
    if not {"pipeline", "handler"} & settings.origins.keys():
        raise ConfigError(
            "A table may hold the ledgers of several pipelines.", advice="Name the one with --pipeline."
        )
    return settings


@contextlib.contextmanager
def as_operator_errors() -> Iterator[None]:
    """Raise OperatorError for a ledger or disk that fails: the operator named something that cannot be read."""
    try:
        yield
    except LedgerError as error:
        raise OperatorError(error.what, did=error.did, advice=error.advice, **error.where) from error
    except ReaderGone:
        raise
    except OSError as error:
        raise OperatorError(f"{error.filename or 'A file'}: {error.strerror or error}.") from error


@contextlib.contextmanager
def at_ledger(settings: Settings) -> Iterator[tuple[Ledger, LedgerState, asyncio.Runner]]:
    """Give the unopened ledger, its state, and the runner of its calls.

    Servers are not affected: nothing is registered or locked. Raises OperatorError if the ledger does not exist, is damaged,
    has a newer format, belongs to another pipeline, or cannot be reached.
    """
    from mldserver.assembly import ledger_of  # noqa: PLC0415  # the whole server: `--help` must not wait for it

    with as_operator_errors(), asyncio.Runner() as runner:
        ledger = ledger_of(settings, server_id=f"tool:{os.getpid()}", clock=SystemClock())
        try:
            yield ledger, runner.run(ledger.peek()), runner
        finally:
            runner.run(ledger.close())


def state_at(where: Where) -> LedgerState:
    """Return what the ledger holds. Raises OperatorError as ``at_ledger``."""
    with at_ledger(settings_at(where)) as (_, held, _):
        return held


def moment(ms: int | None) -> str:
    """Return a time as ISO 8601 in UTC, to the second unless it has more; a dash for none."""
    if ms is None:
        return "-"
    try:
        at = _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:  # a column may hold anything
        return f"{ms} ms"
    return at.isoformat(timespec="milliseconds" if ms % 1000 else "seconds").replace("+00:00", "Z")


def table(title: str, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> Table:
    """Return a table of ``plain`` cells. A column whose name begins with ``>`` holds numbers."""
    grid = Table(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for name in columns:
        justify: Any = "right" if name.startswith(">") else "left"
        grid.add_column(name.removeprefix(">"), justify=justify, overflow="fold")
    for row in rows:
        grid.add_row(*map(plain, row))
    return grid


def details(pairs: Iterable[tuple[str, object]]) -> Table:
    """Return names and values, a line each; in a terminal long values are folded."""
    grid = Table.grid(padding=(0, 2))
    for _ in range(2):
        grid.add_column(overflow="fold")
    for pair in pairs:
        grid.add_row(*map(plain, pair))
    return grid


def plain(value: object) -> Text:
    """Return what peers and handlers have written without control characters, and with no meaning as markup; None is a dash."""
    text = "-" if value is None else str(value)
    return Text("\n".join(harmless(line) for line in text.splitlines()))


def first_line(text: str | None) -> str:
    """Return the first line of an error, say; empty for none."""
    return next(iter((text or "").splitlines()), "")


def tell(*parts: RenderableType) -> None:
    """Write tables and lines to standard output."""
    text = io.StringIO()
    terminal = sys.stdout.isatty()
    console = Console(
        file=text,
        force_terminal=terminal or None,
        width=Console().width if terminal else _UNBOUNDED,
        highlight=False,
    )
    for part in parts:
        console.print(part)
    # A segment's path may hold bytes that are not UTF-8.
    lines = [line.rstrip() for line in text.getvalue().split("\n")]
    tell_bytes("\n".join(lines).encode("utf-8", "backslashreplace"))


def tell_json(document: Any) -> None:
    """Write one JSON document to standard output. Sequence numbers are text: they have up to 60 digits."""
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    tell_bytes(text.encode("utf-8", "backslashreplace"))


def tell_bytes(data: bytes) -> None:
    """Write bytes to standard output as they are."""
    with contextlib.suppress(ReaderGone):  # what there is still to do is done all the same
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.flush()


def answer(as_json: bool, document: Any, *parts: RenderableType) -> None:  # noqa: FBT001  # the command's own flag
    """Tell what was done: as a document, or as text."""
    if as_json:
        tell_json(document)
    else:
        tell(*parts)
