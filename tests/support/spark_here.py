"""A Spark session in the test's own process, and its end: pyspark holds on to a gateway whose JVM is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["end"]


def end(session: SparkSession) -> None:
    """Stop the session, wait for its JVM's end, and let the next test of this process have a session of its own."""
    from pyspark import SparkContext

    gateway = session.sparkContext._gateway
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(30)
    SparkContext._gateway = SparkContext._jvm = None
