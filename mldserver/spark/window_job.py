"""A job in the driver's process: read windows' segments, run ``on_window``, write each result into its attempt's directory.

Only this attempt writes the directory, which counts only once the ledger commits it. So Spark needs no special committer,
and this module leaves a failed attempt's files in place.

Rows are counted as they are read and as they are written (``counts.py``).

Several small windows cost about as much as one, as one job: their results are written together, then each one's files are
renamed into its own directory, or copied by the object store itself, which cannot rename. ``on_window`` is called for
every window before any is computed; where it fails, and where the job fails, all of them have failed: the server then
runs each alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # its usual name

from mldserver.base.uris import NOTHING_RENAMED, reach
from mldserver.engine_jobs import FINAL, REVISION, WINDOW, FunctionView, WindowJob
from mldserver.errors import HandlerInvalid
from mldserver.handler.signatures import takes_also
from mldserver.sinks.sink import escaped
from mldserver.spark.counts import (
    REMOVE,
    Count,
    CountsDiffer,
    JobCounts,
    check_written,
    data_files,
    inspect_output,
)
from mldserver.spark.driver_messages import Output
from mldserver.windows import WINDOW_COLUMNS, Window

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

META_DDL = (
    "_time BIGINT, _clock BIGINT, _shard STRING, _sequence STRING, _sub_sequence BIGINT, _arrival TIMESTAMP"
)
"""``META_COLUMNS`` of runtime/interface.py as Spark reads them."""

READ_BYTES = 2 * 1024 * 1024
"""A second task, and the shuffle that a group-by then needs, cost tens of milliseconds. So fewer bytes than this do not get
another task."""

WRITTEN_BYTES = 8 * 1024 * 1024
"""Less than this is not worth a file of its own to those who read the output."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_WRITTEN: Final = {
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    # Each task's files go to their place when it commits, and not once more when the job does: files of a
    # failed attempt never count. On an object store each move is a copy.
    "mapreduce.fileoutputcommitter.algorithm.version": "2",
}
_LOCAL_FILES: Final = {
    # Write no checksum files: they would be published too, and Parquet contains checksums.
    # For this one job: Hadoop's own disk buffers, which S3A and ABFS write through, work with the default only, and the
    # cache would hand it out.
    "fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}
"""Hadoop's settings for the writing of local files."""

_FILE_BYTES = 128 * 1024 * 1024
"""What a task and a file have at most, as Spark itself reads (spark.sql.files.maxPartitionBytes)."""


@dataclass(frozen=True, slots=True)
class WindowHook:
    """What becomes of a window's rows."""

    on_window: Callable[..., object] | None
    """None: rows are written as they are."""
    check: Callable[[Iterable[str]], None] | None = None
    """Called with the names of the output's columns; what it raises fails the window."""
    window_columns: tuple[str, str] | None = WINDOW_COLUMNS
    """The columns of the output that hold its window's start and end; None: it gets none."""
    stamped: bool = False
    """Whether the output gets the columns of its window's id and revision, as a table has them."""
    has_early: bool = False
    """Whether windows have early results: then a table has a column that says which rows are final."""
    writes_for_itself: bool = False
    """Whether ``on_window`` may return None, having written the window somewhere itself."""
    around: Callable[[Window], AbstractContextManager[None]] = lambda _: contextlib.nullcontext()
    """Returns what each call of ``on_window`` runs in."""
    takes_previous: bool = False
    """Whether ``on_window`` takes the result of the window before."""
    read_view: Callable[[FunctionView], DataFrame | None] = lambda _: None
    """Returns the rows of a view; None: it has no files."""

    def apply(
        self, rows: DataFrame, window: Window, previous: FunctionView | None = None
    ) -> DataFrame | None:
        """Return the window's result; None when the hook wrote for itself. ``previous``: the result of the window before.

        An ``async`` hook runs on an event loop of its own in this very thread, as py4j binds threads. Raises what
        the hook raises, and HandlerInvalid when it returns anything else than a DataFrame: None too, unless the
        handler says that it writes for itself.
        """
        result: object = rows
        arguments: tuple[object, ...] = (rows, window)
        if self.takes_previous:
            arguments += (None if previous is None else self.read_view(previous),)
        with self.around(window):
            if self.on_window is not None:
                result = self.on_window(*arguments)
            if inspect.isawaitable(result):

                async def finish(awaitable: Awaitable[object]) -> object:
                    return await awaitable

                result = asyncio.run(finish(result))
        if result is None and self.writes_for_itself:
            return None
        if isinstance(result, DataFrame):
            if self.check is not None:
                self.check((*result.columns, *(self.window_columns or ())))
            return result
        name = type(result).__name__
        returned = "nothing" if result is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
        raise HandlerInvalid(
            f"on_window returned {returned}, not a Spark DataFrame.",
            advice="Return a DataFrame; or, where on_window writes the window somewhere itself, say so in the handler: "
            "writes_for_itself = True.",
        )


def hook_of(handler: Any) -> WindowHook:
    """Return the ``on_window`` of a loaded handler: a module, an object, or a class, which is instantiated once."""
    window_columns = getattr(handler, "window_columns", WINDOW_COLUMNS)
    has_early = getattr(getattr(handler, "windows", None), "early_ms", None) is not None
    if getattr(handler, "on_window", None) is None:
        return WindowHook(None, window_columns=window_columns, has_early=has_early)
    target: Any = handler() if inspect.isclass(handler) else handler
    return WindowHook(
        target.on_window,
        window_columns=window_columns,
        writes_for_itself=getattr(handler, "writes_for_itself", None) is True,
        takes_previous=takes_also(target.on_window, 2, "previous"),
        has_early=has_early,
    )


def partitions(size: int, cores: int, least: int) -> int:
    """Return how many partitions ``size`` bytes are read in (``least``: READ_BYTES) or written as (WRITTEN_BYTES), at most.

    Small windows get one, so that a group-by needs no shuffle and the output is one file; larger ones as many as
    there are cores to share them; the largest so many for each core that none has more than 128 MiB.
    """
    shared = max(1, min(cores, math.ceil(size / least)))
    return shared * max(1, math.ceil(size / (shared * _FILE_BYTES)))


def columns_ddl(schema: str) -> str:
    """Return the DDL of a segment's columns: the handler's own, then the meta columns."""
    return f"{schema}, {META_DDL}" if schema.strip() else META_DDL


def read(spark: SparkSession, schema: str, job: WindowJob, tasks: int) -> DataFrame:
    """Return the window's rows, read from its segments: in one partition if ``tasks`` is 1, else in as many as Spark chooses.

    Schemas are given, so that no job is spent on looking into the files. Each segment is read by the schema that it was
    written under: Spark makes NULL of a column that it does not find, and of a number that it finds narrower an error.
    """
    # Spark must read every segment in the ledger, whatever the user's settings ignore elsewhere.
    options = {"ignoreMissingFiles": "false", "ignoreCorruptFiles": "false"}

    def scan(ddl: str, paths: Iterable[str]) -> DataFrame:
        return spark.read.options(**options).schema(columns_ddl(ddl)).parquet(*map(escaped, paths))

    def in_one_partition(rows: DataFrame) -> DataFrame:
        # Do not merge several partitions: Spark would not compile the read together with the hook's first steps, and large
        # windows would take half as long again.
        return rows.coalesce(1) if tasks == 1 else rows

    if not job.older:
        return in_one_partition(scan(schema, job.segments))
    # An earlier handler wrote some segments with another schema: read each schema's files, then cast to the present columns,
    # which are wide enough for all older values. Columns that a schema lacks become NULL.
    older_paths = {path for paths in job.older.values() for path in paths}
    paths_by_schema: list[tuple[str, Sequence[str]]] = list(job.older.items())
    if present := [path for path in job.segments if path not in older_paths]:
        paths_by_schema.append((schema, present))
    columns = spark.createDataFrame([], columns_ddl(schema)).schema
    parts = []
    for ddl, paths in paths_by_schema:
        part = scan(ddl, paths)
        found = part.columns
        values = [F.col(quoted(column.name)) if column.name in found else F.lit(None) for column in columns]
        pairs = zip(values, columns, strict=True)
        parts.append(
            part.select(*(value.cast(column.dataType).alias(column.name) for value, column in pairs))
        )
    return in_one_partition(_union(parts))


def _union(parts: Iterable[DataFrame]) -> DataFrame:
    return functools.reduce(lambda left, right: left.unionAll(right), parts)


def _on_connect(frame: DataFrame) -> bool:
    return type(frame).__module__.startswith("pyspark.sql.connect.")


class Attempt:
    """One attempt at a window up to its result: its rows are read, and given to the hook."""

    def __init__(
        self,
        spark: SparkSession,
        schema: str,
        hook: WindowHook,
        job: WindowJob,
        tasks: int,
        view: str | None = None,
    ) -> None:
        """Call the hook. Raises what it raises, and CountsDiffer as ``verify_by_counting``.

        ``view``: what a view is called by which the result stays what it is now, where Spark Connect looks names up when a
        plan runs: a temporary view that the next call of the hook replaces would change what the last one returned.
        """
        self.job = job
        self.rows = read(spark, schema, job, tasks)
        self.count: Count | None = None
        remote = _on_connect(self.rows)
        if hook.writes_for_itself:
            # First of all: what it writes elsewhere cannot be taken back.
            verify_by_counting([self])
        elif remote:
            self.count = Count(self.rows)
        rows = self.rows if self.count is None else self.count.frame
        self.result = hook.apply(rows, job.window, job.previous)
        if view is not None and self.result is not None and remote:
            self.result.createOrReplaceTempView(view)
            self.result = self.result.sparkSession.table(view)


def verify_rows_read(attempts: Sequence[Attempt], read: set[int], work: JobCounts) -> None:
    """Raise CountsDiffer when Spark has not read as many rows of windows as the ledger has registered.

    ``read``: rows read by the jobs that wrote the results, usually all rows. ``work``: includes the hook's jobs. If neither
    matches (the hook took some of the rows, or other rows too), rows are counted once more.
    """
    rows = sum(one.job.rows for one in attempts)
    if rows not in read and rows not in work.counts()[0]:
        verify_by_counting(attempts)


def verify_by_counting(attempts: Iterable[Attempt]) -> None:
    """Count windows' rows on the executors, from the files' footers, in one short job. Raises CountsDiffer.

    On Spark Connect, skip windows whose rows ``Count`` has already found complete.
    """
    unverified: dict[str, Attempt] = {}
    for attempt in attempts:
        counted = None if attempt.count is None else attempt.count.rows(ran=False)
        if counted != attempt.job.rows:
            unverified[attempt.job.window.id] = attempt
    if not unverified:
        return
    counts = [
        each.rows.agg(F.lit(name).alias("window"), F.count(F.lit(1))) for name, each in unverified.items()
    ]
    for name, rows in _union(counts).collect():
        if rows != (registered := unverified[name].job.rows):
            raise CountsDiffer(
                f"Spark reads {rows} rows of window {name}, but the ledger has registered {registered}. Nothing of this "
                f"attempt counts. Each executor must see the output folder, whole and under the same path. {REMOVE}"
            )


def write(
    result: DataFrame,
    staging: str,
    jobs: Sequence[WindowJob],
    hook: WindowHook,
    cores: int,
    tag: str | None = None,
) -> tuple[set[int], int]:
    """Write the result of ``jobs`` into ``staging``; return what that job has read (``JobCounts``), and how many rows it wrote.

    Adds the columns that ``hook`` names, of the window's start and end except those that the result has already. An
    existing directory is an error: it belongs to another attempt. ``tag``: the column that holds ``w`` and the number of the
    row's window, where there are several: each gets a folder there.
    """
    frame = result.coalesce(partitions(sum(job.bytes for job in jobs), cores, WRITTEN_BYTES))
    count = Count(frame) if _on_connect(frame) else None
    frame = frame if count is None else count.frame
    # Spark compiles generated code again for each literal in it, so for each window. The bounds are therefore looked up in an
    # array (by an index that Spark cannot compute beforehand, always 0) or, for several windows, in a map by the tag.
    if tag is None:
        container, index = "array({})", "[spark_partition_id() * 0]"
    else:
        container, index = "map({})", f"[{tag}]"
    added, taken = [], {column.lower() for column in result.columns}
    starts, ends = [job.window.start for job in jobs], [job.window.end for job in jobs]
    columns = [
        (name, [f"timestamp_millis({(at - _EPOCH) // timedelta(milliseconds=1)}L)" for at in bounds if at])
        for name, bounds in zip(hook.window_columns or (), (starts, ends), strict=False)
    ]
    if hook.stamped:
        columns.append((WINDOW, [f"'{job.window.id}'" for job in jobs]))
        columns.append((REVISION, [str(job.window.revision) for job in jobs]))
        if hook.has_early:
            columns.append((FINAL, [str(job.window.final).lower() for job in jobs]))
    for name, values in columns:
        if name.lower() in taken or not values:
            continue
        texts = values if tag is None else [f"'w{number}', {value}" for number, value in enumerate(values)]
        added.append(f"{container.format(', '.join(texts))}{index} AS {quoted(name)}")
    # One SQL text instead of Python's functions, which take ten calls into the JVM each; and all columns in one step, since
    # Spark analyses the whole plan again at each.
    frame = frame.selectExpr("*", *added) if added else frame
    # The default mode fails if the folder exists. (Connect does not know its name, "errorifexists".)
    writer = frame.write.options(**_WRITTEN, **({} if jobs[0].out else _LOCAL_FILES))
    with JobCounts(result.sparkSession) as work:
        (writer if tag is None else writer.partitionBy(tag)).parquet(staging)
    return work.counts() if count is None else (set(), count.rows(ran=True) or 0)


def run_windows(
    spark: SparkSession, schema: str, hook: WindowHook, jobs: Sequence[WindowJob], cores: int
) -> tuple[Output, ...]:
    """Compute an attempt at each window; outputs in the order of ``jobs``.

    Raises CountsDiffer, and what Spark or the user's ``on_window`` raises.
    """
    with JobCounts(spark) as work:
        attempts = []
        for number, job in enumerate(jobs):
            # Only Spark Connect needs the view (``Attempt``). This thread's next group replaces it.
            view = f"_mldserver_{threading.get_ident()}_{number}" if len(jobs) > 1 else None
            # In a group, the cores share the windows: cut each one into fewer tasks.
            tasks = partitions(job.bytes, cores, READ_BYTES if len(jobs) == 1 else WRITTEN_BYTES)
            attempts.append(Attempt(spark, schema, hook, job, tasks, view))
        same_columns: dict[str, list[tuple[DataFrame, Attempt]]] = {}
        for attempt in attempts:
            if attempt.result is not None:
                columns = attempt.result.schema.json() if len(jobs) > 1 else ""
                same_columns.setdefault(columns, []).append((attempt.result, attempt))
        outputs: dict[str, Output] = {}
        read_counts: set[int] = set()
        for members in same_columns.values():
            members_jobs = [attempt.job for _, attempt in members]
            staging = members_jobs[0].staging
            if len(members) == 1:
                read, written = write(members[0][0], staging, members_jobs, hook, cores)
            else:
                results = [result for result, _ in members]
                read, written = _write_group(results, members_jobs, hook, cores)
                staging = staging.rsplit("/", 2)[0]
            output_of = {job.window.id: inspect_output(job.staging, job.out) for job in members_jobs}
            check_written(spark, written, list(output_of.values()), staging, members_jobs[0].out)
            outputs |= output_of
            read_counts |= read
        if same_columns:
            verify_rows_read(
                [attempt for attempt in attempts if attempt.result is not None], read_counts, work
            )
        done = work.work()
    found = (outputs.get(job.window.id, Output((), 0)) for job in jobs)
    return tuple(structs.replace(output, work=done) for output in found)


def _write_group(
    results: Sequence[DataFrame],
    jobs: Sequence[WindowJob],
    hook: WindowHook,
    cores: int,
) -> tuple[set[int], int]:
    """Write several windows' results, which have the same columns, as one Spark job; then move each window's files into its folder.

    A column ``tag`` says to which window a row belongs; Spark writes a folder for each of its values. Returns as ``write``.
    """
    tag = free_name([*results[0].columns, *(hook.window_columns or ()), *((WINDOW,) if hook.stamped else ())])
    # Text, not a number, which Spark would compile into the generated code: once for all windows, not once for each.
    tagged = [result.withColumn(tag, F.lit(f"w{number}")) for number, result in enumerate(results)]
    shared, out = f"{jobs[0].staging}/_together", jobs[0].out  # deleted with that attempt if this one dies
    counts = write(_union(tagged), shared, jobs, hook, cores, tag)
    filesystem, root = reach(shared, out)
    files_of: dict[str, list[str]] = {f"{tag}=w{number}": [] for number in range(len(jobs))}
    for path in data_files(filesystem, root):
        files_of[path.split("/")[-2]].append(path)
    empty_name, empty_file = "", b""
    if empty := [number for number, files in enumerate(files_of.values()) if not files]:
        # A window without rows gets a file that has only the columns, as it does when it runs alone.
        write(results[empty[0]].limit(0), f"{shared}/none", [jobs[empty[0]]], hook, cores)
        (file,) = data_files(filesystem, f"{root}/none")
        with filesystem.open_input_stream(file) as source:
            empty_name, empty_file = file.rpartition("/")[2], source.read()
    renames = filesystem.type_name not in NOTHING_RENAMED
    transfer = filesystem.move if renames else filesystem.copy_file

    def move_files(job: WindowJob, files: list[str]) -> None:
        target = reach(job.staging, out)[1]
        if renames:
            filesystem.create_dir(target, recursive=True)
        for path in files:
            transfer(path, f"{target}/{path.rpartition('/')[2]}")
        if not files:
            with filesystem.open_output_stream(f"{target}/{empty_name}") as stream:
                stream.write(empty_file)

    # In parallel, since each request to an object store is a wait.
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(move_files, jobs, files_of.values()))
    filesystem.delete_dir(root)
    return counts


def quoted(name: str) -> str:
    """Return a column's name, quoted for SQL."""
    return "`" + name.replace("`", "``") + "`"


def free_name(columns: Iterable[str]) -> str:
    """Return a name that none of these columns has. Spark's names are case-insensitive."""
    taken = {column.lower() for column in columns}
    return next(name for n in itertools.count() if (name := f"_window{n or ''}") not in taken)
