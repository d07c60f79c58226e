"""Rules of the coordinator that no other test checks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from coordinator.outcomes import outcome
from coordinator.pipeline import RULES, Pipeline

from mldserver.config.settings import WindowSettings
from mldserver.coordinator.core.flush import BufferedBatch, buffered, plan
from mldserver.coordinator.core.ledger_view import LedgerView
from mldserver.coordinator.core.lineage import Lineage
from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.coordinator.core.watermark import Holder, View, Watermark
from mldserver.coordinator.membership import Membership
from mldserver.errors import WindowFailed
from mldserver.ledger.contract import BatchProgress, LedgerState, SegmentKind, ServerState
from mldserver.output import joined
from mldserver.output.layout import SEGMENTS, is_joined
from mldserver.output.store import OutputStore
from mldserver.records import Sequence
from mldserver.testing import LocalEngine, VirtualClock
from mldserver.windows import TimeWindows

pytestmark = pytest.mark.quick

# The event time of a position.


def showing(shard: str, number: int, event_ms: int | None) -> BufferedBatch:
    """Return a batch of one record that has shown this event time."""
    batch = buffered(shard, 1, outcome(shard, [(number, number)]), floor_ms=None, spec=TimeWindows(1000))
    return msgspec.structs.replace(batch, latest_event_ms=event_ms)


@pytest.mark.parametrize(
    "times", [[50, 100], [100, 50], [100, None], [None, -5], [None, None], [1, 9, 3, None, 2]]
)
def test_the_event_time_of_a_position_is_the_largest(times: list[int | None]) -> None:
    """However late the last batch's rows are, the shard's watermark goes on where it stood."""
    batches = [showing("a", number, ms) for number, ms in enumerate(times, 1)]
    batches += [showing("b", 1, 7), BufferedBatch("a", 1, last=Sequence(len(times)), ends_shard=True)]
    planned = plan(
        batches,
        spec=TimeWindows(1000),
        clock=0,
        progress=BatchProgress(),
        now_ms=0,
        durable={},
        kind=lambda _key: SegmentKind.WINDOW,
    )
    told = {each.shard_id: each.event_ms for each in planned.positions}
    assert told == {"a": max((ms for ms in times if ms is not None), default=None), "b": 7}


# Shards that are let go.


def member(ledger: Any) -> Membership:
    lineage = Lineage()
    return Membership(
        ledger=ledger,
        view=LedgerView(ledger.server_id),
        lineage=lineage,
        watermark=Watermark(CoordinatorRules(), lineage, 0),
        clock=VirtualClock(0),
        timeout_ms=1000,
        locks=None,
    )


class Releases:
    """A ledger that takes its time to release shards, and what happens meanwhile."""

    server_id = "one"

    def __init__(self) -> None:
        self.released: list[tuple[str, int]] = []
        self.meanwhile: Callable[[], None] = lambda: None

    async def release_shard(self, shard_id: str, epoch: int) -> None:
        await asyncio.sleep(0)
        self.released.append((shard_id, epoch))
        self.meanwhile()
        self.meanwhile = lambda: None


async def test_a_newer_release_is_not_forgotten() -> None:
    """A shard that is opened and let go again while the first release is under way is released under both epochs.

    Else the ledger holds it as this server's, and every other server waits for it.
    """
    ledger: Any = Releases()
    membership = member(ledger)
    membership.released["a"] = 1
    membership.released["b"] = 1
    ledger.meanwhile = lambda: membership.released.update(a=2)
    await membership.release()
    assert ledger.released == [("a", 1), ("b", 1)]
    await membership.release()
    assert ledger.released == [("a", 1), ("b", 1), ("a", 2)]
    await membership.release()
    assert len(ledger.released) == 3, "once each"


# What beats tell while a shard is opened.


class Beats:
    """A ledger that hears what a server tells of itself."""

    server_id = "one"

    def __init__(self) -> None:
        self.heard: list[ServerState] = []

    def time_ms(self) -> int:
        return 1000

    async def sync(self, own: ServerState, _since: int) -> LedgerState:
        self.heard.append(own)
        return LedgerState()


async def test_a_view_is_told_only_while_it_counts_on_every_shard() -> None:
    """From the moment in which a shard is opened no view is told that was taken before its opening had ended.

    Else other servers, who know already that this one has the shard, take it for as far as the others are.
    """
    ledger = Beats()
    membership, view = member(ledger), View(500, Holder("a", "behind"), own_ms=500)

    async def told() -> str:
        await membership.sync()
        return ledger.heard[-1].reason

    assert await told() == "settling"
    membership.mark()
    membership.report(view)
    assert (await told(), ledger.heard[-1].watermark_ms) == ("behind", 500)
    with membership.opening():
        assert (await told(), ledger.heard[-1].watermark_ms) == ("settling", None)
        membership.mark()
        membership.report(view)
        assert await told() == "settling", "the view was taken while it was opened"
        membership.mark()
    membership.report(view)
    assert await told() == "settling", "the view was taken while it was opened"
    membership.mark()
    with membership.opening():
        pass
    membership.report(view)
    assert await told() == "settling", "the view was taken before it was opened"
    membership.mark()
    with membership.opening():
        with membership.opening():
            pass
        membership.mark()
    membership.report(view)
    assert await told() == "settling", "one of two was opened still"
    membership.mark()
    membership.report(view)
    assert await told() == "behind"


async def test_a_view_is_not_told_while_a_shard_is_opened(tmp_path: Path) -> None:
    """The ledger may take long to open it, and its rows may be older than what the view says."""
    pipeline, told = Pipeline(tmp_path), list[str]()

    def hook(name: str, after: bool) -> None:
        if name == "open_shard" and not after:
            told.append(pipeline.coordinator._membership._state().reason)

    async with pipeline.life():
        await pipeline.give(await pipeline.open("a"), [(1, 1000)])
        await pipeline.clock.advance(5)
        assert pipeline.coordinator._membership._state().reason == "behind"
        pipeline.faults.hook = hook
        await pipeline.open("b")
    assert told == ["settling"]


# Heartbeats.


async def test_no_two_beats_are_equal() -> None:
    """By their difference other servers see that this one lives, though time stands still."""
    ledger = Beats()
    membership = member(ledger)
    for _ in range(3):
        await membership.sync()
    assert len({each.beat_ms for each in ledger.heard}) == 3


# What a cycle flushes.


async def test_what_comes_during_the_sync_waits_for_the_next_cycle(tmp_path: Path) -> None:
    """The merge clock that a sync brings need not lie behind rows which its shard has from another server by then."""
    pipeline, given, durable = Pipeline(tmp_path), list[bool](), list[Any]()

    def hook(name: str, after: bool) -> None:
        if name == "sync" and after and not given:
            made = outcome("a", [(2, 2000)], after=session.after)
            session.batch_began()
            given.append(session.accept_batch(made, pipeline.clock.steady_ms()))
        elif name == "register" and after:
            durable.append(pipeline.state().shards["a"].position)

    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        pipeline.faults.hook = hook
        await pipeline.clock.advance(5)
        pipeline.faults.hook = None
    assert durable[:2] == [Sequence(1), Sequence(2)]


# A disk that no window can free.


async def test_everyone_waits_where_no_open_window_can_free_the_disk(tmp_path: Path) -> None:
    """What fills it is of a window that was set aside: the shard that holds the watermark would only add to it."""
    pipeline = Pipeline(
        tmp_path,
        engine=lambda: LocalEngine(fail=lambda _: WindowFailed("It cannot be computed.")),
        policy=WindowSettings(window_attempts=1, window_on_failure="dead_letter"),
        rules=replace(RULES, segment_disk_bytes=1),
    )
    async with pipeline.life() as coordinator, asyncio.TaskGroup() as group:
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        await pipeline.cycle()
        assert not coordinator._backpressure.held, "its window may close, if it goes on"
        giving = group.create_task(pipeline.give(session, [(2, 25_000)]))
        await pipeline.clock.advance(4)
        assert (coordinator.status().windows_set_aside, coordinator.status().windows_open) == (1, 1)
        coordinator._backpressure.weigh()
        held = coordinator._backpressure.held
        await session.finish()
        await giving
    assert held == {"a"}


# Joined files.


async def test_joined_files_go_when_their_window_is_published(tmp_path: Path) -> None:
    """Retention deletes what the ledger names, and it names none of them."""
    pipeline = Pipeline(tmp_path, recompute=True)
    store = OutputStore(str(tmp_path))

    def joined_now() -> list[str]:
        return [path for path, _ in store.files(SEGMENTS) if is_joined(path)]

    async with pipeline.life():
        session = await pipeline.open("a")
        for number in range(1, 2 * joined.SEGMENTS_PER_FILE + 1):
            await pipeline.give(session, [(number, 1000 + number)])
            await pipeline.cycle()
        assert joined_now()
        await pipeline.give(session, [(100, 25_000)])
        await pipeline.clock.advance(5)
        assert pipeline.published(), "its segments are retained"
        left = joined_now()
    assert left == []
