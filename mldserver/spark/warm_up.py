"""A session's first window, made up: it warms Spark up, and proves that the executors share the output's storage.

Where Spark runs on other machines, or the output lies on an object store, that window lies in the output's storage. This
process writes a file for each core; the executors read these and write as many, which are counted here. An executor that
sees another disk under that path finds nothing there, or writes to that disk, and Spark reports success.
One that joins later is caught by the counts of windows (``window_job.py``).
"""

from __future__ import annotations

import contextlib
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.errors import AnalysisException

from mldserver.base.uris import reach
from mldserver.engine_jobs import WindowJob
from mldserver.errors import NotThereYet, OperatorError
from mldserver.sinks.sink import escaped
from mldserver.spark.counts import inspect_output, where_lost
from mldserver.spark.driver_messages import WARM_UP, StartSession, lost_connection, message
from mldserver.spark.session import DriverSession, is_local
from mldserver.spark.window_job import (
    WRITTEN_BYTES,
    Pipeline,
    columns_ddl,
    run_windows,
    write,
)
from mldserver.windows import Window

_GROUP: Final = "mldserver-warm-up"

_WRITERS: Final = 8

_ADVICE: Final = (
    "Windows would lack rows. Set out to shared storage that this host and every executor reach under the same path: "
    "a folder of a network file system that is mounted there on each of them, or an object store."
)


def warm_up(session: DriverSession, start: StartSession) -> None:
    """Send rows through the path that windows take: files are read by the schema, grouped and written.

    The user's ``on_window`` is not called: it may write to places where made-up rows must not appear. Raises
    OperatorError where executors do not share the storage, NotThereYet where Spark fails on it, and on a local master
    with a local output what Spark raises.
    """
    # Beside the scratch folder, which is this user's alone: executors may be others.
    own = start.place or f"{start.scratch}{WARM_UP}"
    filesystem, root = reach(own, start.out)
    elsewhere = bool(start.out) or not is_local(start.master)
    _forget(filesystem, root)  # what a driver that was killed has left
    place = f"{own}/{secrets.token_hex(4)}"  # where its tasks may still write
    try:
        if elsewhere:
            _prove(session, start, f"{place}/proof")
        grouped = Pipeline(lambda rows, _window: rows.groupBy("_shard").count())
        job = _job(start, f"{place}/window", 1)
        run_windows(session.spark, start.schema, grouped, (job,), session.slots())
    except Exception as error:
        over = isinstance(error, OperatorError) or not elsewhere or lost_connection(error)
        try:
            over = over or session.is_stopped
        except Exception:  # noqa: BLE001  # of a JVM that is going
            over = True
        if over:
            raise
        # What the driver's side of Spark does not find it will not find later either.
        kind = OperatorError if isinstance(error, AnalysisException) else NotThereYet
        raise kind(f"Spark cannot work on windows in {place}: {message(error)} {_ADVICE}") from error
    finally:
        _forget(filesystem, root)


def _job(start: StartSession, place: str, count: int) -> WindowJob:
    """Write ``count`` segments with a row each, and return the job over them."""
    filesystem, root = reach(place, start.out)
    names = [f"segments/{number}.parquet" for number in range(count)]
    filesystem.create_dir(f"{root}/segments", recursive=True)

    row = pa.table({"_clock": [0]})
    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(lambda name: pq.write_table(row, f"{root}/{name}", filesystem=filesystem), names))
    paths = tuple(f"{place}/{name}" for name in names)
    # As few bytes as give each of them a task that writes it.
    window = Window("warm-up", None, None)
    return WindowJob(window, 0, paths, f"{place}/out", count, (count - 1) * WRITTEN_BYTES + 1, start.out)


def _prove(session: DriverSession, start: StartSession, place: str) -> None:
    """Read and write one file on each core. Raises OperatorError unless as many rows come back."""
    cores = session.slots()
    spark, job = session.spark, _job(start, place, cores)
    if not session.connect:
        spark.sparkContext.setJobGroup(_GROUP, "the proof that executors share the output's storage")
    # One file a task, however small they are and however few executors Spark has counted.
    wanted = "spark.sql.files.maxPartitionBytes"
    before = spark.conf.get(wanted) or ""
    spark.conf.set(wanted, str(1 << 16))
    try:
        # An executor that lacks a file must not fail: Spark would only retry the task on another executor.
        reader = spark.read.option("ignoreMissingFiles", "true").schema(columns_ddl(start.schema))
        write(reader.parquet(*map(escaped, job.segments)), job.staging, (job,), None, cores)
    finally:
        spark.conf.set(wanted, before)
    try:
        came = inspect_output(job.staging, job.out).rows
    except FileNotFoundError:
        came = 0  # none of them sees this host's folder
    if came != job.rows:
        raise OperatorError(
            f"Spark's executors do not all see the output's storage: this server wrote {job.rows} files in {place}, and "
            f"of {came} of them the executors' copies are here.{where_lost(spark, job.staging, job.out, of_all=True)} {_ADVICE}"
        )


def _forget(filesystem: fs.FileSystem, root: str) -> None:
    with contextlib.suppress(OSError):
        filesystem.delete_dir(root)
