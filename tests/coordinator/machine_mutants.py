"""Bugs to be planted in the server: what each takes away is a rule that the machines must miss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.store import SqliteStore

from mldserver.coordinator.backpressure import Backpressure
from mldserver.coordinator.coordinator import Coordinator
from mldserver.coordinator.core.lineage import Lineage
from mldserver.coordinator.core.watermark import View, Watermark
from mldserver.coordinator.shards import ShardSession
from mldserver.ledger.contract import Flush, FlushResult
from mldserver.records import Sequence


def register_without_fences(patch: pytest.MonkeyPatch) -> None:
    """Positions move whoever has the shard, and wherever it stands."""
    register = SqliteStore.register

    def unfenced(store: SqliteStore, flush: Flush) -> FlushResult:
        shards = store.peek().shards
        positions = tuple(
            replace(each, epoch=shards[each.shard_id].epoch, previous=shards[each.shard_id].position)
            for each in flush.positions
        )
        return register(store, replace(flush, positions=positions))

    patch.setattr(SqliteStore, "register", unfenced)


def checkpoint_before_register(patch: pytest.MonkeyPatch) -> None:
    """What is in memory is checkpointed."""

    def ahead(session: ShardSession) -> Sequence | None:
        return session.position.accepted if session.alive and session.position.delivered else None

    patch.setattr(ShardSession, "checkpoint_due", ahead)


def await_between_check_and_act(patch: pytest.MonkeyPatch) -> None:
    """All that is buffered is durable; then others run; then the buffer is emptied."""
    flush: Callable[..., Any] = Coordinator._flush

    async def late(coordinator: Coordinator, *args: Any) -> bool:
        complete: bool = await flush(coordinator, *args)
        await coordinator.clock.sleep(0.01)
        if complete:
            coordinator.buffer.remove(coordinator.buffer.snapshot())
        return complete

    patch.setattr(Coordinator, "_flush", late)


def deliver_twice(patch: pytest.MonkeyPatch) -> None:
    """What is delivered again is taken for new."""
    patch.setattr(ShardSession, "after", None)


def never_holds(patch: pytest.MonkeyPatch) -> None:
    """However short memory is, every daemon is answered."""
    patch.setattr(Backpressure, "is_held", lambda _holding, _session: False)


def children_without_floor(patch: pytest.MonkeyPatch) -> None:
    """A shard's times do not go on where its parents ended."""
    patch.setattr(Lineage, "floor_ms", lambda lineage, shard_id: lineage.nodes[shard_id].effective_ms)


def watermark_goes_back(patch: pytest.MonkeyPatch) -> None:
    """The watermark is the least of the shards, whatever it was before."""

    def commit(watermark: Watermark, view: View) -> None:
        if view.watermark_ms is not None:
            watermark._watermark_ms = view.watermark_ms

    patch.setattr(Watermark, "_reached", lambda _watermark, value: value)
    patch.setattr(Watermark, "commit", commit)
