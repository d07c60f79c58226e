"""The engine that a server's settings make."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mldserver import assembly
from mldserver.config.resolve import resolve
from mldserver.handler.inspection import load_spec

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("place", "limit"),
    [
        ({"out": "s3://lake/departures?region=eu-central-1", "ledger": "sqlite:{folder}/ledger.sqlite"}, 1),
        ({"out": "gs://lake/departures", "ledger": "dynamodb://positions"}, 1),
        ({"out": "{folder}/out"}, 12),
        ({"out": "{folder}/out", "spark_master": "sc://nowhere"}, 1),
    ],
    ids=["on S3", "on Google's store", "on a disk", "on Spark Connect"],
)
def test_windows_share_a_job_where_their_files_can_be_renamed_and_run_singly_elsewhere(
    tmp_path: Path, place: dict[str, str], limit: int
) -> None:
    told = {name: value.format(folder=tmp_path) for name, value in place.items()}
    given = {"handler": "handlers.departures", "window_group": "12", **told}
    settings = resolve(given, environ={}, folder=tmp_path)
    engine = assembly.spark_of(settings, load_spec(settings.handler))
    assert (settings.window_group, engine.group_limit) == (12, limit)
