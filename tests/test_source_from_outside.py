"""A source that is no part of ours, without a socket or a wire format, feeds a whole server."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from functools import partial
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from support.serving import quick, serving, until

from mldserver import cli
from mldserver.records import Record, Sequence, Shard
from mldserver.runtime.interface import Delivery, Records
from mldserver.sources.intake import ShardIntake, ShardOpening, Source, SourceParts, SourceStatus

HANDLER = """
from pathlib import Path
from mldserver import tumbling

schema = "id BIGINT NOT NULL"
windows = tumbling("10 seconds")


def process_record(record):
    if record.data != b'"broken"':
        return record.json(),
    if not Path(__file__).with_name("healed").exists():
        raise ValueError("broken")
    Path(__file__).with_name("mended").touch()
    return 1000,
"""
START_MS = 1_800_000_000_000
BATCH = 25


class Toy:
    """Reads lists; a list without its end goes on at the next start, from wherever that is told to begin."""

    def __init__(
        self, parts: SourceParts, *, shards: dict[str, list[object]], stored: dict[str, Sequence], ends: bool
    ) -> None:
        self.parts = parts
        self.shards = shards
        self.stored = stored
        self.ends = ends
        self.waits_for: str | None = "the toy is asleep"
        self.connections = 0
        self.told: list[str] = []
        self._awake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()

    def status(self) -> SourceStatus:
        return SourceStatus("toy://box")

    async def listening(self) -> str:
        await self._awake.wait()
        return "toy://box"

    async def run(self) -> None:
        self.waits_for = None
        self._awake.set()
        async with asyncio.TaskGroup() as group:
            for shard_id, items in self.shards.items():
                group.create_task(self._serve(shard_id, items))
        self._idle.set()
        await self._stopping.wait()

    def stop_accepting(self) -> None:
        self.waits_for = "the toy is put away"
        self._stopping.set()

    async def drain(self) -> None:
        self.stop_accepting()
        await self._idle.wait()

    async def _serve(self, shard_id: str, items: list[object]) -> None:
        runtime, intake, owners, *_ = self.parts
        opening = ShardOpening(shard_id, "TRIM_HORIZON", tells_lag=True)
        await intake.check(opening)
        claim = owners.take(shard_id)
        self.connections += 1
        try:
            async with claim.work():
                shard = await intake.open_shard(opening)
                await runtime.open(Shard(shard_id, "TRIM_HORIZON"))
                claim.opened = True
            for first in range(0, len(items), BATCH):
                async with claim.work():
                    await self._hand_in(shard_id, items[first : first + BATCH], first + 1, shard)
                self._checkpoint(shard_id, shard)
            if self.ends:
                async with claim.work():
                    assert await shard.end()
            else:
                await self._stopping.wait()
                await shard.drain()
                self._checkpoint(shard_id, shard)
                shard.disconnected()
        finally:
            self.connections -= 1
            await runtime.forget(shard_id)
            owners.release(shard_id, claim)

    async def _hand_in(self, shard_id: str, items: list[object], first: int, shard: ShardIntake) -> None:
        records = [
            Record(
                shard_id=shard_id,
                sequence_number=str(number),
                data=json.dumps(item).encode(),
                partition_key="key",
                arrival_ms=START_MS + 100 * number,
            )
            for number, item in enumerate(items, first)
        ]
        shard.began()
        delivery = Delivery(shard_id, Records(records, 0), self.parts.clock.now_ms(), shard.after)
        outcome = await self.parts.runtime.process(delivery)
        self.told += [letter.error for letter in outcome.effects.dead_letters]
        if not shard.take(outcome, self.parts.clock.steady_ms()):
            await shard.admitted()

    def _checkpoint(self, shard_id: str, shard: ShardIntake) -> None:
        if (due := shard.checkpoint_due()) is not None:
            self.stored[shard_id] = due
            shard.checkpointed(due)


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "toys.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "toys"


def published(out: Path) -> Counter[int]:
    files = [str(path) for path in out.glob("window=*/*.parquet")]
    return Counter(ds.dataset(files, format="parquet").to_table(columns=["id"])["id"].to_pylist())


@pytest.mark.usefixtures("no_standby")
@pytest.mark.parametrize("workers", [None, 1], ids=["inline", "in a worker"])
async def test_a_source_from_outside_feeds_windows_once_across_a_restart(
    tmp_path: Path, handler: str, workers: int | None
) -> None:
    shards: dict[str, list[object]] = {
        "left": [*range(150), "broken", *range(150, 300)],
        "right": list(range(300, 600)),
    }
    stored: dict[str, Sequence] = {}
    toys: list[Toy] = []

    def make(parts: SourceParts, *, share: int, ends: bool) -> Source:
        begun = {name: items[:share] for name, items in shards.items()}
        toys.append(Toy(parts, shards=begun, stored=stored, ends=ends))
        return toys[-1]

    settings = quick(tmp_path / "out", handler, workers=workers)
    async with serving(settings, source=partial(make, share=100, ends=False)) as server:
        assert await server.listening() == "toy://box"
        await server.ready()
        await until(lambda: toys[0].connections == 2)
    assert (toys[0].connections, toys[0].waits_for) == (0, "the toy is put away")
    assert stored == {"left": Sequence(100), "right": Sequence(100)}
    async with serving(settings, source=partial(make, share=1000, ends=True)) as server:
        await server.finished()
    assert published(tmp_path / "out") == Counter(range(600))
    assert toys[1].told == ["ValueError: broken"]


async def test_letters_of_such_a_shard_run_again_between_its_batches(tmp_path: Path, handler: str) -> None:
    toys: list[Toy] = []

    def make(parts: SourceParts) -> Source:
        toys.append(Toy(parts, shards={"left": [1, "broken", 2]}, stored={}, ends=False))
        return toys[-1]

    async with serving(quick(tmp_path / "out", handler), source=make) as server:
        await until(lambda: bool(toys) and server.status().dead_letters == 1)
        (tmp_path / "healed").touch()
        again = ["dead-letters", "redrive", "--all", "--out", str(tmp_path / "out"), "--pipeline", "toys"]
        assert await asyncio.to_thread(cli.run, again) == 0
        await until((tmp_path / "mended").exists)
    assert toys[0].told == ["ValueError: broken"]
