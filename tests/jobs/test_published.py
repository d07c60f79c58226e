"""The published windows of a function as a view: from the ledger, on a disk and on an object store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from support.clocks import HandClock

from mldserver.engine_jobs import FunctionView
from mldserver.jobs.published import PublishedWindows
from mldserver.ledger.contract import WindowEntry, WindowState
from mldserver.ledger.operations import Ledger
from mldserver.output.manifest import Manifest, manifest_path
from mldserver.output.store import OutputStore

SHAPE = FunctionView("flights", (), ("window_start", "window_end"), 60_000)
PUBLISHED, CUT = WindowState.PUBLISHED, WindowState.CUT


@dataclass
class Book:
    """A ledger that holds windows."""

    windows: dict[str, WindowEntry] = field(default_factory=dict)
    reads: int = 0

    def put(self, name: str, start_ms: int, state: WindowState = PUBLISHED, revision: int = 1) -> None:
        self.windows[name] = WindowEntry(name, state, start_ms, start_ms + 60_000, revision)

    async def visible_windows(self) -> tuple[WindowEntry, ...]:
        self.reads += 1
        return tuple(each for each in self.windows.values() if each.is_visible)


@dataclass
class Bucket:
    """An object store, as far as manifests go."""

    local: bool = False
    objects: dict[str, bytes] = field(default_factory=dict)
    gets: list[str] = field(default_factory=list)

    def publish(self, window: str, revision: int, *files: str) -> None:
        folder = f"_mldserver/outputs/{window}/{revision:04d}-0123456789abcdef"
        manifest = Manifest(window, revision, tuple(f"{folder}/{file}" for file in files), len(files))
        self.objects[manifest_path(window, revision)] = manifest.encode()

    def files(self, folder: str) -> Iterable[tuple[str, int]]:
        return [(path, len(data)) for path, data in self.objects.items() if path.startswith(folder)]

    def get(self, path: str) -> bytes:
        self.gets.append(path)
        return self.objects[path]

    def for_each(self, step: Callable[[Any], Any], items: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(map(step, items))

    def uri(self, path: str) -> str:
        return f"s3a://bucket/out/{path}"


def published(
    book: Book, store: Any, shape: FunctionView = SHAPE, *, has_view: bool = True
) -> PublishedWindows:
    return PublishedWindows(
        shape=shape,
        has_view=has_view,
        ledger=cast("Ledger", book),
        store=cast("OutputStore", store),
        clock=HandClock(),
    )


async def paths(windows: PublishedWindows, *, fresh: bool = True) -> list[str]:
    view = await windows.view(fresh=fresh)
    return [] if view is None else [path.rpartition("/out/")[2] for path in view.paths]


async def test_on_a_disk_the_view_has_the_folders_of_published_windows_in_the_order_of_their_starts(
    tmp_path: Path,
) -> None:
    book, store = Book(), OutputStore(str(tmp_path / "out"))
    windows = published(book, store)
    assert await windows.view() is None
    book.put("b", 60_000)
    book.put("a", 120_000)
    book.put("revised", 0, CUT, revision=2)  # its first revision is there until the second takes its place
    book.put("waits", 0, CUT)
    book.put("empty", 0)  # on_window returned None
    for name in ("a", "b", "revised", "waits", "stranger"):
        await asyncio.to_thread((tmp_path / "out" / f"window={name}").mkdir, parents=True)
    assert await paths(windows) == ["window=revised", "window=b", "window=a"]


async def test_on_an_object_store_the_view_has_the_folders_that_the_latest_manifests_name() -> None:
    book, bucket = Book(), Bucket()
    for number, name in enumerate(("a", "b", "empty")):
        book.put(name, number)
    bucket.publish("a", 1, "0.parquet")
    bucket.publish("b", 1, "0.parquet", "1.parquet")
    bucket.publish("b", 2, "2.parquet", "3.parquet")
    bucket.publish("empty", 1)
    bucket.publish("forgotten", 1, "0.parquet")
    windows = published(book, bucket)
    wanted = [f"_mldserver/outputs/{name}-0123456789abcdef" for name in ("a/0001", "b/0002")]
    assert await paths(windows) == wanted
    assert await paths(windows) == wanted
    assert len(bucket.gets) == 3, "a manifest never changes: it is read once"


async def test_a_view_is_read_again_after_a_second_or_when_a_fresh_one_is_wanted(tmp_path: Path) -> None:
    book = Book()
    windows = published(book, OutputStore(str(tmp_path / "out")))
    clock = cast("HandClock", windows.clock)
    for ms, fresh, reads in ((0, False, 1), (999, False, 1), (1000, False, 2), (1500, True, 3)):
        clock.ms = ms
        await windows.view(fresh=fresh)
        assert book.reads == reads


@pytest.mark.parametrize(
    ("shape", "has_view", "seen"),
    [
        (FunctionView("flights", (), schema="n INT"), True, True),
        (FunctionView("flights", (), is_table=True), False, True),
        (SHAPE, False, False),
    ],
    ids=["known columns", "a table of files", "a table of a database"],
)
async def test_without_windows_there_is_a_view_where_its_columns_or_its_table_are_known(
    tmp_path: Path, shape: FunctionView, *, has_view: bool, seen: bool
) -> None:
    windows = published(Book(), OutputStore(str(tmp_path / "out")), shape, has_view=has_view)
    assert await windows.view() == (shape if seen else None)
