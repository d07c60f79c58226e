"""What the tools that look into a ledger share: where it is, how it is opened beside a server, how they tell."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path  # noqa: TC003  # cyclopts reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Group, Parameter

from mldserver.cli.stdio import ReaderGone, working_directory
from mldserver.errors import ConfigError, LedgerError, OperatorError
from mldserver.observe.render import harmless

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from mldserver.config import Settings
    from mldserver.ledger.contract import LedgerState
    from mldserver.ledger.operations import Ledger

__all__ = [
    "AsJson",
    "Where",
    "add",
    "at_ledger",
    "create_table",
    "details",
    "moment",
    "pipeline_at",
    "settings_at",
    "table",
    "tell",
    "tell_bytes",
    "tell_json",
]

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


def at_ledger(where: Where | Settings, work: Callable[[Ledger, LedgerState], Awaitable[None]]) -> None:
    """Run ``work`` on the ledger and what it holds. No server notices: nothing is registered or locked.

    Raises OperatorError when there is no ledger, or it is damaged, newer, somebody else's or out of reach.
    """
    settings = settings_at(where) if isinstance(where, Where) else where
    try:
        asyncio.run(_at(settings, work))
    except LedgerError as error:
        # For a tool this is no fault of the program: it was pointed at something that cannot be read.
        raise OperatorError(error.what, did=error.did, advice=error.advice, **error.where) from error


def create_table(where: Where) -> str:
    """Create the DynamoDB table that a ledger is to be in, unless it is there; return its name.

    Raises OperatorError when the ledger is to be in no table, or AWS does not make it.
    """
    from mldserver.base.clock import SystemClock  # noqa: PLC0415  # `--help` must not wait for it
    from mldserver.config import SqlitePlace  # noqa: PLC0415  # see above
    from mldserver.ledger.dynamodb import DynamoLedger  # noqa: PLC0415  # see above

    settings = _resolved(where)
    place = settings.ledger
    if isinstance(place, SqlitePlace):
        raise ConfigError(
            "A ledger in SQLite needs no table.",
            advice="Name one: --ledger 'dynamodb://TABLE?region=REGION'.",
        )

    async def create() -> None:
        ledger = DynamoLedger(
            place.table,
            pipeline=settings.pipeline,
            server_id=f"tool:{os.getpid()}",
            clock=SystemClock(),
            region=place.region or settings.region,
            endpoint_url=place.endpoint_url,
        )
        try:
            await ledger.create_table()
        finally:
            await ledger.close()

    try:
        asyncio.run(create())
    except LedgerError as error:
        raise OperatorError(error.what, did=error.did, advice=error.advice, **error.where) from error
    return place.table


async def _at(settings: Settings, work: Callable[[Ledger, LedgerState], Awaitable[None]]) -> None:
    from mldserver.assembly import ledger_of  # noqa: PLC0415  # `--help` must not wait for it
    from mldserver.base.clock import SystemClock  # noqa: PLC0415  # see above

    ledger = ledger_of(settings, server_id=f"tool:{os.getpid()}", clock=SystemClock())
    try:
        await work(ledger, await ledger.peek())
    finally:
        await ledger.close()


def pipeline_at(where: Where) -> str:
    """Return the name of the pipeline whose ledger it is."""
    return settings_at(where).pipeline


def _resolved(where: Where) -> Settings:
    from mldserver.config import resolve  # noqa: PLC0415  # `--help` must not wait for it

    given = {
        "out": where.out,
        "ledger": where.ledger,
        "pipeline": where.pipeline,
    }
    return resolve(
        given, environ=os.environ, folder=working_directory(), config=where.config, handler_required=False
    )


def settings_at(where: Where) -> Settings:
    """Return the settings that name a ledger: with its own pipeline, if it is a file that tells."""
    from mldserver.config import SqlitePlace, ledger_file  # noqa: PLC0415  # `--help` must not wait for it
    from mldserver.ledger.sqlite_file import pipeline_of  # noqa: PLC0415  # see above

    settings = _resolved(where)
    if isinstance(settings.ledger, SqlitePlace):
        pipeline = where.pipeline or pipeline_of(ledger_file(settings)) or settings.pipeline
        return dataclasses.replace(settings, pipeline=pipeline)
    if not {"pipeline", "handler"} & settings.origins.keys():
        raise ConfigError(
            "A table may hold the ledgers of several pipelines.", advice="Name the one with --pipeline."
        )
    return settings


def moment(ms: int | None) -> str:
    """Return a time as ISO 8601 in UTC, to the second unless it has more; a dash for none."""
    if ms is None:
        return "-"
    try:
        at = _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:  # a column may hold anything
        return f"{ms} ms"
    return at.isoformat(timespec="milliseconds" if ms % 1000 else "seconds").replace("+00:00", "Z")


def table(title: str, *columns: str) -> Table:
    """Return an empty table. A column whose name begins with ``>`` holds numbers."""
    from rich import box  # noqa: PLC0415  # `--help` must not wait for it
    from rich.table import Table  # noqa: PLC0415  # see above

    made = Table(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for name in columns:
        made.add_column(
            name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold"
        )
    return made


def details(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return names and values, a line each; in a terminal long values are folded."""
    from rich.table import Table  # noqa: PLC0415  # `--help` must not wait for it

    made = Table.grid(padding=(0, 2))
    for _ in range(2):
        made.add_column(overflow="fold")
    for name, value in pairs:
        made.add_row(_plain(name), _plain(value))
    return made


def _plain(text: str) -> Text:
    """Return what peers and handlers have written without control characters, and with no meaning as markup."""
    from rich.text import Text  # noqa: PLC0415  # `--help` must not wait for it

    return Text("\n".join(harmless(line) for line in text.splitlines()))


def add(made: Table, *cells: str) -> None:
    """Add a line of plain text to a table."""
    made.add_row(*(_plain(cell) for cell in cells))


def tell(*parts: RenderableType) -> None:
    """Write tables and lines to standard output."""
    from rich.console import Console  # noqa: PLC0415  # `--help` must not wait for it

    terminal = sys.stdout.isatty()
    text = io.StringIO()
    console = (
        Console(file=text, force_terminal=True, width=Console().width, highlight=False)
        if terminal
        else Console(file=text, width=_UNBOUNDED, highlight=False)
    )
    for part in parts:
        console.print(part)
    _write("\n".join(line.rstrip() for line in text.getvalue().split("\n")))


def tell_bytes(data: bytes) -> None:
    """Write bytes to standard output as they are."""
    _write_bytes(data)


def tell_json(document: Any) -> None:
    """Write one JSON document to standard output. Sequence numbers are text: they have up to 60 digits."""
    _write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _write(text: str) -> None:
    # A segment's path may hold what is no UTF-8.
    _write_bytes(text.encode("utf-8", "backslashreplace"))


def _write_bytes(data: bytes) -> None:
    with contextlib.suppress(ReaderGone):  # what there is still to do is done all the same
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
