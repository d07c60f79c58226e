"""A group of windows on a real Spark, without an engine around it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mldserver.engine_jobs import WindowJob
from mldserver.spark.driver_messages import Output
from mldserver.spark.session import DriverSession
from mldserver.spark.window_job import WindowHook, free_name, run_windows
from mldserver.windows import Window

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCHEMA = "name STRING, number BIGINT"


def test_a_name_that_no_column_has() -> None:
    assert free_name(["a"]) == "_window"
    assert free_name(["_WINDOW", "_window1"]) == "_window2"


class World:
    def __init__(self, root: Path, session: DriverSession) -> None:
        self.root = root
        self.session = session
        self.groups = 0

    def job(self, name: str, rows: int, segments: int = 1) -> WindowJob:
        paths = [self.root / f"{name}-{number}.parquet" for number in range(segments)]
        for number, path in enumerate(paths):
            numbers = [i for i in range(rows) if i % segments == number]
            columns = {"name": pa.array([name] * len(numbers)), "number": pa.array(numbers, pa.int64())}
            pq.write_table(pa.table(columns), path)
        staging = self.root / "staging" / name / f"{self.groups}"
        return WindowJob(Window(name, None, None), 1, tuple(map(str, paths)), str(staging), rows, 100)

    def run(self, on_window: Any, *jobs: WindowJob, **pipeline: Any) -> tuple[tuple[Output, ...], int]:
        """Return the outputs, and how many Spark jobs that took."""
        context = self.session.spark.sparkContext
        self.groups += 1
        context.setJobGroup(f"group-{self.groups}", "a group")
        outputs = run_windows(self.session.spark, SCHEMA, WindowHook(on_window, **pipeline), jobs, 2)
        return outputs, len(context.statusTracker().getJobIdsForGroup(f"group-{self.groups}"))


@pytest.fixture
def world(tmp_path: Path, session: DriverSession) -> World:
    return World(tmp_path, session)


def content(job: WindowJob) -> list[dict[str, Any]]:
    (file,) = Path(job.staging).iterdir()
    rows: list[dict[str, Any]] = pq.ParquetFile(file).read().to_pylist()
    return rows


@pytest.mark.slow
def test_a_group_is_one_spark_job_and_each_window_has_its_own_rows_in_their_order(world: World) -> None:
    def last_first(rows: DataFrame, window: Window) -> DataFrame:
        rows.createOrReplaceTempView("rows")
        return rows.sparkSession.sql(
            f"SELECT name AS _Window, number FROM rows ORDER BY number % 3, {1} - number"
        )

    jobs = [world.job(f"w{i}", rows=40 + i, segments=1 + i * 10) for i in range(5)]
    outputs, spark_jobs = world.run(last_first, *jobs)
    assert spark_jobs == 1
    for i, (job, output) in enumerate(zip(jobs, outputs, strict=True)):
        numbers = sorted(range(40 + i), key=lambda n: (n % 3, -n))
        assert content(job) == [{"_Window": f"w{i}", "number": n} for n in numbers]
        assert output.files == tuple(file.name for file in Path(job.staging).iterdir())
        assert output.rows == 40 + i


@pytest.mark.slow
def test_windows_without_rows_have_a_file_with_the_columns(world: World) -> None:
    jobs = [world.job(name, rows=n) for name, n in (("a", 3), ("b", 9), ("c", 4), ("d", 8))]
    outputs, _ = world.run(lambda rows, _: rows.where("number >= 5").select("number"), *jobs)
    assert [output.rows for output in outputs] == [0, 4, 0, 3]
    assert [len(content(job)) for job in jobs] == [0, 4, 0, 3]
    for job in jobs:
        (file,) = Path(job.staging).iterdir()
        assert pq.read_schema(file).names == ["number"]


@pytest.mark.slow
def test_windows_that_write_for_themselves_or_have_other_columns_go_beside_the_group(world: World) -> None:
    def by_name(rows: DataFrame, window: Window) -> DataFrame | None:
        return (
            None
            if window.id == "none"
            else rows.select("number")
            if window.id == "other"
            else rows.select("name")
        )

    jobs = [world.job(name, rows=2) for name in ("a", "none", "b", "other")]
    outputs, _ = world.run(by_name, *jobs, writes_for_itself=True)
    assert [(len(output.files), output.rows) for output in outputs] == [(1, 2), (0, 0), (1, 2), (1, 2)]
    assert content(jobs[2]) == [{"name": "b"}] * 2
    assert content(jobs[3]) == [{"number": 0}, {"number": 1}]
    assert not Path(jobs[1].staging).exists()


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
def test_segments_are_read_by_the_schema_that_they_were_written_under(world: World, together: bool) -> None:
    def segment(label: str, /, **columns: pa.Array) -> str:
        path = world.root / f"{label}-{together}.parquet"
        pq.write_table(pa.table({**columns, "_clock": pa.array([len(label)], pa.int64())}), path)
        return str(path)

    narrow = segment("n", number=pa.array([7], pa.int32()), extra=pa.array([1.5], pa.float32()))
    other = segment("ot", name=pa.array(["x"]), extra=pa.array([2.5], pa.float64()))
    now = segment("now", name=pa.array(["y"]), extra=pa.array([3.5]), number=pa.array([2**40]))
    older = {"`number` INT, `extra` FLOAT": (narrow,), "`name` STRING, `extra` DOUBLE": (other,)}
    staging = str(world.root / "staging" / f"older-{together}")
    job = WindowJob(Window("w", None, None), 1, (narrow, other, now), staging, 3, 100, older=older)
    alone = WindowJob(
        Window("v", None, None),
        1,
        (narrow,),
        f"{staging}-2",
        1,
        100,
        older={"`number` INT, `extra` FLOAT": (narrow,)},
    )

    def kept(rows: DataFrame, _window: Window) -> DataFrame:
        return rows.select("name", "number", "extra").orderBy("_clock")

    run_windows(
        world.session.spark,
        f"{SCHEMA}, extra DOUBLE",
        WindowHook(kept),
        (job, alone) if together else (job,),
        2,
    )
    assert content(job) == [
        {"name": None, "number": 7, "extra": 1.5},
        {"name": "x", "number": None, "extra": 2.5},
        {"name": "y", "number": 2**40, "extra": 3.5},
    ]
