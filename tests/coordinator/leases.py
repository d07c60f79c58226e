"""A stream whose leases move between servers at random, as a daemon with several hosts moves them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field

from coordinator.pipeline import Crash, Daemon, Faults, Pipeline

from mldserver.coordinator.shards import ShardSession
from mldserver.ledger.contract import WindowState
from mldserver.records import Sequence
from mldserver.testing import VirtualClock


@dataclass
class Leases(Daemon):
    """A KCL application of two workers, one at each server, whose leases move at random and without a word."""

    choose: random.Random = field(default_factory=random.Random)
    gentle: bool = False
    """Leases move only when everything is flushed, and the old connection is gone before the new one comes."""
    clock: VirtualClock = field(default_factory=VirtualClock)
    alive: list[Pipeline] = field(default_factory=list)
    tenures: dict[Pipeline, set[asyncio.Task[None]]] = field(default_factory=dict)
    deaths: int = 0
    calm: bool = False
    """No server dies any more."""

    async def live(self, server: Pipeline, name: str) -> None:
        """Let a server live, die at any call or at any time, and come back, under its old name or another."""
        while True:
            if self.choose.random() < 0.5:
                server.server_id = f"{name}{self.deaths}"
            if not self.calm:
                server.faults = Faults(at=self.choose.randint(5, 120), after=self.choose.random() < 0.5)
            with contextlib.suppress(Crash):
                await self.one_life(server)
            for tenure in self.tenures.pop(server, ()):
                tenure.cancel()
            self.deaths += 1
            server.faults = Faults()
            await self.clock.sleep(self.choose.choice([0.2, 3, 8]))

    async def one_life(self, server: Pipeline) -> None:
        crashed = False
        try:
            async with server.life():
                self.alive.append(server)
                try:
                    await self.clock.sleep(1e6 if self.calm else self.choose.uniform(2, 20))
                finally:
                    self.alive.remove(server)
        except* Crash:
            crashed = True
        if crashed:
            raise Crash

    async def see_out(self) -> None:
        """Read everything while servers die, then let them be until everything is published."""
        await self.consume_all()
        self.calm = True
        while not self.alive or self.deaths == 0 or not self.is_published():
            for server in self.alive:
                server.faults.at = None
            await self.clock.sleep(1)

    def is_published(self) -> bool:
        windows = self.alive[0].state().windows.values()
        return all(entry.state is WindowState.PUBLISHED and not entry.pending for entry in windows)

    async def consume_all(self) -> None:
        pending = list(self.records)
        async with asyncio.TaskGroup() as group:
            while pending:
                for shard in [s for s in pending if all(p in self.ended for p in self.parents.get(s, ()))]:
                    pending.remove(shard)
                    group.create_task(self.follow(group, shard))
                await self.clock.sleep(0.25)

    async def follow(self, group: asyncio.TaskGroup, shard: str) -> None:
        """Read one shard to its end, at one server after the other."""
        while shard not in self.ended:
            if self.alive:
                server = self.choose.choice(self.alive)
                await asyncio.wait({self.begin(group, server, self.tenure(group, server, shard))})
            await self.clock.sleep(self.choose.choice([0, 0.3, 1.2]))

    def begin(
        self, group: asyncio.TaskGroup, server: Pipeline, work: Coroutine[None, None, None]
    ) -> asyncio.Task[None]:
        """Do something over a connection, which ends when its server dies."""

        async def connected() -> None:
            with contextlib.suppress(Crash):
                await work

        task = group.create_task(connected())
        self.tenures.setdefault(server, set()).add(task)
        return task

    async def tenure(self, group: asyncio.TaskGroup, server: Pipeline, shard: str) -> None:
        at = self.checkpoints.get(shard, 0)
        start = Sequence(at) if at else "TRIM_HORIZON"
        session = await server.open(shard, start, parents=self.parents.get(shard, ()))
        left = [record for record in self.records[shard] if record[0] > at]
        for _ in range(self.choose.randint(1, 3)):
            if not left:
                if await session.end():
                    self.ended.add(shard)
                return
            left = await self.batch(server, session, left)
        if self.gentle:
            await session.lost()
            return
        ending = self.choose.choice(["lost", "gone", "zombie"])
        if ending == "gone":
            session.disconnected()
        else:
            self.begin(group, server, self.zombie(server, session, left if ending == "zombie" else []))

    async def batch(
        self, server: Pipeline, session: ShardSession, left: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        size = self.choose.randint(1, 3)
        await self.give(server, session, left[:size])
        await self.clock.sleep(self.choose.choice([0.1, 0.7, 1.4]))
        self.checkpoint(session, left[:size][-1][0])
        return left[size:]

    async def zombie(self, server: Pipeline, session: ShardSession, left: list[tuple[int, int]]) -> None:
        """What a daemon still delivers that has not heard that its lease is gone; its checkpoints are refused."""
        while left:
            await self.give(server, session, left[:2])
            await self.clock.sleep(0.5)
            left = left[2:]
        await session.lost()

    def assert_all(self, pipeline: Pipeline) -> None:
        rows = pipeline.rows("window=*/*.parquet") + pipeline.rows("_late/window=*/*.parquet")
        letters = pipeline.stored_dead_letters()
        found = Counter((row["_shard"], int(row["_sequence"])) for row in rows)
        found.update((shard, sequence.number) for shard, sequence in letters)
        assert found == Counter((s, number) for s, records in self.records.items() for number, _ in records)
        places = {
            shard: [
                (row["_time"], row["_clock"], int(row["_sequence"])) for row in rows if row["_shard"] == shard
            ]
            for shard in self.records
        }
        for shard, own in places.items():
            assert [number for _, _, number in sorted(own)] == sorted(number for _, _, number in own)
            for parent in self.parents.get(shard, ()):
                if own and places[parent]:
                    assert max(places[parent])[:2] < min(own)[:2]


def stream(choose: random.Random, clock: VirtualClock) -> Leases:
    return Leases(
        {
            "a": [(n, 2000 * n) for n in range(1, 9)],
            "b": [(n, 16_000 + 1500 * (n - 20)) for n in range(20, 26)],
            "c": [(30, 83_000), (35, 84_000)],
            "z": [(n, 6000 * n) for n in range(1, 9)],
        },
        {"b": ("a",), "c": ("a",)},
        choose=choose,
        clock=clock,
    )


async def until_published(daemon: Leases) -> None:
    await daemon.consume_all()
    await daemon.alive[0].coordinator.over()
    while any(
        window.state is not WindowState.PUBLISHED for window in daemon.alive[0].state().windows.values()
    ):
        await daemon.clock.sleep(1)
