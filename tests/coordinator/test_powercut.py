"""A power cut at any moment: what was synced is left, the rest is lost, and a restart makes it exactly once.

That the disk's double can tell is shown by syncs that are left out, each of which it finds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from coordinator.pipeline import Daemon, Faults, Pipeline
from coordinator.powercut import Disk, unsafe

import mldserver.ledger.sqlite_file
import mldserver.output.store
from mldserver.output.layout import OWNER, STAGING
from mldserver.output.store import OutputStore
from mldserver.testing import VirtualClock
from mldserver.windows import TimeWindows, time_window_id

pytestmark = pytest.mark.usefixtures("joins_early")

SPEC = TimeWindows(10_000, "at")


def stream() -> Daemon:
    """A split, dead letters, and rows that are late."""
    return Daemon(
        {"a": [(n, 4000 * n) for n in range(1, 6)], "b": [(n, 22_000 + 2000 * n) for n in range(6, 11)]},
        {"b": ("a",)},
        behind=lambda number: 15_000 if number in {5, 9} else 0,
    )


async def run(pipeline: Pipeline, daemon: Daemon) -> None:
    """Run until the stream is read and published."""

    async def work() -> None:
        await daemon.consume(pipeline)
        await pipeline.coordinator.over()
        await pipeline.runner.idle()
        await pipeline.clock.sleep(6)  # what revisions replaced is deleted a while later

    async with asyncio.timeout(800), pipeline.life():
        await pipeline.clock.drive(work(), step=1)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(tmp_path / "out")
    monkeypatch.setattr(os, "fsync", disk.fsync)
    yield disk
    disk.close()


async def recorded(disk: Disk, tmp_path: Path, *, recompute: bool) -> Pipeline:
    """Run over the disk from the first start to the last window."""

    def watch(name: str, after: bool) -> None:
        disk.checkpoints, disk.ended = daemon.checkpoints, daemon.ended
        if after:
            disk.called(name, pipeline.ledger.store)

    pipeline, daemon = Pipeline(tmp_path / "out", spec=SPEC, recompute=recompute), stream()
    pipeline.faults = Faults(hook=watch)
    await run(pipeline, daemon)
    daemon.assert_exactly_once(pipeline)
    return pipeline


async def restarted(disk: Disk, number: int, out: Path, clock: VirtualClock, *, recompute: bool) -> None:
    """Start again from what a power cut left, and see that every row is there once."""
    image, daemon = disk.images[number], stream()
    image.restore(out)
    daemon.checkpoints, daemon.ended = dict(image.checkpoints), set(image.ended)
    daemon.sizes = lambda: 2  # delivered again with other borders
    pipeline = Pipeline(out, spec=SPEC, recompute=recompute)
    await pipeline.clock.advance(clock.now_ms() / 1000)
    await run(pipeline, daemon)
    daemon.assert_exactly_once(pipeline)
    assert pipeline.nameless_files() == []


@pytest.mark.parametrize(
    "recompute",
    [pytest.param(True, id="recompute"), pytest.param(False, id="separate", marks=pytest.mark.long)],
)
async def test_a_restart_after_a_power_cut_makes_every_row_once(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, recompute: bool, long: bool
) -> None:
    pipeline = await recorded(disk, tmp_path, recompute=recompute)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    assert len(disk.images) > 100
    for number in range(0, len(disk.images), 1 if long else 5):
        await restarted(disk, number, tmp_path / str(number), pipeline.clock, recompute=recompute)


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "separate"])
async def test_whatever_the_ledger_names_is_on_disk_at_every_moment(
    tmp_path: Path, disk: Disk, recompute: bool
) -> None:
    await recorded(disk, tmp_path, recompute=recompute)
    events = [image.event for image in disk.images]
    # It means something only while all of these are in it.
    assert {"register", "cut", "commit", "published", "sync ."} < set(events)
    assert ("late_published" in events) != recompute
    assert unsafe(disk.images, tmp_path / "scratch") == {}


async def test_rows_are_written_synced_registered_computed_synced_committed_renamed_and_synced(
    tmp_path: Path, disk: Disk
) -> None:
    """The order that everything rests upon, for the first window."""
    await recorded(disk, tmp_path, recompute=False)
    window = time_window_id(0)
    wanted = [
        "sync .",
        "open",
        "claim",
        f"sync {OWNER}.part",
        "sync _mldserver",
        "write",
        "register",
        "cut",
        "begin_attempts",
        "commit",
        "rename",
        "sync .",
        "published",
        "delete",
    ]
    at, places = 0, []
    for each in wanted:
        at = disk.events.index(each, at)
        places.append(at)
    segment = next(event for event in disk.events if event.startswith(f"sync _mldserver/segments/{window}/"))
    output = next(
        event for event in disk.events if event.startswith(f"sync _mldserver/staging/{window}/0001")
    )
    assert disk.events.index(segment) < places[wanted.index("register")]
    assert places[wanted.index("begin_attempts")] < disk.events.index(output) < places[wanted.index("commit")]


def without_sync_of_outputs(patch: pytest.MonkeyPatch) -> None:
    """Outputs are committed unsynced."""
    sync = OutputStore.sync

    def unsynced(store: OutputStore, *paths: str) -> None:
        sync(store, *(path for path in paths if not path.startswith(f"{STAGING}/")))

    patch.setattr(OutputStore, "sync", unsynced)


def without_sync_of_published_entries(patch: pytest.MonkeyPatch) -> None:
    """What is published is visible, and not durable."""
    patch.setattr(OutputStore, "sync_entries", lambda _store: None)


def without_sync_of_segments(patch: pytest.MonkeyPatch) -> None:
    """Segments are registered unsynced."""
    patch.setattr(OutputStore, "sync", lambda _store, *_paths: None)


def without_sync_of_late_files(patch: pytest.MonkeyPatch) -> None:
    """Late files are renamed, and the rename is not durable."""
    publish: Callable[..., bool] = OutputStore.publish

    def unsynced(store: OutputStore, source: str, target: str) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(OutputStore, "sync", lambda _store, *_paths: None)
            return publish(store, source, target)

    patch.setattr(OutputStore, "publish", unsynced)


def without_sync_of_the_folder(patch: pytest.MonkeyPatch) -> None:
    """A new output folder's own entry is not durable."""

    def made(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    for module in (mldserver.output.store, mldserver.ledger.sqlite_file):
        patch.setattr(module, "make_folder", made)


@pytest.mark.parametrize(
    "plant",
    [
        without_sync_of_outputs,
        without_sync_of_published_entries,
        without_sync_of_segments,
        without_sync_of_late_files,
        without_sync_of_the_folder,
    ],
)
async def test_a_sync_that_is_left_out_is_found(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    await recorded(disk, tmp_path, recompute=False)
    gone = disk.images[-1].ledger is None
    assert gone or unsafe(disk.images, tmp_path / "scratch")
    assert gone == (plant is without_sync_of_the_folder)


@pytest.mark.parametrize("plant", [without_sync_of_outputs, without_sync_of_published_entries])
async def test_a_sync_that_is_left_out_costs_rows(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], Any]
) -> None:
    """What is found is no rule for its own sake."""
    plant(monkeypatch)
    pipeline = await recorded(disk, tmp_path, recompute=False)
    worst = min(unsafe(disk.images, tmp_path / "scratch"))
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    with pytest.raises((AssertionError, TimeoutError, ExceptionGroup)):
        async with asyncio.timeout(3):
            await restarted(disk, worst, tmp_path / "again", pipeline.clock, recompute=False)
