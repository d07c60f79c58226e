"""The user's side of the tests with a real Spark: the window's id says what ``on_window`` does."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import pandas as pd  # pandas_udf reads the types
from pyspark.sql import functions as F  # noqa: N812  # its usual name
from pyspark.sql.functions import pandas_udf, udf

from mldserver import Window

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

schema = "carrier STRING, delay DOUBLE"


def one_over_zero(_: float) -> float:
    return 1 / 0


def doubled(delay: float) -> int:
    return int(2 * delay)


@udf("int")
def twice(delay: float) -> int:
    # It travels to the executors whole; what it calls, by its module's name.
    return doubled(delay)


@pandas_udf("double")
def half(delays: pd.Series) -> pd.Series:
    return delays / 2


LATE = F.col("delay") > 15


class Windows:
    """One instance for all windows of a driver."""

    def __init__(self) -> None:
        self.calls = 0

    def on_window(self, rows: DataFrame, window: Window) -> Any:
        self.calls += 1
        return getattr(self, window.id)(rows, window)

    def identity(self, rows: DataFrame, _: Window) -> DataFrame:
        return rows

    def grouped(self, rows: DataFrame, window: Window) -> DataFrame:
        print(f"grouping {window.id}")
        mean = F.avg("delay").alias("mean_delay")
        return rows.groupBy("carrier").agg(
            F.count("*").alias("flights"), mean, F.lit(window.start).alias("start")
        )

    def by_view(self, rows: DataFrame, window: Window) -> DataFrame:
        """Each call replaces the view of the one before."""
        rows.withColumn("window", F.lit(window.id)).createOrReplaceTempView("rows")
        return rows.sparkSession.sql("SELECT * FROM rows")

    by_the_same_view = by_view

    def empty_view(self, rows: DataFrame, window: Window) -> DataFrame:
        return self.by_view(rows, window).where("delay > 1000")

    async def awaited(self, rows: DataFrame, _: Window) -> DataFrame:
        return rows.select(F.lit(self.calls).alias("calls")).limit(1)

    def settings(self, rows: DataFrame, _: Window) -> DataFrame:
        spark = rows.sparkSession
        names = ("sql.shuffle.partitions", "sql.session.timeZone", "app.name", "of.the.host")
        told = [(name, spark.conf.get(f"spark.{name}")) for name in names]
        told += [
            ("secret", spark.conf.get("spark.hadoop.fs.s3a.secret.key")),
            ("ui", spark.sparkContext.uiWebUrl),
        ]
        return spark.createDataFrame(told, "name STRING, value STRING")

    def nothing(self, rows: DataFrame, _: Window) -> None:
        rows.count()

    def number(self, rows: DataFrame, _: Window) -> int:
        return rows.count()

    def broken(self, _: DataFrame, window: Window) -> DataFrame:
        raise LookupError(f"no table for {window.id}")

    def unknown_column(self, rows: DataFrame, _: Window) -> DataFrame:
        return rows.select("carier")

    def broken_function(self, rows: DataFrame, _: Window) -> DataFrame:
        return rows.select(udf(one_over_zero, "double")("delay").alias("x"))

    def functions(self, rows: DataFrame, _: Window) -> DataFrame:
        return rows.where(LATE).select("delay", twice("delay").alias("twice"), half("delay").alias("half"))

    def numbers(self, rows: DataFrame, _: Window) -> DataFrame:
        return rows.sparkSession.range(0, 300, 1, 3)

    def leaves(self, _: DataFrame, __: Window) -> None:
        sys.exit(3)

    def endless(self, rows: DataFrame, _: Window) -> DataFrame:
        return rows.sparkSession.range(10**15).selectExpr("sum(id % 7) AS s")

    def sleeping(self, _: DataFrame, __: Window) -> None:
        time.sleep(3600)

    def stopping(self, rows: DataFrame, _: Window) -> DataFrame:
        rows.sparkSession.stop()
        return rows
