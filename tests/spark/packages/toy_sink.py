"""A sink in a package that is no part of ours, as pip leaves one: it writes down which carriers a window has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from mldserver.spark.sinks.sink import staged

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from mldserver.jobs.engine import PublishJob
    from mldserver.spark.sinks.sink import SinkSpec


def parse(target: str) -> str:
    if not target.startswith("/"):
        raise ValueError("after toy: comes an absolute path")
    return target


def check_settings(sink: SinkSpec) -> None:
    if sink.options.keys() - {"indent"}:
        raise ValueError("of sink_options it takes indent only")


def check(spark: SparkSession, sink: SinkSpec) -> None:
    Path(sink.target).mkdir(exist_ok=True)


def publish(spark: SparkSession, sink: SinkSpec, job: PublishJob) -> None:
    carriers = sorted(row["carrier"] for row in staged(spark, job).collect())
    file = Path(sink.target, f"{job.window.id}.json")
    file.write_text(json.dumps(carriers, indent=int(sink.options["indent"])))
