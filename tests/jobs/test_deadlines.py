"""What a job may take: as the setting says, or by what it has to do."""

from __future__ import annotations

import pytest

from mldserver.engine_jobs import PublishJob, WindowJob
from mldserver.jobs.engine import allowed_seconds, deadline_seconds
from mldserver.windows import Window

pytestmark = pytest.mark.quick

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
    assert deadline_seconds("by_size", (job, of_bytes(0), job)) == seconds


def test_several_windows_have_the_time_of_the_largest_and_none_is_for_ever() -> None:
    assert deadline_seconds(5.0, (of_bytes(2**30),)) == 5.0
    assert deadline_seconds(5.0, (of_bytes(1), of_rows(9))) == 5.0
    assert deadline_seconds(None, (of_bytes(1),)) is None


def test_a_person_should_look_after_the_deadline_or_after_the_one_by_size() -> None:
    assert (allowed_seconds(5.0, 2**30), allowed_seconds(None, 0), allowed_seconds("by_size", 6 * 2**20)) == (
        5.0,
        15 * MINUTES,
        16 * MINUTES,
    )
