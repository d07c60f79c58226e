"""``mldserver windows replay``: published windows computed again by other code, into another folder, and compared."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit, urlunsplit

import structlog
from cyclopts import Parameter

from mldserver.base.clock import SystemClock
from mldserver.cli.ledger_tool import (
    FROM_SETTINGS,
    LedgerOptions,
    as_operator_errors,
    ledger_settings,
    read_ledger,
)
from mldserver.cli.logs import since_time
from mldserver.cli.render import AsJson, print_result, table
from mldserver.config.locations import OutPlace, RemoteOut, out
from mldserver.config.settings import Settings
from mldserver.coordinator.core.shape import Shape
from mldserver.errors import EXIT_CLEAN, EXIT_FAULT, OperatorError
from mldserver.jobs.replay import Difference, Replay, chosen
from mldserver.ledger.contract import LedgerState, WindowEntry
from mldserver.ledger.rules import preceding
from mldserver.output.layout import written
from mldserver.output.store import OutputStore
from mldserver.windows import counted


def replay_windows(
    *,
    handler: Annotated[
        str | None, Parameter(help="Dotted path of the new code. [default: the settings' handler]")
    ] = None,
    to: Annotated[
        str, Parameter(help="Folder of the new output, empty or not there, in the file system of `out`.")
    ],
    since: Annotated[
        str, Parameter(help="The first window's start: a time, or a duration before now.")
    ] = "1970-01-01",
    until: Annotated[str | None, Parameter(help="Only windows that start before it. [default: all]")] = None,
    where: LedgerOptions = FROM_SETTINGS,
    as_json: AsJson = False,
) -> int:
    """Compute published windows again by other code, into another folder, and compare: nothing published is touched.

    Possible for windows whose segments are kept (`retention` with `late = recompute`, or `keep_segments`). Shows for each
    window how many rows only the published output has, how many only the new one, and which columns differ. Fractions count
    as equal if their first nine digits are. `retry --published` then publishes what a server's code makes of a window.

    Exit codes: 0 done, 1 a window failed.
    """
    settings = ledger_settings(where)
    if handler is not None:
        settings = replace(settings, handler=handler)
    if not settings.handler:
        raise OperatorError("No handler was named.", advice="Name the new code with --handler.")
    now = datetime.now(UTC)
    until_ms = None if until is None else _ms(since_time(until, now, option="--until"))
    state = read_ledger(where)
    entries = list(chosen(state.windows.values(), _ms(since_time(since, now)), until_ms))
    if not entries:
        raise OperatorError(
            "No window of that time can be computed again.",
            advice="`mldserver windows list --all` shows those whose segments are kept: for `retention`, with "
            "`late = recompute`, or for `keep_segments`.",
        )
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
    found = _replayed(settings, state, entries, to)
    failed = [each for each in found if each.error]
    equal = sum(each.is_none for each in found)
    rows = [_row(each) for each in found if as_json or not each.is_none]
    text = (
        f"{counted(len(found), 'window')}: {equal:,} equal, {len(failed):,} failed; the new output is in {to}"
    )
    if settings.sink is not None:
        text += f". What is published in {settings.sink} was not compared"
    print_result(
        as_json, rows, table(rows, "window rows_before rows only_before only_now columns error"), text
    )
    return EXIT_FAULT if failed else EXIT_CLEAN


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def _row(each: Difference) -> dict[str, Any]:
    signs = (("-", each.columns_gone), ("+", each.columns_new), ("~", each.columns_changed))
    return {
        "window": each.window,
        "rows_before": each.rows_before,
        "rows": each.rows,
        "only_before": each.only_before,
        "only_now": each.only_now,
        "columns": " ".join(f"{sign}{name}" for sign, names in signs for name in names) or None,
        "error": each.error or None,
    }


def _replayed(
    settings: Settings, state: LedgerState, entries: list[WindowEntry], to: str
) -> list[Difference]:
    """Compute the windows on a Spark of their own, and return their differences. Raises OperatorError and HandlerError."""
    from mldserver.assembly import shape_of, spark_of, store_of  # noqa: PLC0415  # the whole server: `--help` must not wait for it
    from mldserver.handler.inspection import load_spec  # noqa: PLC0415  # see above

    spec = load_spec(settings.handler)
    if spec.schema is None:
        raise OperatorError(f"The handler {settings.handler} has no rows, so it computes no windows.")
    shape = shape_of(settings, spec)
    _refuse_other_rows(shape, state, entries)
    aims = replace(settings, out=_place(settings, to), sink=None, late_sink=None, dead_letters=None)
    store, target = store_of(settings), store_of(aims)
    with as_operator_errors():
        if next(target.files(""), None) is not None:
            raise OperatorError(
                f"The folder {to} is not empty.", did="Nothing was computed.", advice="Name another one."
            )
        # With a cluster, the folder shows that executors share it.
        work = tempfile.TemporaryDirectory(prefix=".replay-", dir=_made(target, aims))
    with work as folder:
        engine = spark_of(
            aims,
            spec,
            out=store.place,
            clock=SystemClock(),
            work_dir=Path(folder),
            place=target.uri("_spark") if target.place else "",
        )
        replay = Replay(
            pipeline=settings.pipeline,
            engine=engine,
            store=store,
            to=target,
            older=shape.older(state),
            is_compared=settings.sink is None,
            takes_previous=spec.takes_previous,
            before=preceding(state.windows, entries[0].window_id)[0],
        )
        return asyncio.run(_run(replay, entries))


async def _run(replay: Replay, entries: list[WindowEntry]) -> list[Difference]:
    """Replay the windows while the engine lives. Raises what a start of the engine raises."""
    found: list[Difference] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(replay.engine.run())
        try:
            await replay.run(entries, found.append)
        finally:
            await replay.engine.close()
    return found


def _place(settings: Settings, to: str) -> OutPlace:
    """Return the folder ``to`` as an output folder. Raises OperatorError if it is not in the file system of ``out``."""
    place = out.parse(to)
    if isinstance(place, Path) and isinstance(settings.out, Path):
        _refuse_nested(str(place.absolute()), str(settings.out.absolute()))
        return place.absolute()
    if isinstance(place, RemoteOut) and isinstance(settings.out, RemoteOut):
        ours, its = urlsplit(settings.out.uri), urlsplit(place.uri)
        if (ours.scheme, ours.hostname) == (its.scheme, its.hostname):
            _refuse_nested(its.path, ours.path)
            return RemoteOut(urlunsplit(ours._replace(path=its.path)))  # with its options and credentials
    raise OperatorError(
        f"--to {place} is not where {settings.out} is: one Spark job reads there and writes here.",
        advice="Name a folder on the same disk, or in the same bucket.",
    )


def _refuse_nested(new: str, published: str) -> None:
    """Raise OperatorError if one of two folders is in the other: readers of the outer one would find every window twice."""
    one, other = (f"{os.path.normpath(path)}/" for path in (new, published))
    if one.startswith(other) or other.startswith(one):
        raise OperatorError(
            f"--to {new} and the published output in {published} lie in each other.",
            did="Nothing was computed.",
            advice="Name a folder beside it.",
        )


def _refuse_other_rows(shape: Shape, state: LedgerState, entries: list[WindowEntry]) -> None:
    """Raise OperatorError if the code does not fit the rows of a window."""
    for fingerprint in {written(segment.path).shape for entry in entries for segment in entry.segments}:
        stored = Shape.read(state.shapes[fingerprint])
        if faults := replace(shape, table=stored.table).faults(stored):
            raise OperatorError(
                f"The handler does not go with the rows that the ledger holds: {'; '.join(faults)}.",
                did="Nothing was computed.",
                advice="Only `on_window` may differ, and columns that rows of the new code have more or wider.",
            )


def _made(target: OutputStore, aims: Settings) -> Path | None:
    """Make the folder of the new output; return it if it is local."""
    if not isinstance(aims.out, Path):
        return None
    target.prepare()
    return aims.out
