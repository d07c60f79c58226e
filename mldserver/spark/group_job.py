"""Several small windows as one Spark job: their results are written together, then sorted into each one's own directory.

A job costs about as much for sixteen small windows as for two. ``on_window`` is called for every window before any is
computed; where it fails, and where the job fails, all of them have failed: the server then runs each alone.

Runs in the driver's process. Files are renamed from one directory to another, so that staging must be on a local file
system; and plans must be fixed once the hook has returned, as they are in classic Spark: on Spark Connect a temporary
view that the next call of the hook replaces would change what the last one returned.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from mldserver.spark.driver_messages import Output
from mldserver.spark.window_job import Attempt, check_written, inspect_output, write

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from mldserver.jobs.engine import WindowJob
    from mldserver.spark.handler import Pipeline

_TOGETHER = "_together"
"""Where a group is written, in the first one's staging directory: gone with it, whatever happens."""


def run_group(
    spark: SparkSession, schema: str, pipeline: Pipeline, jobs: Sequence[WindowJob], cores: int
) -> tuple[Output, ...]:
    """Compute attempts together; outputs in the order of ``jobs``. Raises as ``run_window`` does."""
    attempts = [Attempt(spark, schema, pipeline, job, cores) for job in jobs]
    alike: dict[str, list[tuple[DataFrame, WindowJob]]] = {}
    for attempt in attempts:
        if attempt.result is not None:
            alike.setdefault(attempt.result.schema.json(), []).append((attempt.result, attempt.job))
    outputs: dict[str, Output] = {}
    for members in alike.values():
        if len(members) == 1:
            ((result, job),) = members
            written = write(result, job.staging, [job], pipeline.window_columns, cores)
        else:
            written = _write_together(members, pipeline.window_columns, cores)
        files_of = {job.window.id: inspect_output(job.staging, job.out) for _, job in members}
        check_written(written, list(files_of.values()), str(Path(members[0][1].staging).parent.parent))
        outputs |= files_of
    for attempt in attempts:
        if attempt.result is not None:
            attempt.check_read()
    return tuple(outputs.get(job.window.id, Output((), 0)) for job in jobs)


def free_name(columns: Iterable[str]) -> str:
    """Return a name that none of these columns has: Spark's names do not tell capitals from small letters."""
    taken = {column.lower() for column in columns}
    names = (f"_window{number or ''}" for number in itertools.count())
    return next(name for name in names if name not in taken)


def _write_together(
    members: Sequence[tuple[DataFrame, WindowJob]], window_columns: tuple[str, str] | None, cores: int
) -> int:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # its usual name; only the driver pays for pyspark

    tag = free_name([*members[0][0].columns, *(window_columns or ())])
    # Texts, which generated code refers to, where it would hold a number: it is compiled once, not for each window.
    tagged = [result.withColumn(tag, F.lit(f"w{number}")) for number, (result, _) in enumerate(members)]
    union = functools.reduce(lambda left, right: left.unionAll(right), tagged)
    place = Path(members[0][1].staging) / _TOGETHER
    written = write(union, str(place), [job for _, job in members], window_columns, cores, tag)
    empty: list[tuple[DataFrame, WindowJob]] = []
    for number, (result, job) in enumerate(members):
        files = [
            file for file in (place / f"{tag}=w{number}").glob("*") if not file.name.startswith(("_", "."))
        ]
        if files:
            Path(job.staging).mkdir(parents=True, exist_ok=True)
        else:
            empty.append((result, job))
        for file in files:
            file.rename(Path(job.staging) / file.name)
    shutil.rmtree(place)
    if empty:
        # Windows without rows get a file that has the columns, as they have it when they run alone.
        result, first = empty[0]
        if Path(first.staging).exists():
            Path(first.staging).rmdir()  # it held the group
        write(result.limit(0), first.staging, [first], window_columns, cores)
    for _, job in empty[1:]:
        shutil.copytree(first.staging, job.staging)
    return written
