"""Departures and mean delay per carrier and hour.

Shows the usual shape: JSON records become rows, windows are cut on a column of the rows, and Spark sums each window up
once. The input is one JSON object a record, as in ``handlers/data/flights-2013-01.jsonl.xz``.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # the name that everybody knows it by

from mldserver import Record, Window, tumbling

schema = "carrier STRING, delay DOUBLE, scheduled TIMESTAMP"
windows = tumbling("1 hour", on="scheduled", lateness="10 minutes")


def process_record(record: Record) -> tuple[str, float | None, str]:
    """Make one row of a departure; a cancelled flight has no delay."""
    flight = record.json()
    return flight["carrier"], flight["dep_delay"], flight["scheduled"]


def on_window(rows: DataFrame, window: Window) -> DataFrame:  # noqa: ARG001  # the hook is called with both
    """Count departures and average their delay, once per closed hour."""
    return rows.groupBy("carrier").agg(F.count("*").alias("flights"), F.avg("delay").alias("mean_delay"))
