"""One window's job: read its segments, run ``on_window``, write the result into the attempt's own directory.

Runs in the driver's process. The directory is written by this attempt alone and counts only when the ledger says so;
so Spark needs no clever committer, and what an attempt leaves behind when it fails is nobody's concern here.
"""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from pyarrow import fs

from mldserver.remote import reach
from mldserver.spark.handler import Pipeline
from mldserver.spark.wire import Output

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import DataFrame, SparkSession

    from mldserver.spark.engine import WindowJob

__all__ = ["META_DDL", "Output", "partitions", "run_window", "warm_up"]

META_DDL = (
    "_time BIGINT, _clock BIGINT, _shard STRING, _sequence STRING, _sub_sequence BIGINT, _arrival TIMESTAMP"
)
"""``META_COLUMNS`` of runtime/base.py as Spark reads them."""

_GLOB = re.compile(r"([\[\]{}*?\\])")
"""Spark takes paths to read for patterns, so an output folder's brackets must be told from a pattern's."""

_TASK_BYTES = 8 * 1024 * 1024
"""A task costs tens of milliseconds whatever it does: less than this is not worth one of its own."""

_FILE_BYTES = 128 * 1024 * 1024
"""What a task and a file have at most, as Spark itself reads (spark.sql.files.maxPartitionBytes)."""


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
    return functools.reduce(lambda left, right: left.unionAll(right), parts).coalesce(
        partitions(job.bytes, cores)
    )


def _read(spark: SparkSession, schema: str, paths: Iterable[str]) -> DataFrame:
    return spark.read.schema(columns_ddl(schema)).parquet(*(_GLOB.sub(r"\\\1", path) for path in paths))


def _aligned(spark: SparkSession, rows: DataFrame, schema: str) -> DataFrame:
    """Return rows of an older schema with the present one's columns, which hold all their values."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # its usual name; only the driver pays for pyspark

    columns = spark.createDataFrame([], columns_ddl(schema)).schema
    quoted = {name: "`" + name.replace("`", "``") + "`" for name in rows.columns}
    return rows.select(
        *(
            (F.col(quoted[each.name]) if each.name in quoted else F.lit(None))
            .cast(each.dataType)
            .alias(each.name)
            for each in columns
        )
    )


def write(result: DataFrame, job: WindowJob, cores: int) -> None:
    """Write the result into ``job.staging``. An existing directory is an error: it belongs to another attempt."""
    (
        # Spark's default mode is the one that is wanted; Connect does not know it by its name "errorifexists".
        result.coalesce(partitions(job.bytes, cores))
        .write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
        .parquet(job.staging)
    )


def inspect_output(staging: str, out: str = "") -> Output:
    """List the data files of a finished attempt and count their rows from the Parquet footers. Raises OSError.

    ``out``: ``WindowJob.out``, where ``staging`` is no local path.
    """
    filesystem, root = reach(staging, out)
    found = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    files, rows = [], 0
    for info in sorted(found, key=lambda entry: str(entry.path)):
        if info.type != fs.FileType.File or info.base_name.startswith(("_", ".")):
            continue
        with filesystem.open_input_file(info.path) as source:
            rows += pq.read_metadata(source).num_rows
        files.append(info.path[len(root) :].lstrip("/"))
    return Output(tuple(files), rows)


def run_window(spark: SparkSession, schema: str, pipeline: Pipeline, job: WindowJob, cores: int) -> Output:
    """Compute one attempt. Raises what Spark or the user's ``on_window`` raises."""
    result = pipeline.apply(read(spark, schema, job, cores), job.window)
    if result is None:
        return Output((), 0)
    write(result, job, cores)
    return inspect_output(job.staging, job.out)


def warm_up(spark: SparkSession, schema: str, job: WindowJob, cores: int) -> None:
    """Send one row through the path that windows take: a write, a read with the schema, a group-by, a write.

    The user's ``on_window`` is not called: it may write to places where a made-up row must not appear.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # its usual name; only the driver pays for pyspark

    columns = spark.createDataFrame([], columns_ddl(schema)).schema
    row = spark.range(1).select(*(F.lit(None).cast(c.dataType).alias(c.name) for c in columns))
    row.write.parquet(job.segments[0])
    run_window(spark, schema, Pipeline(lambda rows, _window: rows.groupBy("_shard").count()), job, cores)
