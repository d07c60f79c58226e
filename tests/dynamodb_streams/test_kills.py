"""Two server processes share a stream and a ledger, and either is killed at any instant: what comes out is what was put.

Six deaths by day, fifty-two in the long lane, and twelve on a ledger in DynamoDB, whose emulator is slow. The same again with a
handler that counts the changes of each item in its state, over more generations of shards. ``CRASH_SEED`` plays the same again.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from crash.held import Held, in_dynamodb, in_sqlite
from crash.lives import Plan
from crash.local_life import LocalLife
from crash.seeds import crash_seed
from crash.test_two_servers import CREDENTIALS, Ground, a_file, a_table
from support.counted import Named, Run, check_counts, check_stored

from mldserver.testing import FakeStreams

pytestmark = pytest.mark.timeout(1500)

HANDLER = """
from mldserver import tumbling

schema = "n BIGINT NOT NULL"
windows = tumbling("2 seconds")


def process_record(record):
    return int(record.json()["dynamodb"]["NewImage"]["n"]["N"]),
"""
COUNTING = """
import os
import random
import signal

from mldserver import tumbling

schema = "n BIGINT NOT NULL, counted BIGINT NOT NULL, key STRING NOT NULL"
windows = tumbling("2 seconds")
chance = random.SystemRandom()
DEADLY = 0.0


def process_record(record, ctx):
    ctx.state["n"] = counted = ctx.state.get("n", 0) + 1
    if chance.random() < DEADLY:
        os.kill(os.getpid(), signal.SIGKILL)
    return int(record.json()["dynamodb"]["NewImage"]["n"]["N"]), counted, ctx.key
"""
ITEMS = 50
GENERATIONS = 4
"""Of shards, at least, in streams that a handler with state reads."""
PIPELINE = "numbers"
NAMES = ("left", "right")
STEPS = (
    "shard.opened",
    "shard.drained",
    "shard.end_durable",
    "batch.handled",
    "batch.buffered",
    "flush.registered",
    "state.loaded",
    "state.written",
    "state.compacted",
)
"""Of the life of a shard: some servers end at the first of these, others at any instant."""


class Table:
    """A table that is written all the time, while its stream's shards split and roll over."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.fake = FakeStreams(shards=3, seed=seed)
        self.fake.trouble, self.fake.page_records = 0.02, 50
        self.numbers = 0

    async def write(self) -> None:
        """Write until cancelled."""
        while True:
            for _ in range(self.dice.randrange(30)):
                self.fake.put({"id": self.numbers % ITEMS, "n": self.numbers})
                self.numbers += 1
            if self.dice.random() < 0.02:
                children = self.dice.choice((1, 1, 2)) if len(self.fake.open_shards) < 6 else 1
                shard = self.dice.choice(self.fake.open_shards)
                self.fake.split(shard, children=children, visible_after=self.dice.random())
            await asyncio.sleep(0.02 + self.dice.random() * 0.05)

    def next_generation(self) -> None:
        """Give every open shard a child, or two while there are few."""
        for shard in self.fake.open_shards:
            children = 2 if len(self.fake.open_shards) < 6 else 1
            self.fake.split(shard, children=children, visible_after=self.dice.random())

    @property
    def generations(self) -> int:
        """How many shards the longest lineage has."""
        depths: dict[str | None, int] = {None: 0}
        for shard in self.fake.shards.values():
            depths[shard.id] = depths[shard.parent] + 1
        return max(depths.values())

    def rows(self, out: Path) -> list[dict[str, Any]]:
        """Return what was published, and is late, in its order."""
        files = [*out.glob("window=*/*.parquet"), *out.glob("_late/window=*/*.parquet")]
        rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
        return sorted(rows, key=lambda row: (row["_time"], row["_clock"]))

    def check_counts(self, out: Path, named: Named) -> None:
        """Compare the numbers of each item's changes, and the state in the end, with what was put."""
        rows = self.rows(out)
        items = {f'{{"id":{{"N":"{item}"}}}}': range(item, self.numbers, ITEMS) for item in range(ITEMS)}
        assert {row["key"] for row in rows} <= items.keys()
        runs = [Run(key, numbers) for key, numbers in items.items()]
        assert check_counts(runs, [(row["n"], row["counted"]) for row in rows]) == []
        stored = {key: len(numbers) for key, numbers in items.items() if numbers}
        assert check_stored(out, named, stored) == []
        roots = {shard.id for shard in self.fake.shards.values() if shard.parent is None}
        assert named.stores.keys() <= roots, "a store is not that of a family"
        assert self.generations >= GENERATIONS

    def check(self, out: Path) -> None:
        """Compare what came out with the stream itself: each record once, in its lineage's order."""
        rows = self.rows(out)
        shards = self.fake.shards.values()
        put = {
            shard.id: [int(each["dynamodb"]["SequenceNumber"]) for each in shard.records] for shard in shards
        }
        came: dict[str, list[int]] = {name: [] for name in put}
        ended: dict[str, int] = {}
        begun: dict[str, int] = {}
        for place, row in enumerate(rows):
            came[row["_shard"]].append(int(row["_sequence"]))
            begun.setdefault(row["_shard"], place)
            ended[row["_shard"]] = place
        lost = {
            name: sorted(set(put[name]) - set(came[name])) for name in put if set(put[name]) - set(came[name])
        }
        twice = {
            name: [n for n, count in Counter(numbers).items() if count > 1] for name, numbers in came.items()
        }
        assert not lost
        assert not any(twice.values()), twice
        assert came == put
        assert Counter(row["n"] for row in rows) == Counter(range(self.numbers))
        for shard in shards:
            if shard.parent in ended and shard.id in begun:
                last, first = rows[ended[shard.parent]], rows[begun[shard.id]]
                assert ended[shard.parent] < begun[shard.id], (
                    f"{first} came before the end of its parent, {last}"
                )


class Servers:
    """Two lives at a time, on one ledger."""

    def __init__(
        self, root: Path, url: str, ground: Ground, dice: random.Random, *, runtime: str | None
    ) -> None:
        self._workers = 1 if runtime == "in a worker process" else None
        # Of one record in a thousand a worker process dies: then only its batch runs again.
        counting = COUNTING if self._workers is None else COUNTING.replace("DEADLY = 0.0", "DEADLY = 0.001")
        (root / "numbers_of_items.py").write_text(HANDLER if runtime is None else counting)
        self._root, self._url, self._ground, self._dice = root, url, ground, dice
        self._lives: dict[str, LocalLife] = {}
        self._count = 0

    @property
    def out(self) -> Path:
        return self._root / "out"

    async def start(self, name: str, *, armed: bool = False) -> None:
        """Start a life, under the name of the one before or a new one; ``armed``: it may end by itself, at a step."""
        self._count += 1
        settings: dict[str, Any] = {
            "source": f"dynamodb://orders?endpoint_url={self._url}&region=us-east-1",
            "poll_seconds": 0.1,
            "list_seconds": 1.0,
            "flush_interval": 0.1,
            "settle_time_ms": 300,
            "recompute_delay": 0.1,
            "server_timeout": self._ground.timeout_seconds,
            "workers": self._workers,
            "pipeline": PIPELINE,
            "server_id": self._dice.choice([name, f"{name}-{self._count}"]),
            "log_file": self._root / f"{name}.log",
            "log_format": "json",
            **self._ground.settings,
        }
        if self._ground.dynamodb is not None:
            settings["ledger"] = self._ground.dynamodb
        plan = Plan(self.out, "numbers_of_items", str(self._root), settings, CREDENTIALS)
        steps = [f"{step}:{self._dice.randint(1, 4)}" for step in STEPS]
        self._lives[name] = LocalLife(plan, ",".join(steps) if armed else None)
        await self._lives[name].start()

    async def kill(self, name: str) -> None:
        """End a life, whatever it is at."""
        life = self._lives.pop(name)
        life.kill()
        code = await life.ended()
        assert code == -signal.SIGKILL or self.was_expired(name), (
            f"{name} had ended with {code}: {self.told(name)}"
        )

    async def finish(self) -> None:
        """Let both end once all is published; one that was taken for dead is started again, as by a supervisor."""
        codes: dict[str, int] = {}
        for life in self._lives.values():
            life.stream_is_over()
        for name in NAMES:
            while (code := await self._lives[name].ended()) and self.was_expired(name):
                await self.start(name)
                self._lives[name].stream_is_over()
            codes[name] = code
        assert set(codes.values()) == {0}, {name: self.told(name) for name in codes}

    async def held(self) -> Held:
        """Return what the ledger holds."""
        place = self._ground.dynamodb
        return in_sqlite(self.out) if place is None else await in_dynamodb(place, PIPELINE)

    def was_expired(self, name: str) -> bool:
        """Whether a server ended because the other took it for dead: an emulator may answer too late."""
        return "raise the time-out" in self.told(name).rpartition("server.starting")[2]

    def told(self, name: str) -> str:
        log = self._root / f"{name}.log"
        return log.read_text("utf-8", "replace")[-4000:] if log.exists() else ""

    def logged(self, event: str) -> int:
        return sum(self._root.joinpath(f"{name}.log").read_text().count(f'"{event}"') for name in NAMES)


@pytest.mark.parametrize(
    ("runtime", "grounds", "kills_by_day", "kills_in_all"),
    [
        # By day the variant with state: it checks the rows in the same way.
        pytest.param(None, a_file, 4, 50, id="sqlite", marks=pytest.mark.long),
        pytest.param(None, a_table, 10, 10, id="dynamodb", marks=pytest.mark.long),
        pytest.param("inside the server", a_file, 3, 40, id="keyed, sqlite"),
        pytest.param("in a worker process", a_file, 4, 20, id="keyed, worker", marks=pytest.mark.long),
        pytest.param("inside the server", a_table, 10, 10, id="keyed, dynamodb", marks=pytest.mark.long),
    ],
)
async def test_two_servers_on_one_stream_survive_kill_9_of_either_at_any_instant(
    tmp_path: Path,
    long: bool,
    monkeypatch: pytest.MonkeyPatch,
    runtime: str | None,
    grounds: Callable[[], AbstractAsyncContextManager[Ground]],
    kills_by_day: int,
    kills_in_all: int,
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    seed, began = crash_seed(), time.monotonic()
    kills, dice, table = kills_in_all if long else kills_by_day, random.Random(seed), Table(seed)
    async with grounds() as ground, table.fake.serving() as url:
        servers = Servers(tmp_path, url, ground, dice, runtime=runtime)
        writing = asyncio.ensure_future(table.write())
        for name in NAMES:
            await servers.start(name)
        for _ in range(kills):
            await asyncio.sleep(ground.pace * (0.3 + dice.random() * 2.0))
            if runtime is not None and table.generations <= GENERATIONS + dice.randrange(6):
                table.next_generation()
            victim = dice.choice(NAMES)
            await servers.kill(victim)
            await asyncio.sleep(dice.choice((0.0, 0.5, ground.timeout_seconds * 1.5)))
            await servers.start(victim, armed=dice.random() < 0.4)
        for name in NAMES:
            await servers.kill(name)
            await servers.start(name)
        await asyncio.sleep(2.0)
        writing.cancel()
        for shard in table.fake.shards.values():
            shard.closed = True
        async with asyncio.timeout(800):
            await servers.finish()
        held = None if runtime is None else await servers.held()
    table.check(servers.out)
    if held is not None:
        table.check_counts(servers.out, held.state)
    opened, lost = servers.logged("shard.opened"), servers.logged("worker.lost")
    assert lost or runtime != "in a worker process"
    print(
        f"{kills + len(NAMES)} kills, {table.numbers} records of {len(table.fake.shards)} shards, "
        f"{table.generations} generations, opened {opened} times, {lost} workers lost, {time.monotonic() - began:.0f} s"
    )
