"""What a process that opens a shard is sent of its store."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from support.serving import until

from mldserver.records import Shard
from mldserver.stores import ALL_KEYS, SnapshotSource, StateSnapshot
from mldserver.workers import open_stores
from mldserver.workers.open_stores import OpenStores
from mldserver.workers.worker_process import WorkerProcess


class Process:
    """A process that notes how many outcomes each store that it is sent contains; None: it was sent none."""

    def __init__(self) -> None:
        self.sent: list[int | None] = []

    async def open(self, _shard: Shard, _parked: object, store: Any = None, *files: int) -> None:
        self.sent.append(store and store.accepted)
        for file in files:
            os.close(file)


def reading(store: str) -> SnapshotSource:
    """Return a source whose snapshots say how often it was read."""
    reads = 0

    async def source() -> StateSnapshot:
        nonlocal reads
        reads += 1
        return StateSnapshot(store, ALL_KEYS, reads, None, pa.table({"key": pa.array([], pa.binary())}))

    return source


async def opened(stores: OpenStores, *shards: str) -> list[int | None]:
    """Open shards in a process, and return what it was sent."""
    process = Process()
    for shard in shards:
        await stores.open_in(cast("WorkerProcess", process), Shard(shard), None)
    return process.sent


async def test_a_store_is_read_for_each_opening_but_the_first_has_what_told_its_name() -> None:
    stores = OpenStores()
    await stores.add("a", reading("s"))
    assert (stores.of("a"), stores.is_shared("a")) == ("s", False)
    assert await opened(stores, "a", "a") == [1, 2]
    await stores.add("a", reading("s"))
    await stores.add("a", reading("t"))
    assert stores.of("a") == "t"
    assert await opened(stores, "a") == [1]


async def test_a_store_whose_other_shards_are_open_is_read_when_they_are_quiet() -> None:
    stores = OpenStores()
    await stores.add("a", reading("s"))
    await stores.add("b", reading("s"))
    assert stores.is_shared("a")
    assert await opened(stores, "a", "b") == [2, 2]
    stores.remove("b")
    assert not stores.is_shared("a")


async def test_a_shard_without_state_is_sent_none() -> None:
    stores = OpenStores()
    await stores.add("a", None)
    await stores.add("b", None)
    assert (stores.of("a"), stores.is_shared("a")) == ("a", False)
    assert await opened(stores, "a") == [None]


async def test_a_source_that_fails_changes_nothing() -> None:
    async def fails() -> StateSnapshot:
        raise OSError("it is away")

    stores = OpenStores()
    await stores.add("a", reading("s"))
    with pytest.raises(OSError, match="it is away"):
        await stores.add("a", fails)
    assert await opened(stores, "a") == [1]


async def test_an_opening_that_is_given_up_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, write = threading.Event(), threading.Event(), open_stores.rows_file
    written: list[tuple[int, int]] = []

    def slow(rows: pa.Table) -> tuple[int, int]:
        begun.set()
        go.wait()
        written.append(write(rows))
        return written[0]

    monkeypatch.setattr(open_stores, "rows_file", slow)
    stores = OpenStores()
    await stores.add("a", reading("s"))
    opening = asyncio.create_task(opened(stores, "a"))
    await until(begun.is_set)
    opening.cancel()
    await asyncio.wait({opening})
    assert opening.cancelled()
    go.set()
    async with asyncio.timeout(60):
        await until(lambda: bool(written) and not Path(f"/proc/self/fd/{written[0][0]}").exists())
