"""Batches, redrives, connections that come and go, and shards that split, at random: each record counts once, in rows and in state."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from coordinator.keyed_house import HIGH_KEY, LOW_KEY, Counting, House
from support.lanes import seeds

from mldserver.records import Record
from mldserver.runtime.interface import Records
from mldserver.windows import TimeWindows

KEYS = [LOW_KEY, HIGH_KEY, "m", "n"]


class Table:
    """A table's stream, its source, and an operator with little patience."""

    def __init__(self, house: House, seed: int) -> None:
        self.house, self.chance = house, random.Random(seed)
        self.home = dict.fromkeys(KEYS, "root")
        self.parents: dict[str, tuple[str, ...]] = {"root": ()}
        self.stream: dict[str, list[Record]] = defaultdict(list)
        self.given: dict[str, int] = {}
        """Of open shards, how many records this connection has delivered."""
        self.numbers = 0
        self.purged: Counter[str] = Counter()
        self.rounds: list[asyncio.Task[Any]] = []

    async def connect(self, shard_id: str) -> None:
        """Open a shard, perhaps on a second connection, and go on from what is durable."""
        old = self.house.consumers.get(shard_id)
        opening = self.house.open(shard_id, *self.parents[shard_id])
        consumer = await self.house.pipeline.clock.drive(opening)
        if old is not None:
            await old.forget()
        after = consumer.intake.after
        records = self.stream[shard_id]
        self.given[shard_id] = sum(after is not None and record.sequence <= after for record in records)

    def write(self) -> None:
        key = self.chance.choice(KEYS)
        self.numbers += 1
        data = b"bad" if self.chance.random() < 0.2 else b""
        record = Record(
            shard_id=self.home[key],
            sequence_number=str(self.numbers),
            data=data,
            partition_key=key,
            arrival_ms=1_000_000 + self.numbers,
        )
        self.stream[self.home[key]].append(record)

    async def deliver(self, shard_id: str, most: int) -> None:
        if not self.house.consumers[shard_id].alive:
            # A flush was refused because another shard of the store had a new connection: all of them let go.
            await self.connect(shard_id)
        some = self.stream[shard_id][self.given[shard_id] :][:most]
        if some:
            self.given[shard_id] += len(some)
            consumer = self.house.consumers[shard_id]
            consumer.deliver(Records(some, 0), 10)
            await self.house.pipeline.clock.drive(consumer.acknowledged())

    async def deliver_all(self, shard_id: str) -> None:
        await self.deliver(shard_id, 9)
        while self.given[shard_id] < len(self.stream[shard_id]):
            await self.deliver(shard_id, 9)

    async def split(self, shard_id: str) -> None:
        consumer = None
        while consumer is None or not await self.house.pipeline.clock.drive(consumer.end()):
            await self.deliver_all(shard_id)
            consumer = self.house.consumers[shard_id]
        await self.house.consumers.pop(shard_id).forget()
        del self.given[shard_id]
        children = [f"{shard_id}{letter}" for letter in "01"]
        for key in KEYS:
            if self.home[key] == shard_id:
                self.home[key] = self.chance.choice(children)
        self.parents |= dict.fromkeys(children, (shard_id,))
        for child in children:
            await self.connect(child)
            if self.chance.random() < 0.5:
                await self.settle(self.chance.randrange(20))

    async def settle(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    async def want(self) -> None:
        letters = await self.house.pipeline.ledger.letters(limit=1000)
        await self.house.pipeline.ledger.redrive(tuple(each.id for each in letters), wanted=True)

    async def step(self) -> None:
        house, chance = self.house, self.chance
        shard_id = chance.choice(list(self.given))
        match chance.choice("wwwwddddrrevcotp"):
            case "w":
                self.write()
            case "d":
                await self.deliver(shard_id, chance.randrange(1, 5))
            case "r":
                await self.want()
                if all(each.done() for each in self.rounds):
                    self.rounds.append(asyncio.ensure_future(house.redriver.round()))
                await self.settle(chance.randrange(12))
            case "e":
                house.consumers[shard_id]._claim.evict()
            case "v":
                await house.pipeline.clock.advance(chance.choice((0.1, 1, 3)))
            case "c":
                await self.connect(shard_id)
            case "o":
                Counting.healed = not Counting.healed
            case "t" if len(self.given) < 6:
                await self.split(shard_id)
            case "p" if chance.random() < 0.2:
                for letter in await house.pipeline.ledger.letters(limit=1):
                    if await house.pipeline.ledger.purge((letter.id,)):
                        self.purged[letter.letter.partition_key or ""] += 1

    async def finish(self) -> None:
        house = self.house
        for each in self.rounds:
            await each
        Counting.healed = True
        left = 1
        while left or not all(consumer.alive for consumer in house.consumers.values()):
            for shard_id in self.given:
                await self.deliver_all(shard_id)
            await house.pipeline.cycle()
            await self.want()
            left = await house.redrive()
            await house.pipeline.cycle()

    def expected(self) -> dict[str, int]:
        put = Counter(record.partition_key for records in self.stream.values() for record in records)
        return {key: count for key in KEYS if (count := put[key] - self.purged[key])}


@pytest.mark.parametrize("seed", seeds(10))
async def test_each_record_of_a_family_counts_once(tmp_path: Path, seed: int) -> None:
    house = House(tmp_path, family=True)
    house.pipeline.spec = TimeWindows(86_400_000)
    async with house.life():
        table = Table(house, seed)
        await table.connect("root")
        for _ in range(120):
            await table.step()
        await table.finish()
        shard_id = next(iter(table.given))
        assert await house.counts(shard_id) == table.expected()
    rows = Counter((row["key"], row["n"]) for row in house.pipeline.rows("_mldserver/segments/*"))
    assert rows == Counter(
        (key, number) for key, count in table.expected().items() for number in range(1, count + 1)
    )
