"""How long a listing asks AWS: ``within`` bounds both the listing and the questions about shards that it left out."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from mldserver.dynamodb_streams.shard_tree import StreamShard
from mldserver.dynamodb_streams.stream_listing import StreamListing
from mldserver.dynamodb_streams.streams_api import StreamsApi
from mldserver.errors import NotThereYet
from mldserver.testing import FakeStreams, VirtualClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.quick

FOR_EVER = 1_000_000


class Scene:
    """The listing of a stream in virtual time."""

    def __init__(self, clock: VirtualClock, fake: FakeStreams, api: StreamsApi) -> None:
        self.clock = clock
        self.fake = fake
        self.listing = StreamListing(api, fake.arn, clock=clock)

    async def outcome(self, within: float | None, *, seconds: float) -> asyncio.Task[tuple[str, ...]]:
        """Refresh for so many seconds; return the task, which may still be asking."""
        task = asyncio.ensure_future(self.listing.refresh(within=within))
        await self.clock.advance(seconds)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        return task


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    clock = VirtualClock()
    fake = FakeStreams(clock=clock)
    async with StreamsApi(fake.client, clock=clock, random=lambda: 0.5) as api:
        yield Scene(clock, fake, api)


async def test_a_listing_gives_up_after_its_limit_when_aws_does_not_answer(scene: Scene) -> None:
    scene.fake.fail("DescribeStream", "disconnect", times=FOR_EVER)
    task = await scene.outcome(30, seconds=31)
    assert not task.cancelled(), "it was still asking after 31 seconds"
    assert isinstance(task.exception(), NotThereYet)


async def test_a_listing_without_a_limit_asks_until_aws_answers(scene: Scene) -> None:
    scene.fake.fail("DescribeStream", "disconnect", times=FOR_EVER)
    assert (await scene.outcome(None, seconds=3600)).cancelled()
    scene.fake.fail_no_more()
    assert (await scene.outcome(None, seconds=30)).result() == tuple(scene.fake.shards)


async def test_a_parent_that_aws_does_not_answer_for_holds_a_listing_until_its_limit_and_is_not_gone(
    scene: Scene,
) -> None:
    (parent,) = scene.fake.open_shards
    (child,) = scene.fake.split(parent, children=1)
    scene.fake.add_root()  # which is not read until the lineage is known
    scene.fake.shards[parent].visible_ms = FOR_EVER * 1000
    scene.listing.tree.begin([StreamShard(child, parent)])  # as a shard that the ledger knows
    assert (await scene.outcome(30, seconds=1)).done()
    assert scene.listing.tree.unresolved() == (parent,)
    await scene.clock.advance(10)
    scene.fake.fail("GetShardIterator", "disconnect", times=FOR_EVER)
    task = await scene.outcome(30, seconds=31)
    assert not task.cancelled(), "it was still asking for the parent after 31 seconds"
    assert task.exception() is None
    assert scene.listing.tree.unresolved() == (parent,)
