from __future__ import annotations

import itertools
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.jobs.engine import PublishJob, WindowJob
from mldserver.spark import driver_messages
from mldserver.spark.sinks.sink import SinkSpec
from mldserver.windows import Window

HOUR = Window(
    "2013-01-01T10-00-00Z", datetime(2013, 1, 1, 10, tzinfo=UTC), datetime(2013, 1, 1, 11, tzinfo=UTC)
)
BATCH = Window("batch-000000000007", None, None, revision=2, pipeline="departures")
MESSAGES = [
    driver_messages.Start(
        "handlers.x", "a INT", "local[*]", "/scratch", {"spark.x": "ü"}, ("/here", "/there"), ui=True
    ),
    driver_messages.Start("x", "", "local", "/s", sink=SinkSpec("jdbc", "derby:x", "t", {"user": "me"})),
    driver_messages.Run(1, WindowJob(HOUR, 3, ("/a.parquet", "/b.parquet"), "/staging/3", 10, 2048)),
    driver_messages.Run(
        1, WindowJob(HOUR, 3, ("/a.parquet", "/b.parquet"), "/s", 1, 9, older={"`a` INT": ("/a.parquet",)})
    ),
    driver_messages.Run(2, WindowJob(BATCH, 1, (), "s3://bucket/staging", 0, 0, "s3://bucket?region=r")),
    driver_messages.Publish(
        3, PublishJob(BATCH, "s3://bucket/staging", ("part-0.parquet",), 7, "s3://bucket?region=r")
    ),
    driver_messages.Publish(4, PublishJob(HOUR, "/staging/4", (), 0)),
    driver_messages.RunGroup(
        4, (WindowJob(HOUR, 3, ("/a.parquet",), "/s", 1, 1), WindowJob(BATCH, 1, (), "/t", 0, 0))
    ),
    driver_messages.DoneGroup(
        4, (driver_messages.Output(("part-0.parquet",), 7), driver_messages.Output((), 0))
    ),
    driver_messages.Cancel(1),
    driver_messages.Stop(),
    driver_messages.Started("4.3.0", None),
    driver_messages.Warm(),
    driver_messages.StartFailed("handler", "HandlerInvalid", "x.py:1: bad"),
    driver_messages.Progress(1, 2, 8, 3),
    driver_messages.Done(1, ("part-0.parquet",), 7),
    driver_messages.FailedJob(1, "ValueError", "no", "Traceback", cancelled=True),
    driver_messages.Log("warning", "a line"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_out_as_it_went_in(message: driver_messages.Message) -> None:
    assert driver_messages.Decoder().feed(driver_messages.encode(message)) == [message]


@given(st.lists(st.integers(0, 400), max_size=12))
def test_any_chunking_gives_the_same_messages(cuts: list[int]) -> None:
    stream = b"".join(map(driver_messages.encode, MESSAGES))
    borders = sorted({0, len(stream), *(cut * 7 % len(stream) for cut in cuts)})
    decoder = driver_messages.Decoder()
    got = [m for a, b in itertools.pairwise(borders) for m in decoder.feed(stream[a:b])]
    assert got == MESSAGES
    assert decoder.pending == 0


def test_an_incomplete_message_waits_for_its_rest() -> None:
    data = driver_messages.encode(driver_messages.Warm())
    decoder = driver_messages.Decoder()
    assert decoder.feed(data[:2]) == []
    assert decoder.feed(data[2:-1]) == []
    assert decoder.pending == len(data) - 1
    assert decoder.feed(data[-1:]) == [driver_messages.Warm()]


@pytest.mark.parametrize(
    "payload",
    [
        b"not json",
        b"[]",
        b"1",
        b"{}",
        b'{"type": "Nothing"}',
        b'{"type": "Cancel"}',
        b'{"type": "Cancel", "x": 1}',
    ],
)
def test_bytes_that_are_no_message_are_an_error(payload: bytes) -> None:
    with pytest.raises(driver_messages.WireError, match="not a message"):
        driver_messages.Decoder().feed(len(payload).to_bytes(4, "big") + payload)


def test_a_length_beyond_the_limit_is_an_error_before_the_bytes_are_there() -> None:
    with pytest.raises(driver_messages.WireError, match="longer than"):
        driver_messages.Decoder().feed(b"GET / HTTP/1.1")


def test_a_message_beyond_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_messages, "LIMIT", 10)
    with pytest.raises(driver_messages.WireError, match="longer than"):
        driver_messages.encode(driver_messages.Log("info", "a long line"))
