"""A power cut at any moment of the life of keyed state: a restart counts every record once."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from coordinator.keyed import Daemon, a_pipeline, run
from coordinator.pipeline import Faults
from coordinator.powercut import Disk, unsafe

from mldserver.output.layout import STATE
from mldserver.output.store import OutputStore
from mldserver.testing import VirtualClock


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
