"""``mldserver streams describe`` against the fake of DynamoDB Streams over HTTP, with and without a ledger."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.store import SqliteStore

from mldserver import cli
from mldserver.ledger.contract import Flush, PositionUpdate
from mldserver.output.layout import LEDGER
from mldserver.records import Sequence
from mldserver.testing.fake_streams import FakeStreams


@pytest.fixture
def streams() -> FakeStreams:
    """A table whose only shard was split; the last change is an hour old."""
    streams = FakeStreams("orders")
    hour_ago = streams.clock.now_ms() - 3_600_000
    for number in range(3):
        streams.put({"id": f"order-{number}"}, at_ms=hour_ago)
    (root,) = streams.open_shards
    left, right = streams.split(root)
    streams.put({"id": "a"}, shard_id=left, at_ms=hour_ago)
    streams.put({"id": "b"}, shard_id=left, at_ms=hour_ago)
    streams.put({"id": "c"}, shard_id=right, at_ms=hour_ago)
    return streams


@pytest.fixture
def describe(
    streams: FakeStreams, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Serve the fake from a thread, and return what runs the command."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    ready: list[str] = []
    begun, over = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with streams.serving() as url:
            ready.append(url)
            begun.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    begun.wait()

    def run(*arguments: str, code: int = 0) -> str:
        options = ("--endpoint-url", ready[0], "--region", "us-east-1")
        assert cli.run(["streams", "describe", *arguments, *options]) == code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return captured.err if code else captured.out

    yield run
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


def numbers(streams: FakeStreams, shard_id: str) -> list[int]:
    return [int(record["dynamodb"]["SequenceNumber"]) for record in streams.shards[shard_id].records]


def test_the_shards_of_a_stream_are_shown_parents_first(
    streams: FakeStreams, describe: Callable[..., str]
) -> None:
    lines = [line.split() for line in describe("orders").splitlines()]
    root, left, right = streams.shards
    assert ["stream", streams.arn] in lines
    assert ["view", "type", "NEW_AND_OLD_IMAGES"] in lines
    assert ["states", "closed", "1,", "open", "2"] in lines
    shards = [line for line in lines if line and line[0].startswith("shardId")]
    assert [line[:3] for line in shards] == [
        [root, "-", "closed"],
        [left, root, "open"],
        [right, root, "open"],
    ]
    assert shards[0][3:] == [str(streams.shards[root].first), str(streams.shards[root].number)]
    # Without a ledger nobody reads.
    assert {call.action for call in streams.calls} == {"ListStreams", "DescribeStream"}


def test_with_a_ledger_there_are_positions_and_the_age_of_the_oldest_change_that_is_not_durable(
    streams: FakeStreams, describe: Callable[..., str], tmp_path: Path
) -> None:
    root, left, right = streams.shards
    store = SqliteStore(tmp_path / "out" / LEDGER, pipeline="orders", server_id="one")
    store.open(now_ms=1000)
    for shard_id, parents in ((root, ()), (left, (root,)), ("shardId-gone", ())):
        store.open_shard(shard_id, parents)
    done = numbers(streams, left)[0]
    moves = (
        PositionUpdate(root, 1, Sequence(numbers(streams, root)[-1]), 5, 5, ended=True),
        PositionUpdate(left, 1, Sequence(done), 5, 5),
    )
    store.register(Flush(moves, (), clock=3), now_ms=1)
    streams.trim(right, through=numbers(streams, right)[0])
    document = json.loads(describe("orders", "--out", "out", "--json"))
    store.close()
    rows: dict[str, Any] = {row["shard"]: row for row in document["shards"]}
    assert document["newest_enabled"] == streams.arn
    assert [(rows[each]["state"], rows[each]["position"]) for each in (root, left, right)] == [
        ("ended", str(numbers(streams, root)[-1])),
        ("open", str(done)),
        ("open", None),
    ]
    assert 3_600_000 <= rows[left]["lag_ms"] == document["lag_ms"]
    assert (rows[right]["lag_ms"], rows[right]["note"]) == (0, "not begun")
    assert (rows[root]["lag_ms"], rows[root]["note"]) == (None, None)
    assert rows["shardId-gone"]["note"] == "not in the stream any more"
    assert rows[left]["parent"] == root


def test_notes_say_what_is_wrong_with_a_position(
    streams: FakeStreams, describe: Callable[..., str], tmp_path: Path
) -> None:
    root, left, right = streams.shards
    store = SqliteStore(tmp_path / "out" / LEDGER, pipeline="orders", server_id="one")
    store.open(now_ms=1000)
    positions = {root: Sequence(0, 1_000), left: Sequence(numbers(streams, left)[0])}
    for shard_id in (root, left, right):
        store.open_shard(shard_id)
    moves = tuple(PositionUpdate(shard_id, 1, place, 5, 5) for shard_id, place in positions.items())
    store.register(Flush(moves, (), clock=3), now_ms=1)
    store.close()
    streams.trim(left, through=numbers(streams, left)[1])
    streams.fail("GetShardIterator", "ResourceNotFoundException", shard_id=right)
    lines = describe("orders", "--out", "out").splitlines()
    of = {
        shard_id: next(line for line in lines if line.strip().startswith(shard_id))
        for shard_id in streams.shards
    }
    assert of[root].endswith("begins at 1970-01-01T00:00:01Z")
    assert of[left].endswith("the position was trimmed: changes are lost")
    assert of[right].endswith("not in the stream any more")


def test_a_stream_that_was_disabled_says_so_and_names_the_newest(
    streams: FakeStreams, describe: Callable[..., str]
) -> None:
    old = streams.arn
    streams.disable()
    assert "The table has no enabled stream." in describe(old)
    assert old in describe("orders", code=1)
    new = streams.enable()
    assert f"The table's stream is {new}." in describe(old)
    assert "note" not in describe("orders")


def test_a_table_without_a_stream_is_told(describe: Callable[..., str]) -> None:
    assert "The table other has no enabled stream." in describe("other", code=1)


def test_without_a_name_it_is_the_source_of_the_settings(
    streams: FakeStreams, describe: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "No stream was named" in describe(code=2)
    monkeypatch.setenv("MLDSERVER_SOURCE", "dynamodb://orders")
    assert streams.arn in describe()
