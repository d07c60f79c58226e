"""Computes published windows again into another folder, and compares them with what is published: a dry run of new code.

Nothing of the pipeline is touched: the ledger is only read, and its segments are too. A window whose segments a server
deletes meanwhile fails, and the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from mldserver.engine_jobs import FunctionView, WindowJob
from mldserver.errors import MldserverError
from mldserver.jobs.steps import job_of
from mldserver.ledger.contract import WindowEntry
from mldserver.output.layout import window_path
from mldserver.output.publish import shown_files
from mldserver.windows import as_window

if TYPE_CHECKING:
    import pyarrow as pa

    from mldserver.jobs.engine import Engine
    from mldserver.output.store import OutputStore

_DIGITS: Final = 9
"""Significant digits to which fractions are compared: Spark adds them up in any order."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What a window's new output has in place of the published one."""

    window: str
    rows_before: int | None = None
    """None: what is published was not compared."""
    rows: int | None = None
    """None: the window failed."""
    only_before: int = 0
    only_now: int = 0
    """Rows that only one of the two has, in the columns of both. Rows that are there twice count twice."""
    columns_gone: tuple[str, ...] = ()
    columns_new: tuple[str, ...] = ()
    columns_changed: tuple[str, ...] = ()
    """Columns of both that have another type, or other values."""
    error: str = ""

    @property
    def is_none(self) -> bool:
        """Whether both outputs are the same."""
        changes = (self.columns_gone, self.columns_new, self.columns_changed, self.only_before, self.only_now)
        return self.rows_before is not None and not self.error and not any(changes)


@dataclass(kw_only=True, slots=True)
class Replay:
    """One replay. ``run`` does it."""

    pipeline: str
    engine: Engine
    store: OutputStore
    """The pipeline's output folder."""
    to: OutputStore
    """Where the new output goes: another folder in the same file system."""
    older: Mapping[str, str] = field(default_factory=dict)
    """As ``WindowSteps.older``."""
    is_compared: bool = True
    """Whether windows are published as files, which can be compared."""
    takes_previous: bool = False
    """Whether ``on_window`` takes the result of the window before: of the replay, and for the first one what is published."""
    before: WindowEntry | None = None
    """The published window before the first one."""
    _previous: FunctionView | None = None

    async def run(self, entries: Iterable[WindowEntry], report: Callable[[Difference], None]) -> None:
        """Compute windows again, a group at a time. Calls ``report`` with each window's difference, in order."""
        waiting = list(entries)
        if self.takes_previous and self.before is not None:
            files = await asyncio.to_thread(shown_files, self.store, self.before.window_id)
            self._previous = FunctionView(self.pipeline, tuple(map(self.store.uri, files))) if files else None
        while waiting:
            group = waiting[: 1 if self.takes_previous else self.engine.group_limit]
            del waiting[: len(group)]
            try:
                rows = await self._compute(group)
            except (MldserverError, OSError):
                for entry in group:  # one of them fails: which?
                    report(await self._alone(entry))
                continue
            for entry, count in zip(group, rows, strict=True):
                report(await asyncio.to_thread(self._difference, entry, count))

    async def _alone(self, entry: WindowEntry) -> Difference:
        try:
            (rows,) = await self._compute([entry])
        except (MldserverError, OSError) as error:
            return Difference(entry.window_id, entry.rows_out, error=str(error))
        return await asyncio.to_thread(self._difference, entry, rows)

    async def _compute(self, group: list[WindowEntry]) -> list[int]:
        """Compute windows as one job; return the rows of each output. Raises what the engine raises."""
        jobs = tuple(await asyncio.to_thread(lambda: [self._job(entry) for entry in group]))
        if len(jobs) == 1:
            result = await self.engine.compute(jobs[0])
            paths = tuple(f"{jobs[0].staging}/{file}" for file in result.files)
            self._previous = FunctionView(self.pipeline, paths) if paths else None
            return [result.rows]
        return [result.rows for result in await self.engine.compute_group(jobs)]

    def _job(self, entry: WindowEntry) -> WindowJob:
        place = window_path(entry.window_id)
        self.to.delete(place)  # a group that failed may have left something
        if self.to.local:
            self.to.prepare()
        bounds = entry.start_ms, entry.end_ms
        window = as_window(entry.window_id, *bounds, revision=entry.revision, pipeline=self.pipeline)
        job = job_of(entry, window, 1, self.to.uri(place), self.store, self.older)
        return replace(job, previous=self._previous) if self.takes_previous else job

    def _difference(self, entry: WindowEntry, rows: int) -> Difference:
        """Compare a window's two outputs. Blocking."""
        if not self.is_compared:
            return Difference(entry.window_id, rows=rows)
        try:
            before = _read(self.store, shown_files(self.store, entry.window_id))
            now = _read(self.to, [path for path, _ in self.to.files(window_path(entry.window_id))])
        except (OSError, ValueError) as error:  # a revision has replaced it meanwhile
            return Difference(entry.window_id, rows=rows, error=f"The outputs cannot be compared: {error}")
        return compared(entry.window_id, before, now)


def _read(store: OutputStore, files: Iterable[str]) -> pa.Table | None:
    """Return the rows of an output's files; None for one without files. Raises OSError."""
    import pyarrow as pa  # noqa: PLC0415  # commands that replay nothing do not need it

    tables = []
    for name in sorted(file for file in files if file.endswith(".parquet")):
        with store.parquet(name) as file:
            tables.append(file.read())
    return pa.concat_tables(tables, promote_options="permissive") if tables else None


def compared(window: str, before: pa.Table | None, now: pa.Table | None) -> Difference:
    """Return the difference of two outputs of a window; None is one without rows."""
    if before is None or now is None:
        one, other = (0 if each is None else len(each) for each in (before, now))
        return Difference(window, one, other, one, other)
    common = [name for name in before.column_names if name in now.column_names]
    # Compared as the type that the new code gives them.
    retyped = [name for name in common if before[name].type != now[name].type]
    same = [name for name in common if name not in retyped]
    old, new = (_comparable(table.select(same)) for table in (before, now))
    only_before, only_now = _unequal(old, new)
    changed = _changed(old, new, only_before + only_now) if only_before or only_now else []
    return Difference(
        window,
        len(before),
        len(now),
        only_before,
        only_now,
        tuple(name for name in before.column_names if name not in common),
        tuple(name for name in now.column_names if name not in common),
        (*retyped, *changed),
    )


def _changed(old: pa.Table, new: pa.Table, unequal: int) -> list[str]:
    """Return the columns that differ. ``unequal``: how many rows only one of the tables has.

    With as many rows in both, a column differs if its values do. Otherwise rows came or went, and with them values of every
    column: then a column differs if fewer rows are unequal without it.
    """
    if len(old) == len(new):
        return [name for name in old.column_names if any(_unequal(old.select([name]), new.select([name])))]
    return [
        name
        for name in old.column_names
        if sum(_unequal(old.drop_columns([name]), new.drop_columns([name]))) < unequal and old.num_columns > 1
    ]


def _unequal(old: pa.Table, new: pa.Table) -> tuple[int, int]:
    """Return how many rows only one of two tables has; their columns are the same."""
    import pyarrow as pa  # noqa: PLC0415  # see above
    import pyarrow.compute as pc  # noqa: PLC0415  # see above

    if not old.num_columns:
        surplus = len(new) - len(old)
        return max(-surplus, 0), max(surplus, 0)
    names = [f"c{number}" for number in range(old.num_columns)]
    parts = [
        table.rename_columns(names).append_column("count", pa.repeat(pa.scalar(sign, pa.int64()), len(table)))
        for table, sign in ((old, -1), (new, 1))
    ]
    sums = pa.concat_tables(parts).group_by(names).aggregate([("count", "sum")])["count_sum"]
    total = pc.sum(pc.abs(sums)).as_py() or 0
    surplus = len(new) - len(old)
    return (total - surplus) // 2, (total + surplus) // 2


def _comparable(table: pa.Table) -> pa.Table:
    """Return a table whose values can be grouped: fractions to nine digits, and nested values as text."""
    import pyarrow as pa  # noqa: PLC0415  # see above

    columns = []
    for column in table.columns:
        kind = column.type
        if pa.types.is_floating(kind):
            texts = (None if each is None else f"{each:.{_DIGITS}g}" for each in column.to_pylist())
            columns.append(pa.array(texts, pa.string()))
        elif pa.types.is_nested(kind):
            columns.append(pa.array([repr(_rounded(each)) for each in column.to_pylist()], pa.string()))
        else:
            columns.append(column)
    return pa.table(columns, names=table.column_names) if columns else table


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.{_DIGITS}g}"
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def chosen(entries: Iterable[WindowEntry], since_ms: int, until_ms: int | None) -> Iterator[WindowEntry]:
    """Yield the published windows of a span whose segments are kept, the oldest first.

    A window belongs to the span by its start; one without a start, by when it was published.
    """

    def place(entry: WindowEntry) -> int:
        return entry.published_ms or 0 if entry.start_ms is None else entry.start_ms

    for entry in sorted(entries, key=lambda each: (place(each), each.window_id)):
        if (
            entry.can_be_recomputed
            and since_ms <= place(entry)
            and (until_ms is None or place(entry) < until_ms)
        ):
            yield entry
