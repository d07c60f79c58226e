"""Publishing into a table, whichever format it has.

The staged files that the ledger counts are the truth; publishing writes them into the table, in one atomic step that
may be repeated any number of times, by any server. A revision replaces what lower ones of the window wrote, and is
never replaced by them. Runs in the driver's process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mldserver.spark.sinks import delta, iceberg, jdbc

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import SparkSession

    from mldserver.jobs.engine import PublishJob
    from mldserver.spark.sinks.sink import SinkSpec, TableFormat

__all__ = ["check", "publish"]

_CHECK: Final[Mapping[TableFormat, Callable[[SparkSession, SinkSpec], None]]] = {
    "delta": delta.check,
    "iceberg": iceberg.check,
    "jdbc": jdbc.check,
}
_PUBLISH: Final[Mapping[TableFormat, Callable[[SparkSession, SinkSpec, PublishJob], None]]] = {
    "delta": delta.publish,
    "iceberg": iceberg.publish,
    "jdbc": jdbc.publish,
}


def check(spark: SparkSession, sink: SinkSpec) -> None:
    """Find out at the start what a window would fail on. Raises OperatorError, and what Spark raises."""
    _CHECK[sink.format](spark, sink)


def publish(spark: SparkSession, sink: SinkSpec, job: PublishJob) -> None:
    """Write a committed output into the table; repeatable. Raises what Spark or the table's format raises."""
    _PUBLISH[sink.format](spark, sink, job)
