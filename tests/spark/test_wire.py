from __future__ import annotations

import itertools
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.coordinator.windows import Window
from mldserver.spark import wire
from mldserver.spark.engine import PublishJob, WindowJob
from mldserver.spark.sinks.base import SinkSpec

HOUR = Window(
    "2013-01-01T10-00-00Z", datetime(2013, 1, 1, 10, tzinfo=UTC), datetime(2013, 1, 1, 11, tzinfo=UTC)
)
BATCH = Window("batch-000000000007", None, None, revision=2, pipeline="departures")
MESSAGES = [
    wire.Start("handlers.x", "a INT", "local[*]", "/scratch", {"spark.x": "ü"}, ("/here", "/there"), ui=True),
    wire.Start("x", "", "local", "/s", sink=SinkSpec("jdbc", "jdbc:derby:x", "t", {"user": "me"})),
    wire.Run(1, WindowJob(HOUR, 3, ("/a.parquet", "/b.parquet"), "/staging/3", 10, 2048)),
    wire.Run(
        1, WindowJob(HOUR, 3, ("/a.parquet", "/b.parquet"), "/s", 1, 9, older={"`a` INT": ("/a.parquet",)})
    ),
    wire.Run(2, WindowJob(BATCH, 1, (), "s3://bucket/staging", 0, 0, "s3://bucket?region=r")),
    wire.Publish(3, PublishJob(BATCH, "s3://bucket/staging", ("part-0.parquet",), 7, "s3://bucket?region=r")),
    wire.Publish(4, PublishJob(HOUR, "/staging/4", (), 0)),
    wire.RunGroup(4, (WindowJob(HOUR, 3, ("/a.parquet",), "/s", 1, 1), WindowJob(BATCH, 1, (), "/t", 0, 0))),
    wire.DoneGroup(4, (wire.Output(("part-0.parquet",), 7), wire.Output((), 0))),
    wire.Cancel(1),
    wire.Stop(),
    wire.Started("4.3.0", None),
    wire.Warm(),
    wire.StartFailed("handler", "HandlerInvalid", "x.py:1: bad"),
    wire.Progress(1, 2, 8, 3),
    wire.Done(1, ("part-0.parquet",), 7),
    wire.FailedJob(1, "ValueError", "no", "Traceback", cancelled=True),
    wire.Log("warning", "a line"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_out_as_it_went_in(message: wire.Message) -> None:
    assert wire.Decoder().feed(wire.encode(message)) == [message]


@given(st.lists(st.integers(0, 400), max_size=12))
def test_any_chunking_gives_the_same_messages(cuts: list[int]) -> None:
    stream = b"".join(map(wire.encode, MESSAGES))
    borders = sorted({0, len(stream), *(cut * 7 % len(stream) for cut in cuts)})
    decoder = wire.Decoder()
    got = [m for a, b in itertools.pairwise(borders) for m in decoder.feed(stream[a:b])]
    assert got == MESSAGES
    assert decoder.pending == 0


def test_an_incomplete_message_waits_for_its_rest() -> None:
    data = wire.encode(wire.Warm())
    decoder = wire.Decoder()
    assert decoder.feed(data[:2]) == []
    assert decoder.feed(data[2:-1]) == []
    assert decoder.pending == len(data) - 1
    assert decoder.feed(data[-1:]) == [wire.Warm()]


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
    with pytest.raises(wire.WireError, match="not a message"):
        wire.Decoder().feed(len(payload).to_bytes(4, "big") + payload)


def test_a_length_beyond_the_limit_is_an_error_before_the_bytes_are_there() -> None:
    with pytest.raises(wire.WireError, match="longer than"):
        wire.Decoder().feed(b"GET / HTTP/1.1")


def test_a_message_beyond_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LIMIT", 10)
    with pytest.raises(wire.WireError, match="longer than"):
        wire.encode(wire.Log("info", "a long line"))
