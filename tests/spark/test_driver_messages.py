from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from mldserver.children.channel import decode, encode
from mldserver.engine_jobs import PublishJob, WindowJob
from mldserver.sinks.sink import SinkSpec
from mldserver.spark import driver_messages
from mldserver.windows import Window

HOUR = Window(
    "2013-01-01T10-00-00Z", datetime(2013, 1, 1, 10, tzinfo=UTC), datetime(2013, 1, 1, 11, tzinfo=UTC)
)
BATCH = Window("batch-000000000007", None, None, revision=2, pipeline="departures")
MESSAGES = [
    driver_messages.StartSession("local[*]", "/scratch", {"spark.x": "ü"}, ("/here", "/there"), quick=True),
    driver_messages.LoadFunction(
        "x", "handlers.x", "a INT", sink=SinkSpec("jdbc", "derby:x", "t", {"user": "me"})
    ),
    driver_messages.RunWindows(
        1, (WindowJob(HOUR, 3, ("/a.parquet", "/b.parquet"), "/staging/3", 10, 2048),)
    ),
    driver_messages.RunWindows(
        1, (WindowJob(HOUR, 3, ("/a.parquet", "/b.parquet"), "/s", 1, 9, older={"`a` INT": ("/a.parquet",)}),)
    ),
    driver_messages.RunWindows(
        2, (WindowJob(BATCH, 1, (), "s3://bucket/staging", 0, 0, "s3://bucket?region=r"),)
    ),
    driver_messages.Publish(
        3, PublishJob(BATCH, "s3://bucket/staging", ("part-0.parquet",), 7, "s3://bucket?region=r")
    ),
    driver_messages.Publish(4, PublishJob(HOUR, "/staging/4", (), 0)),
    driver_messages.RunWindows(
        4, (WindowJob(HOUR, 3, ("/a.parquet",), "/s", 1, 1), WindowJob(BATCH, 1, (), "/t", 0, 0))
    ),
    driver_messages.JobDone(
        4, (driver_messages.Output(("part-0.parquet",), 7), driver_messages.Output((), 0))
    ),
    driver_messages.CancelJob(1),
    driver_messages.Stop(),
    driver_messages.Started("4.3.0", None),
    driver_messages.FunctionLoaded("x"),
    driver_messages.StartFailed("operator", "OperatorError", "no master"),
    driver_messages.LoadFailed("x", "handler", "HandlerInvalid", "x.py:1: bad"),
    driver_messages.JobDone(1, ()),
    driver_messages.FailedJob(1, "ValueError", "no", "Traceback", cancelled=True),
    driver_messages.Log("warning", "a line"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_out_as_it_went_in(message: driver_messages.Message) -> None:
    kinds = (
        driver_messages.FromServer
        if isinstance(message, driver_messages.FromServer)
        else driver_messages.FromDriver
    )
    assert decode(kinds, b"\x91" + encode(message)) == [message]


def test_an_error_with_half_a_character_comes_out_with_an_escape() -> None:
    failed = driver_messages.FailedJob(1, "ValueError", "half \ud83d")
    (seen,) = decode(driver_messages.FromDriver, b"\x91" + encode(failed))
    assert seen.message == "half \\ud83d"


def test_a_job_with_half_a_character_comes_out_whole_otherwise() -> None:
    job = WindowJob(HOUR, 3, ("/a\ud83d.parquet",), "/s", 1, 9)
    (seen,) = decode(driver_messages.FromServer, b"\x91" + encode(driver_messages.RunWindows(1, (job,))))
    assert seen.job == replace(job, segments=("/a\\ud83d.parquet",))
