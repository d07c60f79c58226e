"""Delta Lake: a window is a partition, replaced by one commit of the table's log.

Delta skips a write whose ``txnVersion`` is not above the last one of its ``txnAppId`` (Delta protocol, "Transaction
Identifiers"). Windows may be published in any order, so each has a separate application id, and its revision is the
version. The application id contains the ledger's id, since a new ledger counts revisions from 1 again. So a repeated
write, or a late one from a server that was presumed dead, changes nothing. The writer gets both values, not the
session, where they would apply to all later writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mldserver.base.uris import local_path
from mldserver.engine_jobs import PublishJob
from mldserver.sinks.sink import (
    WINDOW,
    Owner,
    SinkSpec,
    add_columns,
    check_made_here,
    existing,
    own_table,
    owner_of,
    quoted,
    refuse_table,
    staged,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NO_TABLE: Final = frozenset(
    {
        "DELTA_MISSING_DELTA_TABLE",
        "DELTA_PATH_DOES_NOT_EXIST",
        "DELTA_READ_TABLE_WITHOUT_COLUMNS",
        "DELTA_SCHEMA_NOT_SET",
        "DELTA_TABLE_NOT_FOUND",
        "PATH_NOT_FOUND",
    }
)
"""What Delta, and Spark before it, say of a place where no table is yet."""

_ADVICE: Final = (
    "Give Spark Delta Lake of its own version: spark_conf spark.jars.packages=io.delta:delta-spark_2.13:VERSION, "
    "spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension and "
    "spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog."
)


def parse(target: str) -> str:
    """Return an absolute path, or the URI. Raises ValueError."""
    if not target.strip("/"):
        raise ValueError("after delta: comes a path or a URI")
    # Spark has a different working directory.
    return target if "://" in target else str(local_path(target).absolute())


check_settings = refuse_table


def check(spark: SparkSession, sink: SinkSpec) -> None:
    """Raise OperatorError when Spark has no Delta Lake, or the table is not one of ours."""
    table = _table(spark, sink)
    if table is not None:
        check_made_here(table.columns, sink.target)


def own(spark: SparkSession, sink: SinkSpec, owner: Owner, *, new_ledger: bool = False) -> None:
    """Store whose the table is among its properties; create the table if needed. Raises OperatorError as ``must_note``."""
    _own(spark, sink, owner, new_ledger=new_ledger)


def _own(spark: SparkSession, sink: SinkSpec, owner: Owner, *, new_ledger: bool = False) -> DataFrame:
    return own_table(spark, sink, _name(sink), owner, lambda: _table(spark, sink), new_ledger=new_ledger)


def _name(sink: SinkSpec) -> str:
    return f"delta.{quoted(sink.target)}"


def publish(spark: SparkSession, sink: SinkSpec, job: PublishJob) -> None:
    """Replace the window's rows in the table by those of its revision, unless it has them, or later ones, already."""
    owner = owner_of(job)
    table = _own(spark, sink, owner)
    rows = table.limit(0)
    if job.files:
        rows = staged(spark, job)
        add_columns(spark, _name(sink), table, rows)
    (
        rows.write.format("delta")
        .mode("overwrite")
        .options(**sink.options)
        .option("replaceWhere", f"{WINDOW} = '{job.window.id}'")
        .option("txnAppId", f"{owner.pipeline}/{owner.ledger}/{job.window.id}")
        .option("txnVersion", str(job.window.revision))
        .partitionBy(WINDOW)
        .save(sink.target)
    )


def _table(spark: SparkSession, sink: SinkSpec) -> DataFrame | None:
    """Return the table, None when there is none yet. Raises OperatorError without Delta Lake."""
    faults = {
        "DATA_SOURCE_NOT_FOUND": "This Spark session knows no format delta.",
        "DELTA_CONFIGURE_SPARK_SESSION_WITH_EXTENSION_AND_CATALOG": "This Spark session is not set up for Delta Lake.",
    }
    return existing(lambda: spark.read.format("delta").load(sink.target), _NO_TABLE, faults, _ADVICE)
