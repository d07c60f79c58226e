"""Rows are counted as they are read, on their way out, and in the output's files.

An executor that does not see the output folder reads nothing, or writes to its own disk, and Spark says that all went well.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow.parquet as pq
from py4j.protocol import Py4JJavaError
from pyarrow import fs
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812  # its usual name

from mldserver.base.uris import reach
from mldserver.engine_jobs import NO_WORK, SparkWork
from mldserver.spark.driver_messages import Output

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_COUNT_SECONDS = 60
"""How long Spark may take to report a job's counts. It takes milliseconds."""

_PART: Final = re.compile(r"/part-(\d+)-[^/]*$")
"""What Spark calls a file: the number is that of the partition whose task wrote it."""


_TASKS: Final = 2000
"""Of a stage, how many are looked at for their executors; two thousand are a second."""

_NUMBERS: Final = itertools.count()

REMOVE: Final = "Remove the host that does not from the cluster, or mount the folder there."
"""What helps where an executor does not see the output folder."""
_NOT_THERE: Final = ("FILE_NOT_EXIST", "FileNotFoundException", "NoSuchFileException")


class CountsDiffer(Exception):
    """Rows were lost between the ledger and Spark, or between Spark and the output's files."""


class Count:
    """Counts a frame's rows while a job runs over them, on Spark Connect, where ``JobCounts`` has no data."""

    def __init__(self, frame: DataFrame) -> None:
        """Count the rows of ``frame`` through ``self.frame``."""
        self._observation = Observation()
        self.frame = frame.observe(self._observation, F.count(F.lit(1)).alias("rows"))

    def rows(self, *, ran: bool) -> int | None:
        """Return the rows that the first job over the frame saw; None: no job has run over it. ``ran``: one has."""
        rows: int | None = self._observation.get.get("rows", 0 if ran else None)
        return rows


class JobCounts:
    """The Spark jobs that this thread begins in the block: what their stages have read, and what they have written.

    Spark counts both for nothing. An ``Observation`` counts row by row, and what is before it is not compiled together with
    what comes next: a large window takes up to half as long again.
    """

    def __init__(self, spark: SparkSession) -> None:
        """Prepare a job tag; none on Spark Connect."""
        self._context: Any = getattr(spark, "sparkContext", None)
        # A separate tag: a thread has only one job group, and other windows may share the hook's tags.
        self._tag = f"mldserver-{next(_NUMBERS)}"

    def __enter__(self) -> Self:
        if self._context is not None:
            self._context.addJobTag(self._tag)
        return self

    def __exit__(self, *_: object) -> None:
        if self._context is not None:
            self._context.removeJobTag(self._tag)

    def _stage_attempts(self) -> Iterator[Any]:
        """Yield Spark's data of each attempt at each stage of the tagged jobs, except those that Spark has forgotten already."""
        if self._context is None:
            return
        scala = self._context._jsc.sc()  # noqa: SLF001  # no Python face yet
        scala.listenerBus().waitUntilEmpty(_COUNT_SECONDS * 1000)
        tracker, store = scala.statusTracker(), scala.statusStore()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForTag(self._tag)]
        for stage in {stage for job in jobs if job.isDefined() for stage in job.get().stageIds()}:
            with contextlib.suppress(Py4JJavaError):
                attempts = store.stageData(stage, False, None, False, None)  # neither tasks nor summaries
                yield from map(attempts.apply, range(attempts.size()))

    def work(self) -> SparkWork:
        """Return the jobs, and the seconds of the stages that ran; nothing on Spark Connect, or where Spark does not say."""
        if self._context is None:
            return NO_WORK
        with contextlib.suppress(Exception):  # no Python face yet: another Spark may answer otherwise
            jobs = sorted(self._context._jsc.sc().statusTracker().getJobIdsForTag(self._tag))  # noqa: SLF001  # see above
            times = (
                (stage.stageId(), stage.submissionTime(), stage.completionTime())
                for stage in self._stage_attempts()
            )
            stages = (
                (number, (end.get().getTime() - begin.get().getTime()) / 1000)
                for number, begin, end in times
                if begin.isDefined() and end.isDefined()
            )
            return SparkWork(tuple(jobs), tuple(sorted(stages)))
        return NO_WORK

    def counts(self) -> tuple[set[int], int]:
        """Return how many rows the stages have read, each of them and all together, and how many they have written into files.

        Rows that failed tasks have read count too. Rows that a task has written count once the driver has allowed its
        commit. On Spark Connect, all counts are 0.
        """
        stages = [(stage.inputRecords(), stage.outputRecords()) for stage in self._stage_attempts()]
        read = [records for records, _ in stages]
        return {*read, sum(read)}, sum(records for _, records in stages)


def check_written(
    spark: SparkSession, written: int, outputs: Sequence[Output], staging: str, out: str = ""
) -> None:
    """Raise CountsDiffer unless the output files hold as many rows as Spark reports as ``written``, and each output has a file."""
    found = sum(output.rows for output in outputs)
    if found != written or not all(output.files for output in outputs):
        files = sum(len(output.files) for output in outputs)
        executors = "" if outputs[1:] else where_lost(spark, staging, out)
        raise CountsDiffer(
            f"Spark wrote {written} rows, but {files} files in {staging} hold {found}.{executors} Nothing of this attempt "
            f"counts. Each executor must see the output folder, under the same path. {REMOVE}"
        )


def where_lost(spark: SparkSession, staging: str, out: str, *, of_all: bool = False) -> str:
    """Return a sentence that names the executors whose output files of this thread's last job are missing in ``staging``; or "".

    ``of_all``: every task should have written rows; else only tasks that report written rows.
    """
    lost: set[str] = set()
    with contextlib.suppress(Exception):  # no Python face yet: another Spark may answer otherwise
        filesystem, root = reach(staging, out)
        files = {path: _PART.search(path) for path in data_files(filesystem, root)}
        rows = {path: pq.read_metadata(path, filesystem=filesystem).num_rows for path in files}
        present = {int(part[1]) for path, part in files.items() if part and rows[path]}  # numbers of tasks
        *_, tasks = _task_lists(spark)
        for task in tasks:
            if task.status() != "SUCCESS" or task.index() in present:
                continue
            if of_all or task.taskMetrics().get().outputMetrics().recordsWritten():
                lost.add(_executor(task))
    return f" Those that failed are on {', '.join(sorted(lost))}." if lost else ""


def where_failed(spark: SparkSession) -> str:
    """Return a sentence about the executors on which tasks of this thread's last job failed; empty: it has not failed so."""
    failed: set[str] = set()
    with contextlib.suppress(Exception):  # see where_lost; and a JVM that is going says nothing
        for tasks in _task_lists(spark, unless="SUCCEEDED"):
            failed |= {_executor(task) for task in tasks if task.status() == "FAILED"}
    return f"Its tasks failed on {', '.join(sorted(failed))}." if failed else ""


def advice_on(message: str, segments: Iterable[str]) -> str:
    """Return advice on a failed job if Spark's ``message`` names a known cause (a missing segment, Python, memory); else ""."""
    names = (path.rpartition("/")[2] for path in segments)
    if any(sign in message for sign in _NOT_THERE) and any(name in message for name in names):
        return f"An executor does not see the output folder. {REMOVE}"
    if "PYTHON_VERSION_MISMATCH" in message or "Cannot run program" in message:
        version = ".".join(map(str, sys.version_info[:2]))
        return f"Executors need Python {version}, as the driver. Set spark_python to one that is there."
    if "OutOfMemoryError" in message:
        return "Raise spark.executor.memory in spark_conf."
    return ""


def _task_lists(spark: SparkSession, unless: str = "") -> list[list[Any]]:
    """Return for each stage of this thread's last Spark job its tasks; the last stage wrote the result. Empty if its status is ``unless``."""
    context: Any = spark.sparkContext
    tracker = context.statusTracker()
    job = tracker.getJobInfo(max(tracker.getJobIdsForGroup(context.getLocalProperty("spark.jobGroup.id"))))
    if job.status == unless:
        return []
    store = context._jsc.sc().statusStore()  # noqa: SLF001  # see where_lost
    found = [store.taskList(stage, 0, _TASKS) for stage in sorted(map(int, job.stageIds))]
    return [[tasks.apply(number) for number in range(tasks.size())] for tasks in found]


def _executor(task: Any) -> str:
    return f"{task.host()} (executor {task.executorId()})"


def inspect_output(staging: str, out: str = "") -> Output:
    """List the data files of a finished attempt and count their rows from the Parquet footers. Raises OSError.

    ``out``: ``WindowJob.out``, where ``staging`` is not a local path.
    """
    filesystem, root = reach(staging, out)
    files, rows = data_files(filesystem, root), 0
    for path in files:
        with filesystem.open_input_file(path) as source:
            rows += pq.read_metadata(source).num_rows
    return Output(tuple(path[len(root) :].lstrip("/") for path in files), rows)


def data_files(filesystem: fs.FileSystem, root: str) -> list[str]:
    """Return the paths of an output's files, sorted."""
    entries = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    files = (entry for entry in entries if entry.type == fs.FileType.File)
    # An abandoned task may still write into Spark's temporary folder.
    return sorted(
        entry.path
        for entry in files
        if not entry.base_name.startswith(("_", ".")) and "/_temporary/" not in entry.path
    )
