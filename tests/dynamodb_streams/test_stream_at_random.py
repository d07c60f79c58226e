"""Random streams, read in virtual time through random faults and from random tokens, against what was written."""

from __future__ import annotations

import asyncio
import json
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from mldserver.dynamodb_streams import Change, Stream
from mldserver.testing import FakeStreams, VirtualClock


class World:
    """A table that is written at random, and whoever reads its stream, stopping at random and going on from a token."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.clock = VirtualClock()
        self.fake = FakeStreams(shards=self.random.randint(1, 3), clock=self.clock, seed=seed)
        self.fake.page_records = self.random.choice([1, 2, 5, 1000])
        self.fake.page_shards = self.random.choice([1, 2, 100])
        self.fake.trouble = self.random.choice([0.0, 0.05, 0.15])
        self.fake.ahead_ms = self.random.choice([-3_600_000, 0, 3_600_000])
        for quirk in ("shuffled", "null_iterator", "empty_last_page"):
            setattr(self.fake, quirk, self.random.random() < 0.5)
        self.new_roots = 0.3
        """How often a shard turns up that nothing led to: what it holds is found when the shards are listed."""
        self.written = 0
        self.read: list[Change] = []
        self.tokens: list[tuple[str, int]] = []
        """Taken at any instant, and how many changes were handed over before."""

    def stream(self, position: str) -> Stream:
        return Stream(
            self.fake.arn,
            position,
            make_client=self.fake.client,
            clock=self.clock,
            random=self.random.random,
            poll_seconds=self.random.choice([0.5, 1.0, 5.0]),
        )

    async def write(self, steps: int) -> None:
        for _ in range(steps):
            shard = self.random.choice(self.fake.open_shards)
            match self.random.choices(["put", "split", "root", "wait"], [10, 1, self.new_roots, 4])[0]:
                case "put":
                    self.fake.put({"id": self.written}, shard_id=shard)
                    self.written += 1
                case "split":
                    # A shard is not listed before its parent.
                    hidden = (self.fake.shards[shard].visible_ms - self.clock.steady_ms()) / 1000
                    late = max(hidden, self.random.choice([0.0, 0.0, 0.5, 4.0]))
                    self.fake.split(shard, children=self.random.randint(1, 2), visible_after=late)
                case "root":
                    self.fake.add_root()
                case _:
                    await self.clock.sleep(self.random.choice([0.0, 0.3, 1.0, 3.0]))

    def hide_an_ancestor(self, token: str) -> None:
        """Let listings leave out a shard that was read before a token, for a while."""
        shards = self.fake.shards
        parent = self.random.choice(json.loads(token)["shards"])["parent"]
        ancestors = []
        while parent is not None:
            ancestors.append(shards[parent])
            parent = shards[parent].parent
        if ancestors:
            hidden = self.random.choice(ancestors)
            hidden.visible_ms = self.clock.steady_ms() + self.random.choice([500, 3000, 40_000])

    async def follow(self) -> None:
        """Read on to the end, now and then from a token in another stream, as after a crash."""
        position = "trim_horizon"
        while True:
            async with self.stream(position) as stream:
                for _ in range(self.random.randint(1, 30)):
                    if self.random.random() < 0.2:
                        await self.clock.sleep(self.random.choice([0.0, 0.5, 3.0]))
                    if self.random.random() < 0.2:
                        self.tokens.append((stream.token, len(self.read)))
                    if self.random.random() < 0.1:
                        await stream.move_to(stream.token)
                    change = await anext(stream, None)
                    if change is None:
                        return
                    self.read.append(change)
                if self.random.random() < 0.5:
                    await self.clock.sleep(self.random.choice([0.0, 0.1, 2.0]))
                position = stream.token
            if self.random.random() < 0.3:
                self.hide_an_ancestor(position)

    async def story(self, steps: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(self.follow())
            await self.write(steps)
            self.fake.disable()
            await following
        for token, count in self.random.sample(self.tokens, min(2, len(self.tokens))):
            self.hide_an_ancestor(token)
            async with self.stream(token) as stream:
                rest = [_place(change) async for change in stream]
            assert sorted(rest) == sorted(map(_place, self.read[count:])), "not what a token had left"

    def check(self) -> None:
        read = list(map(_place, self.read))
        shards = self.fake.shards
        written = {
            name: [(name, int(record["dynamodb"]["SequenceNumber"])) for record in shard.records]
            for name, shard in shards.items()
        }
        assert len(read) == len(set(read)), "handed over twice"
        assert set(read) == {record for records in written.values() for record in records}, "lost"
        place = {record: index for index, record in enumerate(read)}
        for name, records in written.items():
            places = [place[record] for record in records]
            assert places == sorted(places), "order inside a shard"
            ancestor = shards[name].parent
            while ancestor is not None:
                before = [place[record] for record in written[ancestor]]
                assert not places or not before or max(before) < places[0], "a child before its parent"
                ancestor = shards[ancestor].parent


def _place(change: Change) -> tuple[str, int]:
    return change.shard_id, change.sequence_number


@settings(max_examples=settings().max_examples // 6)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 80))
def test_nothing_is_lost_or_doubled_and_lines_keep_their_order(seed: int, steps: int) -> None:
    world = World(seed)
    asyncio.run(world.clock.drive(world.story(steps), step=0.25))
    world.check()


@settings(max_examples=settings().max_examples // 6)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 80))
def test_what_is_read_without_a_break_is_in_the_order_of_its_times(seed: int, steps: int) -> None:
    world = World(seed)
    world.fake.trouble, world.new_roots = 0.0, 0.0  # a root that a short answer leaves out comes late

    async def story() -> None:
        async with world.stream("trim_horizon") as stream, asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(world.write(steps))
            writing.add_done_callback(lambda _: world.fake.disable())
            world.read = [change async for change in stream]

    asyncio.run(world.clock.drive(story(), step=0.25))
    world.check()
    times = [change.arrival_ms or 0 for change in world.read]
    assert times == sorted(times)
