"""Apache Iceberg: a window is a partition, replaced by one snapshot.

Each snapshot's summary holds the pipeline, ledger, window and revision that it wrote. A write first looks for its window's
snapshots. Iceberg then rejects the write if the partition has changed since. So a repeated write, or a late one from a
server that was presumed dead, cannot undo a later revision. (Snapshots may expire; a revision
that is published again after its snapshot is gone replaces the same rows by themselves.)
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from mldserver.engine_jobs import PublishJob
from mldserver.errors import OperatorError
from mldserver.sinks.sink import (
    LEDGER,
    PIPELINE,
    WINDOW,
    Owner,
    SinkSpec,
    add_columns,
    check_made_here,
    existing,
    own_table,
    owner_of,
    refuse_table,
    staged,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TABLE = re.compile(r"(?:\w+|`[^`]+`)(?:\.(?:\w+|`[^`]+`)){2,}")
_WINDOW: Final = "mldserver.window"
_REVISION: Final = "mldserver.revision"
_NO_TABLE: Final = frozenset({"TABLE_OR_VIEW_NOT_FOUND", "SCHEMA_NOT_FOUND"})
_NO_CLASS: Final = "CANNOT_LOAD_CATALOG.PLUGIN_CLASS_NOT_FOUND"

_ADVICE: Final = (
    "Give Spark Iceberg of its own version and a catalog: spark_conf "
    "spark.jars.packages=org.apache.iceberg:iceberg-spark-runtime-SPARK_2.13:VERSION, "
    "spark.sql.catalog.{catalog}=org.apache.iceberg.spark.SparkCatalog, and that catalog's own properties, such as "
    "spark.sql.catalog.{catalog}.type."
)


def parse(target: str) -> str:
    """Return the table's name. Raises ValueError."""
    if not _TABLE.fullmatch(target):
        raise ValueError("after iceberg: comes CATALOG.DATABASE.TABLE")
    return target


check_settings = refuse_table


def check(spark: SparkSession, sink: SinkSpec) -> None:
    """Raise OperatorError when the catalog cannot be had, or the table is not one of ours."""
    catalog = sink.target.partition(".")[0]
    if spark.conf.get(f"spark.sql.catalog.{catalog}", None) is None:
        raise OperatorError(
            f"This Spark session has no catalog {catalog}, which sink = iceberg:{sink.target} names.",
            advice=_ADVICE.format(catalog=catalog),
        )
    table = _table(spark, sink)
    if table is not None:
        check_made_here(table.columns, sink.target)


def own(spark: SparkSession, sink: SinkSpec, owner: Owner, *, new_ledger: bool = False) -> None:
    """Store whose the table is among its properties; create the table if needed. Raises OperatorError as ``must_note``."""
    _own(spark, sink, owner, new_ledger=new_ledger)


def _own(spark: SparkSession, sink: SinkSpec, owner: Owner, *, new_ledger: bool = False) -> DataFrame:
    return own_table(spark, sink, sink.target, owner, lambda: _table(spark, sink), new_ledger=new_ledger)


def publish(spark: SparkSession, sink: SinkSpec, job: PublishJob) -> None:
    """Replace the window's rows in the table by those of its revision, unless it has them, or later ones, already.

    Raises what Spark raises; when the partition was written to meanwhile, too: the next try sees by whom.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # its usual name; only the driver pays for pyspark

    window, owner = job.window, owner_of(job)
    table = _own(spark, sink, owner)
    # From metadata only: the last snapshot's id (None: there is none), and the window's highest revision (0: none).
    last, written = None, 0
    snapshots = spark.table(f"{sink.target}.snapshots").select("committed_at", "snapshot_id", "summary")
    for row in sorted(snapshots.collect(), key=lambda snapshot: snapshot["committed_at"]):
        last, summary = int(row["snapshot_id"]), row["summary"] or {}
        if (summary.get(LEDGER), summary.get(_WINDOW)) == (owner.ledger, window.id):
            written = max(written, int(summary.get(_REVISION) or 0))
    if written >= window.revision:
        return
    rows = table.limit(0)
    if job.files:
        rows = staged(spark, job)
        add_columns(spark, sink.target, table, rows)
    writer = rows.writeTo(sink.target).options(**sink.options)
    for name, value in (
        (PIPELINE, owner.pipeline),
        (LEDGER, owner.ledger),
        (_WINDOW, window.id),
        (_REVISION, str(window.revision)),
    ):
        writer = writer.option(f"snapshot-property.{name}", value)
    if last is not None:
        writer = writer.option("isolation-level", "serializable")
        writer = writer.option("validate-from-snapshot-id", str(last))
    writer.overwrite(F.col(WINDOW) == F.lit(window.id))


def _table(spark: SparkSession, sink: SinkSpec) -> DataFrame | None:
    """Return the table, None when there is none yet. Raises OperatorError without Iceberg."""
    catalog = sink.target.partition(".")[0]
    faults = {_NO_CLASS: f"Spark does not find the class of its catalog {catalog}."}
    return existing(lambda: spark.table(sink.target), _NO_TABLE, faults, _ADVICE.format(catalog=catalog))
