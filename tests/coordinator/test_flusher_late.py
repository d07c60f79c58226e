"""Late rows at the writing side: they wait for a revision, or go to the late dataset; retention."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from coordinator.writing import W, Writing, publish, zero
from support.store import SqliteStore

from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.ledger.contract import (
    Flush,
    PositionUpdate,
    Segment,
    SegmentKind,
    ServerState,
    ShardState,
    WindowState,
    batch_id,
)
from mldserver.records import Sequence
from mldserver.windows import TimeWindows, batches

pytestmark = pytest.mark.quick


@pytest.fixture
async def again(tmp_path: Path) -> AsyncIterator[Writing]:
    made = await Writing.begin(tmp_path, TimeWindows(10_000), recompute=True)
    yield made
    made.ledger.store.close()


async def published_window(writing: Writing) -> ShardState:
    """Publish the first window, with one row, and retain it."""
    shard = await writing.ledger.open_shard("a")
    await writing.flush([writing.batch(shard, (1, 1000))])
    await writing.flusher.cut(10_000, close_all=False)
    await publish(writing, W[0], retain=True)
    return shard


async def test_late_rows_of_a_retained_window_wait_for_its_next_revision(
    again: Writing, logged: list[dict[str, Any]]
) -> None:
    shard = await published_window(again)
    flushed = await again.flush([again.batch(shard, (2, 2000), (3, 25_000))])
    entry = again.registered().windows[W[0]]
    assert [(each.kind, each.rows) for each in entry.pending] == [(SegmentKind.RECOMPUTE, 1)]
    assert again.files()[f"{W[0]}/again-{zero(1)}"] == [2]
    assert (
        flushed.bytes
        == sum(each.bytes for w in again.registered().windows.values() for each in (*w.pending, *w.segments))
        - entry.segments[0].bytes
    )
    assert [
        (event["window"], event["rows"], event["kind"]) for event in logged if event["event"] == "window.late"
    ] == [(W[0], 1, "recompute")]
    assert (again.flusher.rows_late, len(again.flusher.cut_windows.due_ms)) == (1, 1)


async def test_a_window_is_cut_again_once_its_late_rows_have_been_gathered_for_the_delay(
    again: Writing,
) -> None:
    shard = await published_window(again)
    await again.flush([again.batch(shard, (2, 2000))])
    await again.clock.advance(4.9)
    assert await again.flusher.cut(10_000, close_all=False) == ()
    await again.flush([again.batch(shard, (3, 3000))])
    await again.clock.advance(0.1)
    (entry,) = await again.flusher.cut(10_000, close_all=False)
    assert (entry.window_id, entry.revision, len(entry.segments), entry.pending) == (W[0], 2, 3, ())
    assert again.flusher.cut_windows.due_ms == {}


async def test_when_every_window_closes_late_rows_do_not_wait(again: Writing) -> None:
    shard = await published_window(again)
    await again.flush([again.batch(shard, (2, 2000), (3, 25_000))])
    entries = await again.flusher.cut(None, close_all=True)
    assert [(entry.window_id, entry.revision) for entry in entries] == [(W[2], 1), (W[0], 2)]


async def test_a_window_that_is_still_being_computed_is_cut_again_after_it_is_published(
    again: Writing,
) -> None:
    shard = await again.ledger.open_shard("a")
    await again.flush([again.batch(shard, (1, 1000))])
    await again.flusher.cut(10_000, close_all=False)
    await again.flush([again.batch(shard, (2, 2000))])
    assert await again.flusher.cut(None, close_all=True) == ()
    assert len(again.flusher.cut_windows.due_ms) == 1
    await publish(again, W[0], retain=True)
    (entry,) = await again.flusher.cut(None, close_all=True)
    assert entry.revision == 2


async def test_late_rows_of_a_window_that_expired_elsewhere_go_to_the_late_dataset(
    again: Writing, logged: list[dict[str, Any]]
) -> None:
    shard = await published_window(again)
    again.ledger.store.expire(
        published_before_ms=0, keep_bytes=0
    )  # by another server: this one does not know
    await again.flush([again.batch(shard, (2, 2000))])
    refused = [event for event in logged if event["event"] == "flush.refused"]
    assert [event["expired_windows"] for event in refused] == [[W[0]]]
    assert [each.rows for each in again.registered().late_segments] == [1]
    await again.flush([again.batch(shard, (3, 3000))])
    assert len([event for event in logged if event["event"] == "flush.refused"]) == 1


async def test_windows_expire_by_age_and_their_files_are_deleted(
    again: Writing, logged: list[dict[str, Any]]
) -> None:
    shard = await published_window(again)
    now_ms = again.clock.now_ms()
    assert await again.retention.expire(now_ms + 1, 0) == 0, "asked a moment ago"
    await again.clock.advance(61)
    assert await again.retention.expire(now_ms, 0) == 0, "not old enough"
    await again.clock.advance(61)
    assert await again.retention.expire(now_ms + 1, 0) > 0
    assert again.files() == {}
    expired = [event for event in logged if event["event"] == "window.expired"]
    assert [(event["windows"], event["segments"]) for event in expired] == [(1, 1)]
    await again.flush([again.batch(shard, (2, 2000))])
    assert again.files() == {f"{W[0]}/late-{zero(1)}": [2]}


async def test_windows_expire_at_once_when_segments_take_more_than_their_share(again: Writing) -> None:
    await published_window(again)
    assert await again.retention.expire(0, 1_000_001) == 0, "there is room for what is retained itself"
    again.retention.rules = CoordinatorRules(retention_bytes=0)
    assert await again.retention.expire(0, 1_000_001) > 0
    assert again.files() == {}


async def test_what_other_servers_did_is_learned(again: Writing) -> None:
    shard = await published_window(again)
    other = SqliteStore(again.out / "ledger.sqlite", pipeline="test", server_id="two")
    state = other.open(now_ms=again.clock.now_ms())
    far = Flush(
        (PositionUpdate("b", other.open_shard("b").epoch, Sequence(1), 1, 1),),
        (
            Segment("x", W[3], 1, 1, 30_000, 40_000),
            Segment("y", W[0], 1, 1, 0, 10_000, SegmentKind.RECOMPUTE),
        ),
        clock=500,
    )
    assert other.register(far, now_ms=0).registered
    told = ServerState("one", again.clock.now_ms())
    again.restore(await again.ledger.sync(told))
    assert len(again.flusher.cut_windows.due_ms) == 1
    entries = await again.flusher.cut(None, close_all=True)
    assert [(entry.window_id, entry.revision) for entry in entries] == [(W[3], 1), (W[0], 2)]
    await again.flush([again.batch(shard, (2, 50_000))])
    assert again.registered().clock == 501
    assert state.windows[W[0]].state is WindowState.PUBLISHED
    other.close()


async def test_rows_come_to_rest_in_one_flush_for_however_many_windows_that_are_over_and_not_remembered(
    again: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = await again.ledger.open_shard("a")
    rows = [(n, 10_000 * n) for n in range(4)]
    await again.flush([again.batch(shard, *rows)])
    await again.flusher.cut(40_000, close_all=False)
    for window in W:
        await publish(again, window)
    monkeypatch.setattr("mldserver.coordinator.core.open_windows._REMEMBERED", 3)
    again.restore(await again.ledger.sync(ServerState("one", 1)))
    async with asyncio.timeout(800):
        await again.flush([again.batch(shard, *((4 + n, ms) for n, ms in rows))])
    assert [each.window_id for each in again.registered().late_segments] == W
    assert again.flusher.rows_late == 4


async def test_rows_for_batches_that_another_server_cut_go_to_the_next_one(tmp_path: Path) -> None:
    writing = await Writing.begin(tmp_path, batches(max_rows=10), recompute=True)
    shard = await writing.ledger.open_shard("a")
    await writing.flush([writing.batch(shard, (1, 1000))])
    writing.ledger.store.cut((batch_id(0),))  # by another server: this one does not know
    await writing.flush([writing.batch(shard, (2, 2000))])
    assert writing.registered().windows.keys() == {batch_id(0), batch_id(1)}
    assert writing.flusher.rows_late == 0
    writing.ledger.store.close()
