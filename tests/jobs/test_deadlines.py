"""What a job may take: as the setting says, or by what it has to do."""

from __future__ import annotations

import pytest

from mldserver.jobs.engine import PublishJob, WindowJob, deadline_seconds
from mldserver.windows import Window

WINDOW = Window("w", None, None)
MINUTES = 60


def of_bytes(size: int) -> WindowJob:
    return WindowJob(WINDOW, 1, ("/segment",), "/staging", 1, size)


def of_rows(rows: int) -> PublishJob:
    return PublishJob(WINDOW, "/staging", ("a.parquet",), rows)


@pytest.mark.parametrize(
    ("job", "seconds"),
    [
        (of_bytes(0), 15 * MINUTES),
        (of_bytes(6 * 2**20), 16 * MINUTES),
        (of_bytes(2**30), 15 * MINUTES + 10_240),
        (of_rows(0), 15 * MINUTES),
        (of_rows(10_000_000), 15 * MINUTES + 50_000),
    ],
)
def test_by_size_a_job_has_a_floor_of_minutes_and_grows(job: WindowJob | PublishJob, seconds: float) -> None:
    assert deadline_seconds("by_size", (job,)) == seconds
    assert deadline_seconds("by_size", (job, job)) == 2 * seconds


def test_what_is_given_is_given_to_each_job_and_none_is_for_ever() -> None:
    assert deadline_seconds(5.0, (of_bytes(2**30),)) == 5.0
    assert deadline_seconds(5.0, (of_bytes(1), of_rows(9))) == 10.0
    assert deadline_seconds(None, (of_bytes(1),)) is None
