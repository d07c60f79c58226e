"""A function's first window, made up: it warms Spark up, and proves that the executors share the output's storage.

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
from mldserver.spark.driver_messages import LoadFunction, lost_connection, message
from mldserver.spark.session import DriverSession
from mldserver.spark.window_job import (
    WRITTEN_BYTES,
    WindowHook,
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


def warm_up(session: DriverSession, load: LoadFunction) -> None:
    """Send rows through the path that windows take: files are read by the schema, grouped and written.

    The user's ``on_window`` is not called: it may write to places where made-up rows must not appear. Raises
    OperatorError where executors do not share the storage, NotThereYet where Spark fails on it, and on a local master
    with a local output what Spark raises.
    """
    filesystem, root = reach(load.place, load.out)
    needs_shared_storage = bool(load.out) or not session.is_local
    _delete_folder(filesystem, root)  # a driver that was killed may have left files
    place = f"{load.place}/{secrets.token_hex(4)}"  # a new name, since that driver's tasks may still write
    try:
        if needs_shared_storage:
            _check_shared_storage(session, load, f"{place}/proof")
        grouped = WindowHook(lambda rows, _window: rows.groupBy("_shard").count())
        job = _write_sample_job(load, f"{place}/window", 1)
        run_windows(session.spark, load.schema, grouped, (job,), session.slots())
    except Exception as error:
        raise_unchanged = (
            isinstance(error, OperatorError) or not needs_shared_storage or lost_connection(error)
        )
        try:
            raise_unchanged = raise_unchanged or session.is_stopped
        except Exception:  # noqa: BLE001  # the JVM is exiting
            raise_unchanged = True
        if raise_unchanged:
            raise
        # Spark's analysis runs in the driver: what it does not find now it will not find later.
        kind = OperatorError if isinstance(error, AnalysisException) else NotThereYet
        raise kind(f"Spark cannot work on windows in {place}: {message(error)} {_ADVICE}") from error
    finally:
        _delete_folder(filesystem, root)


def _write_sample_job(load: LoadFunction, place: str, count: int) -> WindowJob:
    """Write ``count`` segments with one row each into ``place``, and return a window's job that reads them."""
    filesystem, root = reach(place, load.out)
    names = [f"segments/{number}.parquet" for number in range(count)]
    filesystem.create_dir(f"{root}/segments", recursive=True)

    row = pa.table({"_clock": [0]})
    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(lambda name: pq.write_table(row, f"{root}/{name}", filesystem=filesystem), names))
    paths = tuple(f"{place}/{name}" for name in names)
    # The number of bytes decides into how many tasks the output is cut: claim the least that gives ``count`` tasks.
    window = Window("warm-up", None, None)
    return WindowJob(window, 0, paths, f"{place}/out", count, (count - 1) * WRITTEN_BYTES + 1, load.out)


def _check_shared_storage(session: DriverSession, load: LoadFunction, place: str) -> None:
    """Have the executors read and write one file on each core. Raises OperatorError unless as many rows come back."""
    cores = session.slots()
    spark, job = session.spark, _write_sample_job(load, place, cores)
    if not session.connect:
        spark.sparkContext.setJobGroup(_GROUP, "the proof that executors share the output's storage")
    # One file a task, however small they are and however few executors Spark has counted.
    setting = "spark.sql.files.maxPartitionBytes"
    former_value = spark.conf.get(setting) or ""
    spark.conf.set(setting, str(1 << 16))
    try:
        # An executor that lacks a file must not fail: Spark would only retry the task on another executor.
        reader = spark.read.option("ignoreMissingFiles", "true").schema(columns_ddl(load.schema))
        write(
            reader.parquet(*map(escaped, job.segments)),
            job.staging,
            (job,),
            WindowHook(None, window_columns=None),
            cores,
        )
    finally:
        spark.conf.set(setting, former_value)
    try:
        received = inspect_output(job.staging, job.out).rows
    except FileNotFoundError:
        received = 0  # none of them sees this host's folder
    if received != job.rows:
        raise OperatorError(
            f"Spark's executors do not all see the output's storage: this server wrote {job.rows} files in {place}, and "
            f"of {received} of them the executors' copies are here.{where_lost(spark, job.staging, job.out, of_all=True)} {_ADVICE}"
        )


def _delete_folder(filesystem: fs.FileSystem, root: str) -> None:
    with contextlib.suppress(OSError):
        filesystem.delete_dir(root)
