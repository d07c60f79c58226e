"""A sink in a package that is no part of ours, as pip leaves one: it writes down which carriers a window has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from mldserver.engine_jobs import PublishJob
from mldserver.sinks.sink import Owner, SinkSpec, must_note, owner_of, staged

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def parse(target: str) -> str:
    if not target.startswith("/"):
        raise ValueError("after toy: comes an absolute path")
    return target


def check_settings(sink: SinkSpec) -> None:
    if sink.options.keys() - {"indent"}:
        raise ValueError("of sink_options it takes indent only")


def check(spark: SparkSession, sink: SinkSpec) -> None:
    Path(sink.target).mkdir(exist_ok=True)


def own(spark: SparkSession, sink: SinkSpec, owner: Owner, *, new_ledger: bool = False) -> None:
    file = Path(sink.target, "_owner.json")
    found = Owner(**json.loads(file.read_text())) if file.exists() else None
    if must_note(found, owner, sink.target, new_ledger=new_ledger):
        file.write_text(json.dumps({"pipeline": owner.pipeline, "ledger": owner.ledger}))


def publish(spark: SparkSession, sink: SinkSpec, job: PublishJob) -> None:
    own(spark, sink, owner_of(job))
    carriers = sorted(row["carrier"] for row in staged(spark, job).collect())
    file = Path(sink.target, f"{job.window.id}.json")
    file.write_text(json.dumps(carriers, indent=int(sink.options["indent"])))
