"""With a handler that keeps state, a shard is opened with the store for its range of keys, or with its family's."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from coordinator.pipeline import Pipeline, named

from mldserver.consumer.intake import ShardListing
from mldserver.errors import PeerError
from mldserver.stores import ALL_KEYS, KeyRange, StoreClaim

pytestmark = pytest.mark.quick

LEFT, RIGHT = KeyRange(0, (1 << 127) - 1), KeyRange(1 << 127, (1 << 128) - 1)
LISTING = {
    "parent": ShardListing((), ALL_KEYS),
    "left": ShardListing(("parent",), LEFT),
    "right": ShardListing(("parent",), RIGHT),
}


@dataclass
class Stream:
    """Kinesis, which lists nothing before a time."""

    from_ms: int = 0
    asked: int = 0
    pipeline: Pipeline = field(init=False)

    def pipe(self, out: Path) -> Pipeline:
        self.pipeline = Pipeline(out, ask_stream=self.ask, keyed=True)
        return self.pipeline

    async def ask(self) -> bool:
        self.asked += 1
        if self.pipeline.clock.steady_ms() < self.from_ms:
            return False
        self.pipeline.coordinator.shards.add_listing(LISTING)
        return True


async def stores(pipeline: Pipeline) -> dict[str, tuple[KeyRange, bool]]:
    state = await pipeline.ledger.peek()
    return {name: (store.key_range, store.closed) for name, store in state.stores.items()}


async def test_each_shard_has_a_store_for_its_range_which_its_children_take_over(tmp_path: Path) -> None:
    pipeline = Stream().pipe(tmp_path)
    async with pipeline.life():
        parent = await pipeline.open("parent")
        assert await stores(pipeline) == {"parent": (ALL_KEYS, False)}
        ending = asyncio.ensure_future(parent.end())
        await pipeline.cycle()
        assert await ending
        await pipeline.open("left")
        assert await stores(pipeline) == {"parent": (ALL_KEYS, True), "left": (LEFT, False)}


async def test_the_opening_waits_until_the_stream_says_which_keys_the_shard_has(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    stream = Stream()
    pipeline = stream.pipe(tmp_path)
    stream.from_ms = pipeline.clock.steady_ms() + 10_000
    async with pipeline.life():
        opening = asyncio.ensure_future(pipeline.open("parent"))
        await pipeline.clock.advance(9)
        assert not opening.done()
        assert (await pipeline.ledger.peek()).shards == {}, "no epoch is raised meanwhile"
        await pipeline.clock.advance(10)
        assert (await opening).alive
    waits = [entry["delay_seconds"] for entry in named(logged, "shard.range_unknown")]
    assert waits == [1, 2, 4, 8]
    assert {entry["shard"] for entry in named(logged, "shard.range_unknown")} == {"parent"}


async def test_a_range_that_the_ledger_knows_is_not_asked_for_after_a_restart(tmp_path: Path) -> None:
    stream = Stream()
    pipeline = stream.pipe(tmp_path)
    async with pipeline.life():
        await pipeline.open("left")
    stream.asked, stream.from_ms = 0, 1 << 60
    async with pipeline.life():
        await pipeline.open("left")
        assert await stores(pipeline) == {"left": (LEFT, False)}
    assert stream.asked == 0


async def test_a_shard_of_another_stream_with_the_same_name_is_refused(tmp_path: Path) -> None:
    pipeline = Stream().pipe(tmp_path)
    async with pipeline.life() as coordinator:
        await pipeline.open("left")
        await pipeline.cycle()
        coordinator.shards.add_listing(LISTING | {"left": ShardListing((), ALL_KEYS)})
        with pytest.raises(PeerError, match="another range of keys"):
            await pipeline.open("left")


async def test_a_daemon_that_reads_a_dynamodb_stream_is_refused_with_the_way_out(tmp_path: Path) -> None:
    pipeline = Stream().pipe(tmp_path)
    async with pipeline.life():
        pipeline.coordinator.shards.add_listing({"shardId-00000001414576573621-f55eea83": ShardListing()})
        with pytest.raises(PeerError, match=r"DynamoDB stream.* keeps state.*--source dynamodb:TABLE"):
            await pipeline.open("shardId-00000001414576573621-f55eea83")


async def test_a_family_shares_the_store_of_its_root(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, keyed=True)
    async with pipeline.life() as coordinator:
        root = await pipeline.open("root", store=StoreClaim(None))
        ending = asyncio.ensure_future(root.end())
        await pipeline.cycle()
        assert await ending
        await pipeline.open("child", parents=("root",), store=StoreClaim(None))
        assert await stores(pipeline) == {"root": (ALL_KEYS, False)}
        await pipeline.cycle()
        shards = coordinator.shards.ledger_snapshot().shards
        assert {name: shard.store for name, shard in shards.items()} == {"root": "root", "child": "root"}


@pytest.mark.parametrize("keyed", [True, False])
async def test_a_source_without_a_stream_to_list_has_a_store_for_all_keys_if_the_handler_keeps_state(
    tmp_path: Path, keyed: bool
) -> None:
    pipeline = Pipeline(tmp_path, keyed=keyed)
    async with pipeline.life():
        await pipeline.open("shard")
        assert await stores(pipeline) == ({"shard": (ALL_KEYS, False)} if keyed else {})
