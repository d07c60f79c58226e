"""A power cut at any moment of the life of keyed state: a restart counts every record once."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter as Counts
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from coordinator.keyed import Counter, opened
from coordinator.pipeline import RULES, Faults, Pipeline
from coordinator.powercut import Disk, unsafe

from mldserver.output.layout import STATE
from mldserver.output.store import OutputStore
from mldserver.records import Sequence
from mldserver.stores import ALL_KEYS, KeyRange, StoreClaim, hash_of
from mldserver.testing import VirtualClock

MIDDLE = ALL_KEYS.last // 2
RANGES = {"a": ALL_KEYS, "b": KeyRange(0, MIDDLE), "c": KeyRange(MIDDLE + 1, ALL_KEYS.last)}
KEYS = [f"k{number}" for number in range(5)]
QUICK = replace(RULES, retention_ms=3000)


def records() -> dict[str, list[tuple[int, str]]]:
    """Return a parent's records, enough for compactions, and those of its two children."""
    found: dict[str, list[tuple[int, str]]] = {
        "a": [(n, KEYS[n % 5]) for n in range(1, 21)],
        "b": [],
        "c": [],
    }
    for n in range(21, 31):
        key = KEYS[n % 5]
        found["b" if hash_of(key.encode()) in RANGES["b"] else "c"].append((n, key))
    return found


@dataclass
class Daemon:
    """The KCL and a stream. It outlives the server."""

    checkpoints: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    size: int = 2

    async def read(self, pipeline: Pipeline, shard: str) -> Counter:
        """Read a shard from its checkpoint to its last record, and checkpoint what is durable."""
        at = self.checkpoints.get(shard, 0)
        start = Sequence(at) if at else "TRIM_HORIZON"
        parents = () if shard == "a" else ("a",)
        counter = await opened(pipeline, shard, start, StoreClaim(RANGES[shard]), parents=parents)
        left = [record for record in records()[shard] if record[0] > at]
        while left:
            batch, left = left[: self.size], left[self.size :]
            after = counter.session.after
            fresh = [record for record in batch if after is None or Sequence(record[0]) > after]
            await counter.give(*fresh, delivered=batch)
            if (due := counter.session.checkpoint_due()) is not None:
                self.checkpoints[shard] = due.number
                counter.session.checkpointed(due)
            await pipeline.clock.sleep(1.5)
        return counter


async def run(pipeline: Pipeline, daemon: Daemon) -> None:
    """Read the stream to its end. Then each key's count must be the number of its records."""

    async def work() -> None:
        if "a" not in daemon.ended:
            parent = await daemon.read(pipeline, "a")
            assert await parent.session.end()
            daemon.ended.add("a")
        children = [await daemon.read(pipeline, shard) for shard in ("b", "c")]
        await pipeline.clock.sleep(6)  # files that compaction has replaced are deleted
        found: dict[str, int] = {}
        for child in children:
            await child.load()
            assert found.keys().isdisjoint(child.entries)
            found |= child.entries
        assert found == Counts(key for shard in records().values() for _, key in shard)

    async with asyncio.timeout(100), pipeline.life():
        await pipeline.clock.drive(work(), step=1)


def a_pipeline(out: Path) -> Pipeline:
    return Pipeline(out, without_rows=True, rules=QUICK)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(tmp_path / "out")
    monkeypatch.setattr(os, "fsync", disk.fsync)
    yield disk
    disk.close()


async def recorded(disk: Disk, out: Path) -> VirtualClock:
    """Run over the disk from the first start to the last record."""

    def watch(name: str, after: bool) -> None:
        disk.checkpoints, disk.ended = daemon.checkpoints, daemon.ended
        if after:
            disk.called(name, pipeline.ledger.store)

    pipeline, daemon = a_pipeline(out), Daemon()
    pipeline.faults = Faults(hook=watch)
    await run(pipeline, daemon)
    return pipeline.clock


async def test_a_restart_after_a_power_cut_counts_every_record_once(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    clock = await recorded(disk, tmp_path / "out")
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    events = [image.event for image in disk.images]
    assert {"register", "compact_state", "forget_state_files", "open_shard"} < set(events)
    for number in range(0, len(disk.images), 1 if long else 7):
        image, out = disk.images[number], tmp_path / str(number)
        image.restore(out)
        daemon = Daemon(dict(image.checkpoints), set(image.ended), size=3)
        pipeline = a_pipeline(out)
        pipeline.names = itertools.count(1000)  # a server names no file as an earlier one did
        await pipeline.clock.advance(clock.now_ms() / 1000)
        await run(pipeline, daemon)
        named = {Path(path).name for path in pipeline.state().state_files}
        assert {path.name for path in (out / STATE).glob("*")} == named


async def test_state_files_that_stores_need_are_on_disk_at_every_moment(tmp_path: Path, disk: Disk) -> None:
    await recorded(disk, tmp_path / "out")
    assert unsafe(disk.images, tmp_path / "scratch") == {}


async def test_state_files_that_are_not_synced_are_found(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutputStore, "sync", lambda _store, *_paths: None)
    await recorded(disk, tmp_path / "out")
    assert unsafe(disk.images, tmp_path / "scratch")
