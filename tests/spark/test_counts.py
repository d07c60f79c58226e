"""Rows are counted on a real Spark, in and out, and the output says which window it is of."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F  # noqa: N812  # its usual name

from mldserver.engine_jobs import WindowJob
from mldserver.spark import window_job
from mldserver.spark.counts import REMOVE, CountsDiffer, JobCounts, advice_on, inspect_output, where_failed
from mldserver.spark.driver_messages import Output
from mldserver.spark.session import DriverSession
from mldserver.spark.window_job import READ_BYTES, WindowHook, run_windows
from mldserver.windows import Window

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.slow

SCHEMA = "name STRING, number BIGINT"
START = datetime(2013, 1, 1, 10, tzinfo=UTC)
ROWS = 40
BLIND = "Each executor must see the output folder"


class World:
    def __init__(self, root: Path, session: DriverSession) -> None:
        self.root, self.session = root, session
        self.numbers = itertools.count()

    def job(self, name: str = "w", *, registered: int = ROWS, lost: bool = False) -> WindowJob:
        """Return a job over two segments of ``ROWS`` rows; ``registered``: what the ledger says they are.

        ``lost``: the second segment's are not there.
        """
        number = next(self.numbers)
        paths = [self.root / f"{number}-{half}.parquet" for half in range(2)]
        for half, path in enumerate(paths):
            ids = range(half, ROWS, 2) if not (lost and half) else range(0)
            columns = {"name": pa.array([name] * len(ids)), "number": pa.array(ids, pa.int64())}
            pq.write_table(pa.table(columns), path)
        start = START + timedelta(hours=number)
        window = Window(name, start, start + timedelta(hours=1))
        staging = self.root / "staging" / str(number) / "1"
        return WindowJob(window, 1, tuple(map(str, paths)), str(staging), registered, 100)

    def group(self) -> str:
        """Return the name of a new job group: the session is other tests', too."""
        return f"{self.root}-{next(self.numbers)}"

    def run(self, job: WindowJob, on_window: Any = None, **pipeline: Any) -> tuple[Output, int]:
        """Return the output, and how many Spark jobs that took."""
        context, group = self.session.spark.sparkContext, self.group()
        context.setJobGroup(group, "a window")
        (output,) = run_windows(self.session.spark, SCHEMA, WindowHook(on_window, **pipeline), (job,), 2)
        return output, len(context.statusTracker().getJobIdsForGroup(group))


@pytest.fixture
def world(tmp_path: Path, session: DriverSession) -> World:
    return World(tmp_path, session)


def content(job: WindowJob) -> list[dict[str, Any]]:
    return [
        row for file in sorted(Path(job.staging).iterdir()) for row in pq.ParquetFile(file).read().to_pylist()
    ]


def test_rows_are_counted_by_the_windows_own_job(world: World) -> None:
    output, spark_jobs = world.run(world.job())
    assert (output.rows, spark_jobs) == (ROWS, 1)


def test_rows_that_several_tasks_read_are_counted_by_what_the_stages_say_and_by_no_job_of_its_own(
    world: World,
) -> None:
    plans: list[str] = []

    def on_window(rows: DataFrame, _: Window) -> DataFrame:
        counted: Any = rows.groupBy("name").count()
        plans.append(counted._jdf.queryExecution().executedPlan().toString())
        return counted

    output, spark_jobs = world.run(replace(world.job(), bytes=2 * READ_BYTES), on_window)
    assert (output.rows, spark_jobs) == (1, 2), "one for the shuffle, and one for its result"
    # One row after the other would pass from one to the next, and the job take half as long again.
    assert not re.search("Coalesce|CollectMetrics", plans[0])
    output, spark_jobs = world.run(world.job(), on_window)
    assert (output.rows, spark_jobs) == (1, 1)
    assert "Coalesce 1" in plans[1], "a single partition needs no shuffle"


def test_rows_of_other_files_beside_the_windows_are_told_from_them(world: World, tmp_path: Path) -> None:
    names = tmp_path / "names.parquet"
    pq.write_table(pa.table({"name": ["w"], "full": ["Whole"]}), names)

    def on_window(rows: DataFrame, _: Window) -> DataFrame:
        return rows.join(
            rows.sparkSession.read.schema("name STRING, full STRING").parquet(str(names)), "name"
        )

    output, spark_jobs = world.run(world.job(), on_window)
    assert (output.rows, spark_jobs) == (ROWS, 2), "one for the broadcast"


def test_what_other_windows_read_in_a_job_group_that_the_hook_sets_is_not_taken_for_this_ones(
    world: World,
) -> None:
    def on_window(rows: DataFrame, _: Window) -> DataFrame:
        rows.sparkSession.sparkContext.setJobGroup("the user's", "all windows")
        return rows

    assert world.run(world.job(), on_window)[0].rows == ROWS
    with pytest.raises(CountsDiffer, match=f"reads {ROWS // 2} rows"):
        world.run(world.job(lost=True), on_window)


def test_a_hook_that_takes_all_tags_away_has_its_rows_counted_all_the_same(world: World) -> None:
    def on_window(rows: DataFrame, _: Window) -> DataFrame:
        rows.sparkSession.sparkContext.clearJobTags()
        return rows

    output, spark_jobs = world.run(world.job(), on_window)
    assert (output.rows, spark_jobs) == (ROWS, 1)
    with pytest.raises(CountsDiffer, match=f"reads {ROWS // 2} rows"):
        world.run(world.job(lost=True), on_window)


def test_what_a_hook_writes_elsewhere_is_not_taken_for_the_output(world: World, tmp_path: Path) -> None:
    def on_window(rows: DataFrame, _: Window) -> DataFrame:
        rows.write.parquet(str(tmp_path / "elsewhere"))
        return rows.where("number < 3")

    assert world.run(world.job(), on_window)[0].rows == 3


def test_written_rows_are_those_of_the_jobs_in_the_block_and_of_no_other(
    world: World, tmp_path: Path
) -> None:
    rows = world.session.spark.range(0, ROWS, 1, 4)
    with JobCounts(rows.sparkSession) as outer:
        rows.write.parquet(str(tmp_path / "first"))
        with JobCounts(rows.sparkSession) as inner:
            rows.repartition(3).write.parquet(str(tmp_path / "second"))
    rows.write.parquet(str(tmp_path / "third"))
    assert (inner.counts()[1], outer.counts()[1]) == (ROWS, 2 * ROWS)


def test_where_nobody_tells_what_stages_have_read_the_footers_do(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = JobCounts.counts
    monkeypatch.setattr(JobCounts, "counts", lambda work: (set(), counts(work)[1]))
    output, spark_jobs = world.run(world.job())
    assert (output.rows, spark_jobs) == (ROWS, 2)


def test_rows_that_spark_does_not_find_fail_the_window_with_both_numbers(world: World) -> None:
    told = f"Spark reads {ROWS} rows of window w, but the ledger has registered {ROWS + 9}.*{BLIND}"
    with pytest.raises(CountsDiffer, match=told):
        world.run(world.job(registered=ROWS + 9), lambda rows, _: rows.groupBy("name").count())


def test_a_segment_that_is_gone_fails_the_window_whatever_the_settings_say_and_it_is_told_where(
    world: World,
) -> None:
    def lose_one(rows: DataFrame, _: Window) -> DataFrame:
        Path(job.segments[1]).unlink()
        return rows

    job, conf = world.job(), world.session.spark.conf
    conf.set("spark.sql.files.ignoreMissingFiles", "true")
    try:
        with pytest.raises(Exception, match="FILE_NOT_EXIST") as failed:
            world.run(job, lose_one)
        context: Any = world.session.spark.sparkContext
        context._jsc.sc().listenerBus().waitUntilEmpty()
        told = where_failed(world.session.spark)
        assert re.fullmatch(r"Its tasks failed on \S+ \(executor driver\)\.", told)
        assert advice_on(str(failed.value), ["/elsewhere/x.parquet"]) == ""
        assert advice_on(str(failed.value), job.segments).endswith(
            f"does not see the output folder. {REMOVE}"
        )
        world.run(world.job())
        assert where_failed(world.session.spark) == ""
    finally:
        conf.unset("spark.sql.files.ignoreMissingFiles")


def of_a_view(rows: DataFrame, _: Window) -> DataFrame:
    rows.createOrReplaceTempView("seen")
    return rows.sparkSession.sql(
        "SELECT * FROM seen a WHERE number >= (SELECT avg(number) FROM seen b WHERE b.name = a.name)"
    )


@pytest.mark.parametrize(
    ("on_window", "expected"),
    [
        (lambda rows, _: rows.limit(3), 3),
        (lambda rows, _: rows.limit(0), 0),
        (lambda rows, _: rows.where("1 = 0"), 0),
        (lambda rows, _: rows.where("number = 7").select("name"), 1),
        (lambda rows, _: (rows.head(2), rows)[1], ROWS),
        (lambda rows, _: (rows.count(), rows)[1], ROWS),
        (lambda rows, _: rows.union(rows), 2 * ROWS),
        (lambda rows, _: rows.join(rows.groupBy("name").agg(F.max("number").alias("most")), "name"), ROWS),
        (lambda rows, _: rows.cache().exceptAll(rows.where("number < 3")), ROWS - 3),
        (lambda rows, _: rows.sparkSession.range(5), 5),
        (lambda rows, _: rows.sparkSession.createDataFrame(rows.rdd.map(tuple), rows.schema), ROWS),
        (of_a_view, ROWS // 2),
    ],
    ids=[
        "part",
        "nothing",
        "never",
        "filter",
        "twice",
        "counted",
        "union",
        "join",
        "cache",
        "other",
        "rdd",
        "view",
    ],
)
def test_a_hook_may_read_a_part_or_nothing_or_more_than_once(
    world: World, on_window: Callable[..., DataFrame], expected: int
) -> None:
    assert world.run(world.job(), on_window)[0].rows == expected


def test_what_reads_nothing_is_told_when_rows_are_missing_all_the_same(world: World) -> None:
    with pytest.raises(CountsDiffer, match=f"reads {ROWS} rows"):
        world.run(world.job(registered=1), lambda rows, _: rows.limit(0))


def test_a_pipeline_that_writes_for_itself_is_not_called_for_rows_that_are_missing(world: World) -> None:
    calls: list[int] = []

    def on_window(rows: DataFrame, _: Window) -> None:
        calls.append(rows.count())

    job = world.job()
    output = world.run(job, on_window, writes_for_itself=True)[0]
    assert (output.files, output.rows) == ((), 0)
    assert calls == [ROWS]
    assert not Path(job.staging).exists()
    with pytest.raises(CountsDiffer, match=f"reads {ROWS} rows"):
        world.run(world.job(registered=ROWS + 1), on_window, writes_for_itself=True)
    assert calls == [ROWS]


def losing(keep: int) -> Callable[[str, str], Output]:
    """Return an inspection that finds what is left when executors wrote all but ``keep`` files to their own disks."""

    def inspect(staging: str, out: str = "") -> Output:
        for file in sorted(Path(staging).iterdir())[keep:]:
            file.unlink()
        return inspect_output(staging, out)

    return inspect


@pytest.mark.parametrize(("keep", "held"), [(1, r"1 files in \S+ hold \d+"), (0, r"0 files in \S+ hold 0")])
def test_files_that_executors_wrote_elsewhere_fail_the_window_with_both_numbers_and_their_hosts(
    world: World, monkeypatch: pytest.MonkeyPatch, keep: int, held: str
) -> None:
    monkeypatch.setattr(window_job, "inspect_output", losing(keep))
    job = replace(world.job(), bytes=2**30)  # so that it is read and written by several tasks
    told = (
        rf"Spark wrote {ROWS} rows, but {held}\. Those that failed are on \S+ \(executor driver\)\..*{BLIND}"
    )
    with pytest.raises(CountsDiffer, match=told):
        world.run(job, lambda rows, _: rows.repartition(4))


def test_a_groups_rows_are_counted_together(world: World) -> None:
    context = world.session.spark.sparkContext
    context.setJobGroup(group := world.group(), "windows")
    jobs = [world.job(name) for name in ("a", "b", "c")]
    outputs = run_windows(world.session.spark, SCHEMA, WindowHook(None), jobs, 2)
    assert [output.rows for output in outputs] == [ROWS] * 3
    assert len(context.statusTracker().getJobIdsForGroup(group)) == 1


def test_a_group_fails_as_its_windows_do(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def group(*jobs: WindowJob) -> tuple[Output, ...]:
        return run_windows(world.session.spark, SCHEMA, WindowHook(None), jobs, 2)

    with pytest.raises(CountsDiffer, match=f"reads {ROWS} rows of window b, but the ledger has registered 7"):
        group(world.job("a"), world.job("b", registered=7), world.job("c"))
    monkeypatch.setattr(window_job, "inspect_output", losing(0))
    with pytest.raises(CountsDiffer, match=f"Spark wrote {2 * ROWS} rows, but 0 files"):
        group(world.job("a"), world.job("b"))


def bounds(
    job: WindowJob, names: tuple[str, ...] = ("window_start", "window_end")
) -> dict[str, datetime | None]:
    return dict(zip(names, (job.window.start, job.window.end), strict=False))


def test_each_output_row_tells_its_windows_start_and_end_in_a_group_too(world: World) -> None:
    jobs = [world.job(name) for name in ("a", "b", "c")]
    run_windows(
        world.session.spark, SCHEMA, WindowHook(lambda rows, _: rows.groupBy("name").count()), jobs, 2
    )
    alone = world.job("d")
    world.run(alone, lambda rows, _: rows.groupBy("name").count())
    for job in (*jobs, alone):
        assert content(job) == [{"name": job.window.id, "count": ROWS, **bounds(job)}]
        (file,) = Path(job.staging).iterdir()
        assert pq.read_schema(file).field("window_end").type == pa.timestamp("us", "UTC")


@pytest.mark.parametrize("together", [1, 2])
def test_the_next_window_is_computed_by_the_code_that_was_compiled_for_the_last_one(
    world: World, together: int
) -> None:
    spark: Any = world.session.spark
    jvm, state = spark.sparkContext._jvm, spark._jsparkSession.sharedState().statusStore()
    compiled = jvm.org.apache.spark.metrics.source.CodegenMetrics.METRIC_COMPILATION_TIME()
    pipeline = WindowHook(lambda rows, _: rows.groupBy("name").agg(F.sum("number").alias("all")))

    def run() -> int:
        before = compiled.getCount()
        run_windows(spark, SCHEMA, pipeline, [world.job(f"w{n}") for n in range(together)], 2)
        return int(compiled.getCount() - before)

    run()
    assert run() == 0
    plan = state.executionsList().last().physicalPlanDescription()
    assert "InsertIntoHadoopFsRelationCommand" in plan
    assert "CollectMetrics" not in plan, "no operator that passes one row after the other"


def test_the_columns_are_named_or_the_results_own_or_switched_off_and_batches_have_none(world: World) -> None:
    one_row = lambda rows, _: rows.groupBy("name").agg(F.lit("mine").alias("Until"))  # noqa: E731  # three times below
    named = world.job()
    world.run(named, one_row, window_columns=("since", "until"))
    assert content(named) == [{"name": "w", "Until": "mine", **bounds(named, ("since",))}]
    odd = world.job()
    world.run(odd, one_row, window_columns=("it's `since`", "a.b \\"))
    assert content(odd) == [{"name": "w", "Until": "mine", **bounds(odd, ("it's `since`", "a.b \\"))}]
    off = world.job()
    world.run(off, one_row, window_columns=None)
    assert content(off) == [{"name": "w", "Until": "mine"}]
    batch = replace(world.job(), window=Window("batch-000000000001", None, None))
    world.run(batch, one_row)
    assert content(batch) == [{"name": "w", "Until": "mine"}]


def test_bounds_long_before_the_gregorian_calendar_are_right(world: World) -> None:
    window = Window("w", datetime(1066, 10, 14, 9, tzinfo=UTC), datetime.max.replace(tzinfo=UTC))
    job = replace(world.job(), window=window)
    world.run(job, lambda rows, _: rows.groupBy("name").count())
    (row,) = content(job)
    assert row["window_start"] == window.start
    assert row["window_end"] == window.end.replace(microsecond=999_000)


def test_executors_without_memory_are_named_with_the_setting_to_raise() -> None:
    said = "Task failed: java.lang.OutOfMemoryError: Java heap space"
    assert "spark.executor.memory" in advice_on(said, [])
    for said in (
        "[PYTHON_VERSION_MISMATCH] Python in worker has 3.9",
        'Cannot run program "python9": error=2',
    ):
        assert "Set spark_python" in advice_on(said, [])
    assert advice_on("ValueError: no", ["/a.parquet"]) == ""
