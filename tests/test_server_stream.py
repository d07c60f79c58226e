"""A whole server that was told its stream's name: it asks Kinesis which shards there are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.serving import KEEP_EVERYTHING, connect, quick, serving, until
from support.store import SqliteStore

from mldserver.output.layout import LEDGER
from mldserver.testing import FakeStream
from mldserver.testing.fake_kinesis import FakeKinesis


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "keeps_everything.py").write_text(KEEP_EVERYTHING)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "keeps_everything"


def settings(tmp_path: Path, handler: str) -> Any:
    return quick(tmp_path / "out", handler, stream="flights", list_seconds=3600.0)


def missing(server: Any) -> tuple[str, ...]:
    return tuple(shard.id for shard in server.document().shards if shard.state == "missing")


def initialize(shard_id: str) -> bytes:
    told = '{"action":"initialize","shardId":"%s","sequenceNumber":"TRIM_HORIZON","subSequenceNumber":0}\n'
    return (told % shard_id).encode()


async def test_shards_that_the_stream_lists_are_missing_until_a_daemon_connects(
    tmp_path: Path, handler: str
) -> None:
    kinesis = FakeKinesis(FakeStream(4))
    async with serving(settings(tmp_path, handler), kinesis=kinesis.make) as server, asyncio.timeout(800):
        await until(lambda: missing(server) == kinesis.stream.open_shards)
        assert kinesis.clients == 1
    assert kinesis.clients == 0


async def test_a_child_that_connects_before_the_next_listing_is_asked_for_and_comes_behind_its_parent(
    tmp_path: Path, handler: str
) -> None:
    stream = FakeStream(1)
    kinesis = FakeKinesis(stream)
    async with serving(settings(tmp_path, handler), kinesis=kinesis.make) as server, asyncio.timeout(800):
        await until(lambda: len(missing(server)) == 1)
        [parent] = stream.open_shards
        child, _ = stream.split(parent)
        reader, writer = await connect(await server.listening())
        writer.write(initialize(child))
        await reader.readline()
        writer.close()
        assert kinesis.listings == 2
    ledger = SqliteStore(tmp_path / "out" / LEDGER, pipeline=handler, server_id="tool")
    shards = ledger.peek().shards
    ledger.close()
    assert shards[child].parents == (parent,)
    assert shards[parent].ended, "as its child shows"
