from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F  # noqa: N812  # its usual name
from support.s3 import bucket

from mldserver.base.uris import opened
from mldserver.engine_jobs import WindowJob
from mldserver.output.store import OutputStore
from mldserver.runtime.interface import META_COLUMNS
from mldserver.spark import window_job
from mldserver.spark.counts import inspect_output
from mldserver.spark.session import DriverSession
from mldserver.spark.window_job import (
    META_DDL,
    READ_BYTES,
    WRITTEN_BYTES,
    Output,
    WindowHook,
    columns_ddl,
    partitions,
    read,
    run_windows,
    write,
)
from mldserver.windows import Window

MIB = 1024 * 1024
GIB = 1024 * MIB


@pytest.mark.parametrize(
    ("size", "cores", "expected"),
    [
        (0, 8, 1),
        (1, 8, 1),
        (8 * MIB, 8, 1),
        (8 * MIB + 1, 8, 2),
        (100 * MIB, 8, 8),
        (1024 * MIB, 4, 8),
        (1024 * MIB + 1, 4, 12),
    ],
)
def test_small_windows_are_one_task_and_large_ones_as_many_for_each_core_of_128_mib_at_most(
    size: int, cores: int, expected: int
) -> None:
    assert partitions(size, cores, WRITTEN_BYTES) == expected


def test_several_tasks_read_what_one_writes() -> None:
    sizes = (2 * MIB, 2 * MIB + 1, 8 * MIB)
    assert [partitions(size, 2, READ_BYTES) for size in sizes] == [1, 2, 2]
    assert [partitions(size, 2, WRITTEN_BYTES) for size in sizes] == [1, 1, 1]


def test_segments_have_the_handlers_columns_and_the_meta_columns() -> None:
    assert [column.split()[0] for column in META_DDL.split(", ")] == list(META_COLUMNS)
    assert columns_ddl("a INT, b STRING") == f"a INT, b STRING, {META_DDL}"
    assert columns_ddl(" ") == META_DDL


def test_output_is_what_the_parquet_footers_say(tmp_path: Path) -> None:
    out = tmp_path / "out [1]"
    (out / "carrier=AA").mkdir(parents=True)
    pq.write_table(pa.table({"a": [1, 2, 3]}), out / "part-1.parquet")
    pq.write_table(pa.table({"a": [4]}), out / "carrier=AA" / "part-0.parquet")
    (out / "_SUCCESS").touch()
    (out / ".part-1.parquet.crc").touch()
    assert inspect_output(str(out)) == Output(("carrier=AA/part-0.parquet", "part-1.parquet"), 4)


def test_output_on_an_object_store_is_inspected_by_way_of_the_output_folders_own_options() -> None:
    with bucket("lake") as query:
        out = f"s3://key:secret@lake/my%20rows?{query}"
        filesystem, base = opened(out)
        filesystem.create_dir(f"{base}/w/0001-x", recursive=True)
        pq.write_table(pa.table({"a": [1, 2]}), f"{base}/w/0001-x/part-1.parquet", filesystem=filesystem)
        assert inspect_output("s3://lake/my rows/w/0001-x", out) == Output(("part-1.parquet",), 2)


@pytest.mark.slow
def test_outputs_have_no_checksum_files_and_hadoops_disk_buffers_the_file_system_that_they_need(
    session: DriverSession, tmp_path: Path
) -> None:
    job = WindowJob(Window("w", None, None), 1, (), str(tmp_path / "out"), 3, 100)
    assert write(session.spark.range(3).toDF("id"), job.staging, [job], WindowHook(None), 2)[1] == 3
    assert [file.suffix for file in Path(job.staging).iterdir()] == [".parquet"]
    context: Any = session.spark.sparkContext
    conf = context._jvm.org.apache.hadoop.conf.Configuration(context._jsc.hadoopConfiguration())
    conf.set("buffers", str(tmp_path / "buffers"))
    # S3A's and ABFS's way to a buffer on disk.
    buffers = context._jvm.org.apache.hadoop.fs.LocalDirAllocator("buffers")
    assert Path(buffers.createTmpFileForWrite("block", 10, conf).getParent()).name == "buffers"


def test_an_output_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        inspect_output(str(tmp_path / "nowhere"))


def test_brackets_in_a_path_are_not_a_pattern() -> None:
    class Reader:
        """Spark's reader as far as ``read`` uses it."""

        def schema(self, ddl: str) -> Reader:
            return self

        def options(self, **values: str) -> Reader:
            return self

        def parquet(self, *paths: str) -> Reader:
            self.paths = paths
            return self

        def coalesce(self, number: int) -> Reader:
            return self

    reader = Reader()
    spark = type("Spark", (), {"read": reader})()
    job = WindowJob(Window("w", None, None), 1, ("/a[1]/{b}*?.parquet", "/plain"), "/out", 1, 1)
    read(spark, "a INT", job, 1)
    assert reader.paths == (r"/a\[1\]/\{b\}\*\?.parquet", "/plain")


@pytest.mark.slow
def test_several_cores_share_a_single_segment(session: DriverSession, tmp_path: Path) -> None:
    rows = 600_000
    numbers = pa.array(np.random.default_rng(0).integers(0, 1 << 62, rows))
    size = OutputStore(str(tmp_path)).write("segment.parquet", pa.table({"n": numbers}))
    path, staging = str(tmp_path / "segment.parquet"), str(tmp_path / "staging")
    job = WindowJob(Window("w", None, None), 1, (path,), staging, rows, size)
    pipeline = WindowHook(lambda frame, _window: frame.groupBy(F.spark_partition_id().alias("task")).count())
    run_windows(session.spark, "n BIGINT", pipeline, [job], 2)
    one, other = pq.read_table(staging)["count"].to_pylist()
    assert one + other == rows
    assert abs(one - other) < rows // 2


@pytest.mark.slow
def test_spark_reads_what_a_large_flush_has_written_without_dictionaries(
    session: DriverSession, tmp_path: Path
) -> None:
    count = 20_000
    numbers = pa.array(range(count), pa.int64())
    columns = {
        "a SMALLINT": numbers.cast(pa.int16()),
        "b INT": numbers.cast(pa.int32()),
        "c BIGINT": pc.multiply(numbers, -(1 << 40)),
        "d TIMESTAMP": numbers.cast(pa.timestamp("us", tz="UTC")),
        "e TIMESTAMP_NTZ": numbers.cast(pa.timestamp("us")),
        "f FLOAT": numbers.cast(pa.float32()),
        "g DOUBLE": pc.divide(numbers.cast(pa.float64()), 7.0),
        "h STRING": numbers.cast(pa.string()),
    }
    rows = pa.table(dict(zip("abcdefgh", columns.values(), strict=True)))
    size = OutputStore(str(tmp_path)).write("segment.parquet", rows)
    path = str(tmp_path / "segment.parquet")
    group = pq.read_metadata(path).row_group(0)
    assert not any("RLE_DICTIONARY" in group.column(number).encodings for number in range(8))
    job = WindowJob(Window("w", None, None), 1, (path,), "/staging", count, size)
    came = read(session.spark, ", ".join(columns), job, 1).select(*"abcdefgh").toArrow().sort_by("b")
    assert came.cast(rows.schema).equals(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "tasks"), [(2, 800), (1600, 1600)])
def test_a_window_of_100_gib_is_read_by_a_task_for_each_core_and_for_128_mib_at_most(
    session: DriverSession, cores: int, tasks: int, tmp_path: Path
) -> None:
    segments = [tmp_path / f"{number}.parquet" for number in range(100)]
    for segment in segments:
        with segment.open("wb") as file:
            file.truncate(GIB)  # a hole, of which the plan sees only the size
    job = WindowJob(Window("w", None, None), 1, tuple(map(str, segments)), "/staging", 1, 100 * GIB)
    session.spark.conf.set("spark.sql.files.minPartitionNum", str(cores))
    try:
        found = read(session.spark, "a INT", job, tasks).rdd.getNumPartitions()
    finally:
        session.spark.conf.unset("spark.sql.files.minPartitionNum")
    assert found == tasks


@pytest.mark.slow
def test_a_large_window_is_written_by_as_many_tasks_as_it_is_read_by(
    session: DriverSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All in proportion: 64 KiB for 128 MiB.
    monkeypatch.setattr(window_job, "_FILE_BYTES", 64 * 1024)
    rows, segments = 7500, [tmp_path / f"{number}.parquet" for number in range(12)]
    for segment in segments:
        pq.write_table(pa.table({"n": range(rows)}), segment, use_dictionary=False, compression="none")
    size = sum(segment.stat().st_size for segment in segments)
    staging = str(tmp_path / "staging" / "w")
    job = WindowJob(
        Window("w", None, None), 1, tuple(map(str, segments)), staging, rows * len(segments), size
    )
    assert partitions(size, 2, WRITTEN_BYTES) == len(segments)
    session.spark.conf.set("spark.sql.files.maxPartitionBytes", str(64 * 1024))
    try:
        (output,) = run_windows(session.spark, "n BIGINT", WindowHook(None), (job,), 2)
    finally:
        session.spark.conf.unset("spark.sql.files.maxPartitionBytes")
    assert (len(output.files), output.rows) == (len(segments), job.rows)


@pytest.mark.slow
def test_the_plan_of_a_range_tells_the_cores_as_spark_itself_counts_them(session: DriverSession) -> None:
    assert replace(session, cores=None).slots() == session.cores == 2
    assert replace(session, cores=None, connect=True).slots() == 2
