"""The engine that a server's settings make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mldserver import assembly
from mldserver.config.resolve import resolve
from mldserver.handler.inspection import load_spec
from mldserver.spark.client import SparkEngine


@pytest.mark.parametrize(
    ("place", "storage"),
    [
        (
            {"out": "s3://lake/departures?region=eu-central-1", "ledger": "sqlite:{folder}/ledger.sqlite"},
            {
                "fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem",
                "fs.s3a.bucket.lake.endpoint.region": "eu-central-1",
            },
        ),
        ({"out": "gs://lake/departures", "ledger": "dynamodb://positions"}, {}),
        ({"out": "{folder}/out"}, {}),
        ({"out": "{folder}/out", "spark_master": "sc://nowhere"}, {}),
    ],
    ids=["on S3", "on Google's store", "on a disk", "on Spark Connect"],
)
def test_windows_share_a_job_wherever_they_lie_and_spark_is_told_how_s3_is_reached(
    tmp_path: Path, place: dict[str, str], storage: dict[str, str]
) -> None:
    told = {name: value.format(folder=tmp_path) for name, value in place.items()}
    engine = engine_of(tmp_path, **told)
    assert (engine.group_limit, engine.setup.storage) == (16, storage)


def engine_of(folder: Path, **given: Any) -> SparkEngine:
    settings = resolve({"handler": "handlers.departures", **given}, environ={}, folder=folder)
    engine = assembly.spark_of(settings, load_spec(settings.handler))
    assert isinstance(engine, SparkEngine)
    return engine


def test_the_application_is_called_after_the_pipeline(tmp_path: Path) -> None:
    assert engine_of(tmp_path).driver.setup.app_name == "mldserver: departures"
    assert engine_of(tmp_path, pipeline="nightly").driver.setup.app_name == "mldserver: nightly"
