"""One window's job: read its segments, run ``on_window``, write the result into the attempt's own directory.

Runs in the driver's process. The directory is written by this attempt alone and counts only when the ledger says so;
so Spark needs no clever committer, and what an attempt leaves behind when it fails is nobody's concern here.

Rows are counted on their way in and on their way out: an executor that does not see the output folder reads nothing, or
writes to its own disk, and Spark says that all went well.
"""

from __future__ import annotations

import functools
import itertools
import math
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from pyarrow import fs

from mldserver.base.uris import reach
from mldserver.spark.driver_messages import Output
from mldserver.spark.handler import Pipeline
from mldserver.spark.sinks.sink import escaped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from mldserver.jobs.engine import WindowJob
    from mldserver.windows import Window

META_DDL = (
    "_time BIGINT, _clock BIGINT, _shard STRING, _sequence STRING, _sub_sequence BIGINT, _arrival TIMESTAMP"
)
"""``META_COLUMNS`` of runtime/interface.py as Spark reads them."""

_TASK_BYTES = 8 * 1024 * 1024
"""A task costs tens of milliseconds whatever it does: less than this is not worth one of its own."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_COUNT_SECONDS = 60
"""How long after a job Spark may take to tell what it counted; it is milliseconds."""

_FILE_BYTES = 128 * 1024 * 1024
"""What a task and a file have at most, as Spark itself reads (spark.sql.files.maxPartitionBytes)."""


class CountsDiffer(Exception):
    """Rows were lost between the ledger and Spark, or between Spark and the output's files."""


class Count:
    """Counts a frame's rows while a job runs over them: no pass of its own."""

    def __init__(self, frame: DataFrame) -> None:
        """Count the rows of ``frame`` through ``self.frame``."""
        from pyspark.sql import Observation  # noqa: PLC0415  # only the driver's process pays for pyspark
        from pyspark.sql import functions as F  # noqa: N812, PLC0415  # see above

        self._observation = Observation()
        self.frame = frame.observe(self._observation, F.count(F.lit(1)).alias("rows"))

    def rows(self, *, ran: bool) -> int | None:
        """Return the rows that the first job over the frame saw; None: no job has run over it.

        ``ran``: a job has. Then Spark may still be about to tell of it, or has seen beforehand that there are no rows.
        """
        classic = getattr(self._observation, "_jo", None)
        if classic is None:
            return self._observation.get.get("rows", 0 if ran else None)
        if ran:
            # Observation.get waits for ever, and fails on a plan that Spark has found to be empty.
            scala: Any = self.frame.sparkSession.sparkContext._jvm.scala.concurrent  # type: ignore[union-attr]  # noqa: SLF001  # no Python face yet
            scala.Await.ready(classic.future(), scala.duration.Duration.create(_COUNT_SECONDS, "s"))
        elif not classic.future().isCompleted():
            return None
        rows: int | None = classic.getAsJava().get("rows")
        return 0 if ran and rows is None else rows


def partitions(size: int, cores: int) -> int:
    """Return how many partitions ``size`` bytes are read in and written as, at most.

    Small windows get one, so that a group-by needs no shuffle and the output is one file; larger ones as many as
    there are cores to share them; the largest one for every 128 MiB.
    """
    shared = min(cores, math.ceil(size / _TASK_BYTES))
    return max(1, shared, math.ceil(size / _FILE_BYTES))


def columns_ddl(schema: str) -> str:
    """Return the DDL of a segment's columns: the handler's own, then the meta columns."""
    return f"{schema}, {META_DDL}" if schema.strip() else META_DDL


def read(spark: SparkSession, schema: str, job: WindowJob, cores: int) -> DataFrame:
    """Return the window's rows. Schemas are given, so that no job is spent on looking into the files.

    Each segment is read by the schema that it was written under: Spark makes NULL of a column that it does not find, and
    of a number that it finds narrower an error.
    """
    of_old = {path for paths in job.older.values() for path in paths}
    parts = [_read(spark, ddl, paths) for ddl, paths in job.older.items()]
    if present := [path for path in job.segments if path not in of_old]:
        parts.append(_read(spark, schema, present))
    if parts and job.older:
        parts = [_aligned(spark, part, schema) for part in parts]
    rows = functools.reduce(lambda left, right: left.unionAll(right), parts)
    return rows.coalesce(partitions(job.bytes, cores))


def _read(spark: SparkSession, schema: str, paths: Iterable[str]) -> DataFrame:
    # All that the ledger names is to be read, whatever the user's settings leave out elsewhere.
    reader = spark.read.option("ignoreMissingFiles", "false").option("ignoreCorruptFiles", "false")
    return reader.schema(columns_ddl(schema)).parquet(*map(escaped, paths))


def _aligned(spark: SparkSession, rows: DataFrame, schema: str) -> DataFrame:
    """Return rows of an older schema with the present one's columns, which hold all their values."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # its usual name; only the driver pays for pyspark

    columns = spark.createDataFrame([], columns_ddl(schema)).schema
    quoted = {name: "`" + name.replace("`", "``") + "`" for name in rows.columns}
    values = (F.col(quoted[column.name]) if column.name in quoted else F.lit(None) for column in columns)
    return rows.select(
        *(
            value.cast(column.dataType).alias(column.name)
            for value, column in zip(values, columns, strict=True)
        )
    )


class Attempt:
    """One attempt at a window up to its result: its rows are read, counted on the way, and given to the hook."""

    def __init__(
        self, spark: SparkSession, schema: str, pipeline: Pipeline, job: WindowJob, cores: int
    ) -> None:
        """Call the hook. Raises what it raises, and CountsDiffer as ``check_read``."""
        self.job = job
        self._rows = read(spark, schema, job, cores)
        self._count: Count | None = None
        if pipeline.writes_for_itself:
            # First of all: what it writes elsewhere cannot be taken back.
            self.check_read()
            self.result = pipeline.apply(self._rows, job.window)
        else:
            self._count = Count(self._rows)
            self.result = pipeline.apply(self._count.frame, job.window)

    def check_read(self) -> None:
        """Raise CountsDiffer when Spark does not read as many rows as the ledger has registered.

        Where another number was counted on the way (the hook took a part of the rows), or none, the executors count
        the files' rows: from their footers, in a short job.
        """
        seen = None if self._count is None else self._count.rows(ran=False)
        if seen != self.job.rows and (rows := self._rows.count()) != self.job.rows:
            raise CountsDiffer(
                f"Spark reads {rows} rows of window {self.job.window.id}, but the ledger has registered "
                f"{self.job.rows}. Nothing of this attempt counts. Each executor must see the output folder, whole and "
                "under the same path."
            )


def check_written(written: int, outputs: Sequence[Output], staging: str) -> None:
    """Raise CountsDiffer when an output's files do not hold the rows that Spark has written, or are not there."""
    held = sum(output.rows for output in outputs)
    if held != written or not all(output.files for output in outputs):
        files = sum(len(output.files) for output in outputs)
        raise CountsDiffer(
            f"Spark wrote {written} rows, but {files} files in {staging} hold {held}. Nothing of this attempt counts. "
            "Each executor must see the output folder, under the same path."
        )


def with_bounds(
    frame: DataFrame, names: tuple[str, str] | None, windows: Sequence[Window], tag: str | None = None
) -> DataFrame:
    """Add the columns of the window's start and end, but for those that the frame has already.

    ``tag``: the column that holds ``w`` and the number of the row's window, where there are several.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # its usual name; only the driver pays for pyspark

    taken = {column.lower() for column in frame.columns}
    starts, ends = [window.start for window in windows], [window.end for window in windows]
    for name, bounds in zip(names or (), (starts, ends), strict=False):
        if name.lower() in taken:
            continue
        instants = [
            F.timestamp_millis(F.lit((at - _EPOCH) // timedelta(milliseconds=1))) for at in bounds if at
        ]
        if instants and tag is None:
            frame = frame.withColumn(name, instants[0])
        elif instants:
            # A map, which generated code refers to, where it would hold an instant: it is compiled once.
            entries = ((F.lit(f"w{number}"), instant) for number, instant in enumerate(instants))
            frame = frame.withColumn(name, F.create_map(*itertools.chain(*entries))[F.col(str(tag))])
    return frame


def write(
    result: DataFrame,
    staging: str,
    jobs: Sequence[WindowJob],
    window_columns: tuple[str, str] | None,
    cores: int,
    tag: str | None = None,
) -> int:
    """Write the result of ``jobs`` into ``staging`` and return how many rows went that way.

    An existing directory is an error: it belongs to another attempt. ``tag``: the column that tells several windows
    apart, each of which gets a folder there.
    """
    count = Count(result.coalesce(partitions(sum(job.bytes for job in jobs), cores)))
    # Above the count, where few lines of generated code hold the bounds and are compiled for each window anew.
    frame = with_bounds(count.frame, window_columns, [job.window for job in jobs], tag)
    # Spark's default mode is the one that is wanted; Connect does not know it by its name "errorifexists".
    writer = frame.write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
    (writer if tag is None else writer.partitionBy(tag)).parquet(staging)
    return count.rows(ran=True) or 0


def inspect_output(staging: str, out: str = "") -> Output:
    """List the data files of a finished attempt and count their rows from the Parquet footers. Raises OSError.

    ``out``: ``WindowJob.out``, where ``staging`` is no local path.
    """
    filesystem, root = reach(staging, out)
    files, rows = [], 0
    entries = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    for info in sorted(entries, key=lambda entry: str(entry.path)):
        if info.type != fs.FileType.File or info.base_name.startswith(("_", ".")):
            continue
        with filesystem.open_input_file(info.path) as source:
            rows += pq.read_metadata(source).num_rows
        files.append(info.path[len(root) :].lstrip("/"))
    return Output(tuple(files), rows)


def run_window(spark: SparkSession, schema: str, pipeline: Pipeline, job: WindowJob, cores: int) -> Output:
    """Compute one attempt. Raises CountsDiffer, and what Spark or the user's ``on_window`` raises."""
    attempt = Attempt(spark, schema, pipeline, job, cores)
    if attempt.result is None:
        return Output((), 0)
    written = write(attempt.result, job.staging, [job], pipeline.window_columns, cores)
    attempt.check_read()
    output = inspect_output(job.staging, job.out)
    check_written(written, [output], job.staging)
    return output


def warm_up(spark: SparkSession, schema: str, job: WindowJob, cores: int) -> None:
    """Send one row through the path that windows take: a write, a read with the schema, a group-by, a write.

    The user's ``on_window`` is not called: it may write to places where a made-up row must not appear.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # its usual name; only the driver pays for pyspark

    columns = spark.createDataFrame([], columns_ddl(schema)).schema
    row = spark.range(1).select(*(F.lit(None).cast(c.dataType).alias(c.name) for c in columns))
    row.write.parquet(job.segments[0])
    run_window(spark, schema, Pipeline(lambda rows, _window: rows.groupBy("_shard").count()), job, cores)
