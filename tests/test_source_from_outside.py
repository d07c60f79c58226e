"""A source that is no part of ours, without a socket or a wire format, feeds a whole server."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.serving import quick, serving, until
from support.toys import batches, handler, published, redrive

from mldserver.consumer.intake import ShardOpening
from mldserver.consumer.shard import Consumer
from mldserver.records import Sequence, Shard
from mldserver.sources.source import SourceParts, SourceStatus

LISTS: dict[str, list[Any]] = {"left": [*range(9), "broken", *range(9, 300)], "right": [*range(300, 600)]}


class Toy:
    """Reads the start of each list. A list without its end goes on at the next start of the server."""

    waits_for: str | None = None
    connections = len(LISTS)

    def __init__(self, parts: SourceParts, *, share: int, stored: dict[str, Sequence], ends: bool) -> None:
        self.parts, self.share, self.stored, self.ends = parts.consumers, share, stored, ends
        self.stopping, self.idle = asyncio.Event(), asyncio.Event()

    def status(self) -> SourceStatus:
        return SourceStatus("toy://box")

    async def listening(self) -> str:
        return "toy://box"

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for shard_id, items in LISTS.items():
                group.create_task(self.read(shard_id, items[: self.share]))
        self.idle.set()
        await self.stopping.wait()

    def stop_accepting(self) -> None:
        self.stopping.set()

    async def drain(self) -> None:
        self.stopping.set()
        await self.idle.wait()

    async def read(self, shard_id: str, items: list[object]) -> None:
        consumer = Consumer(self.parts)
        try:
            await consumer.open(ShardOpening(shard_id, "TRIM_HORIZON", tells_lag=True), Shard(shard_id, None))
            for batch in batches(shard_id, items):
                consumer.deliver(batch, batch.size)
                self.store(consumer, await consumer.acknowledged())
            if self.ends:
                assert await consumer.end()
                return
            await self.stopping.wait()
            await consumer.drain()
            self.store(consumer, consumer.due)
        finally:
            await consumer.forget()

    def store(self, consumer: Consumer, position: Sequence | None) -> None:
        if position is not None:
            self.stored[consumer.shard_id] = position
            consumer.checkpointed(position)


@pytest.mark.usefixtures("no_standby")
@pytest.mark.parametrize("workers", [None, 1], ids=["inline", "in a worker"])
async def test_each_row_is_published_once_across_a_restart_and_dead_letters_run_between_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]], workers: int | None
) -> None:
    stored: dict[str, Sequence] = {}
    settings = quick(tmp_path / "out", handler(tmp_path, monkeypatch), workers=workers)
    async with serving(settings, source=partial(Toy, share=200, stored=stored, ends=False)) as server:
        await until(lambda: server.status().dead_letters == 1)
        (tmp_path / "healed").touch()
        await asyncio.to_thread(redrive, tmp_path / "out")
        await until(lambda: "redrive.done" in [entry["event"] for entry in logged])
    assert stored == {"left": Sequence(200), "right": Sequence(200)}
    async with serving(settings, source=partial(Toy, share=1000, stored=stored, ends=True)) as server:
        await server.finished()
    assert published(tmp_path / "out") == Counter([*range(600), 1000])
