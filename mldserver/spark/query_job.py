"""Runs a query of a handler in the Spark driver, and writes its result into a file without a name.

The driver passes the file's descriptor on. So the file is gone with its last reader, whatever process dies. Record batches
are written as tasks deliver them: this never waits for a reader, because Spark's scheduler would wait, too, and with it every
window.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from pyspark.serializers import read_int
from pyspark.sql import functions as F  # noqa: N812  # its usual name
from pyspark.sql.pandas.serializers import ArrowStreamSerializer
from pyspark.sql.pandas.types import to_arrow_schema

from mldserver.engine_jobs import FINAL, REVISION, WINDOW, FunctionView
from mldserver.errors import QueryTooLarge
from mldserver.handler.queries import Query, QueryResult, values_of
from mldserver.sinks import find
from mldserver.sinks.lake import may_hold

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from mldserver.sinks import FileTable
    from mldserver.sinks.sink import SinkSpec

_START = "yyyy-MM-dd'T'HH-mm-ss"
_WINDOW = r"'/(?:window=|outputs/)([^/]+)/'"


class Views:
    """The views of one session, each made anew when its list of files has changed."""

    def __init__(self, spark: SparkSession, sink_of: Callable[[str], SinkSpec | None]) -> None:
        """Make views in a session. ``sink_of`` returns where a function's windows are published."""
        self._spark, self._sink_of = spark, sink_of
        self._made: dict[str, FunctionView] = {}
        self._lock = threading.Lock()

    def make(self, views: Sequence[FunctionView]) -> None:
        """Make the views that are not there as they are wanted, or newer. Raises what Spark raises for files that it cannot read.

        A job may find a newer view than its own, made for another job that runs beside it, and never an older one.
        """
        with self._lock:
            for view in views:
                self._make(view)

    def read(self, view: FunctionView) -> DataFrame | None:
        """Return the rows of a view; None: it has no files. Raises as ``make``."""
        view = self._with_files(view)
        if not view.paths:
            return None
        frame = self._frame(view)
        if not view.is_table or view.window is None:
            return frame
        return frame.where(F.col(WINDOW) == view.window).drop(WINDOW, REVISION)

    def _with_files(self, view: FunctionView) -> FunctionView:
        """Return a view of a table with the table's present files."""
        if not view.is_table or (sink := self._sink_of(view.name)) is None:
            return view
        files = cast("FileTable", find(sink.format)).files(sink)
        return replace(
            view, paths=tuple(file for file in files if view.window is None or may_hold(file, view.window))
        )

    def _make(self, view: FunctionView) -> None:
        made = self._made.get(view.name)
        if made is not None and made.serial > view.serial:
            return
        view = self._with_files(view)
        if not (view.paths or view.schema):
            return
        if made != view:
            self._frame(view).createOrReplaceTempView(f"`{view.name}`")
        self._made[view.name] = view

    def _frame(self, view: FunctionView) -> DataFrame:
        """Return the rows of a view's files.

        The columns are those of the latest window; in windows of earlier code, columns that were added since are null. Start
        and end of a window are made from the path of its files, so that Spark opens only files that a condition on them lets
        through.
        """
        reader = self._spark.read
        if not view.paths:
            columns = [f"`{name}` TIMESTAMP" for name in view.columns or ()]
            return self._spark.createDataFrame([], ", ".join((view.schema, *columns)))
        schema = reader.parquet(view.paths[-1]).schema
        frame = reader.schema(schema).parquet(*view.paths)
        if view.is_table and FINAL in frame.columns:
            frame = frame.where(
                F.coalesce(F.col(FINAL), F.lit(True))
            )  # windows of earlier code have no value
        if view.columns is None:
            return frame
        start, end = view.columns
        window = f"regexp_extract(_metadata.file_path, {_WINDOW}, 1)"
        parsed = f"""try_to_timestamp(regexp_replace({window}, '([.][0-9]+)?Z$', ''), "{_START}")"""
        ms = f"coalesce(cast(nullif(regexp_extract({window}, '[.]([0-9]+)Z$', 1), '') AS INT), 0)"
        size = f"make_dt_interval(0, 0, 0, {view.size_ms / 1000})"
        starts = f"({parsed} + make_dt_interval(0, 0, 0, {ms} / 1000))"
        others = [f"`{name}`" for name in frame.columns if name not in view.columns]
        return frame.selectExpr(*others, f"{starts} AS `{start}`", f"{starts} + {size} AS `{end}`")


def run_query(
    spark: SparkSession,
    views: Views,
    wanted: Sequence[FunctionView],
    query: Query,
    *,
    max_bytes: int,
    folder: str,
) -> QueryResult:
    """Run a query; return its result in a file that is open here. ``folder``: where results of any number of rows are written.

    Raises QueryTooLarge beyond the query's rows or ``max_bytes``, and what Spark raises.
    """
    views.make(wanted)
    frame = spark.sql(query.text, args=values_of(query))
    limit = query.max_rows
    if limit is not None:
        frame = frame.limit(limit + 1)
    file = (
        os.memfd_create("mldserver-query", os.MFD_CLOEXEC)
        if limit is not None
        else os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    )
    try:
        return QueryResult(file, _write(frame, file, limit, max_bytes))
    except BaseException:
        os.close(file)
        raise


def _write(frame: DataFrame, file: int, max_rows: int | None, max_bytes: int) -> tuple[int, ...]:
    """Write the rows into an open file, as tasks deliver them. Return the order of the record batches."""
    schema = to_arrow_schema(frame.schema, error_on_duplicated_field_names_in_struct=True, timezone="UTC")
    rows = 0
    with (
        pa.OSFile(f"/proc/self/fd/{file}", "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
        _batches(frame) as batches,
    ):
        for batch in batches:
            if isinstance(batch, list):  # the last: the order of the others
                return tuple(batch)
            rows += batch.num_rows
            if max_rows is not None and rows > max_rows:
                raise _too_large(f"more than {max_rows:,} rows")
            writer.write(batch.cast(schema))
            if sink.tell() > max_bytes:
                raise _too_large(f"more than {max_bytes:,} bytes")
    return ()


def _too_large(what: str) -> QueryTooLarge:
    return QueryTooLarge(
        f"The query's result has {what}.",
        did="It was given up.",
        advice="Aggregate in SQL, use a Lookup, or stream=True; max_rows and query_spill_bytes set the limits.",
    )


@contextmanager
def _batches(frame: DataFrame) -> Iterator[Iterator[Any]]:
    """Yield the record batches as they come, and at last a list of their places in order.

    Leaving the block with an error cancels the job.
    """
    spark = frame.sparkSession
    if spark.__module__.startswith("pyspark.sql.connect"):
        # Spark Connect has no public way to get batches one by one.
        batches = frame.toArrow().to_batches()
        yield iter([*batches, list(range(len(batches)))])
        return
    from pyspark.errors.exceptions.captured import unwrap_spark_exception  # noqa: PLC0415  # not on Spark Connect
    from pyspark.util import _load_from_socket  # noqa: PLC0415  # see above

    # As pyspark's own collect does, which keeps all batches in memory.
    port, secret, server = frame._jdf.collectAsArrowToPython()  # noqa: SLF001  # no public way, see above
    try:
        with _load_from_socket((port, secret), _BatchesAndOrder()) as batches:
            yield batches
    except BaseException:
        group = spark.sparkContext.getLocalProperty("spark.jobGroup.id")
        spark.sparkContext._jsc.sc().cancelJobGroup(group)  # noqa: SLF001  # see above
        with suppress(Exception):  # what the cancellation, or the closed socket, has caused
            server.getResult()
        raise
    with unwrap_spark_exception():
        server.getResult()


class _BatchesAndOrder(ArrowStreamSerializer):
    """Reads record batches in the order in which tasks end, and at last their places in order."""

    def load_stream(self, stream: Any) -> Iterator[Any]:
        """Yield the batches, and a list. A failed job has no list: ``getResult`` raises its error."""
        yield from super().load_stream(stream)
        count = read_int(stream)  # type: ignore[no-untyped-call]  # pyspark has no types here
        if count >= 0:
            yield [read_int(stream) for _ in range(count)]  # type: ignore[no-untyped-call]  # see above
