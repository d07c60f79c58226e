"""Rules that could once be broken without a test noticing: each holds, and its bug, planted, is found."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from coordinator.outcomes import outcome

from mldserver.coordinator.core import flush
from mldserver.coordinator.core.flush import BufferedBatch, buffered, plan
from mldserver.coordinator.core.lineage import Lineage
from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.coordinator.core.watermark import Holder, View, Watermark
from mldserver.coordinator.membership import Membership
from mldserver.ledger.contract import BatchProgress, LedgerState, PositionUpdate, SegmentKind
from mldserver.records import Sequence
from mldserver.testing import VirtualClock
from mldserver.windows import Tumbling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from mldserver.ledger.contract import ServerState


# The event time of a position.


def showing(shard: str, number: int, event_ms: int | None) -> BufferedBatch:
    """Return a batch of one record that has shown this event time."""
    batch = buffered(shard, 1, outcome(shard, [(number, number)]), floor_ms=None, spec=Tumbling(1000))
    return msgspec.structs.replace(batch, latest_event_ms=event_ms)


def the_event_time_of_a_position_is_the_largest(times: list[int | None]) -> None:
    """However late the last batch's rows are, the shard's watermark goes on where it stood."""
    batches = [showing("a", number, ms) for number, ms in enumerate(times, 1)]
    batches += [showing("b", 1, 7), BufferedBatch("a", 1, last=Sequence(len(times)), ends_shard=True)]
    planned = plan(
        batches,
        spec=Tumbling(1000),
        clock=0,
        progress=BatchProgress(),
        now_ms=0,
        durable={},
        kind=lambda _key: SegmentKind.WINDOW,
    )
    told = {each.shard_id: each.event_ms for each in planned.positions}
    assert told == {"a": max((ms for ms in times if ms is not None), default=None), "b": 7}


TIMES: list[list[int | None]] = [
    [50, 100],
    [100, 50],
    [100, None],
    [None, -5],
    [None, None],
    [1, 9, 3, None, 2],
]


def the_event_times_are_the_largest() -> None:
    for times in TIMES:
        the_event_time_of_a_position_is_the_largest(times)


def test_the_event_time_of_a_position_is_the_largest() -> None:
    the_event_times_are_the_largest()


def test_the_event_time_of_the_last_batch_in_its_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = flush._positions

    def last(
        batches: Iterable[BufferedBatch], durable: Mapping[str, Sequence | None]
    ) -> tuple[PositionUpdate, ...]:
        batches = list(batches)
        latest = {each.shard_id: each.latest_event_ms for each in batches if each.latest_event_ms is not None}
        found = positions(batches, durable)
        return tuple(
            PositionUpdate(
                each.shard_id,
                each.epoch,
                each.position,
                each.effective_ms,
                latest.get(each.shard_id),
                ended=each.ended,
            )
            for each in found
        )

    monkeypatch.setattr(flush, "_positions", last)
    with pytest.raises(AssertionError):
        the_event_times_are_the_largest()


# Shards that are let go.


def member(ledger: Any) -> Membership:
    lineage = Lineage()
    return Membership(
        ledger=ledger,
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


async def a_newer_release_is_not_forgotten() -> None:
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


async def test_a_newer_release_is_not_forgotten() -> None:
    await a_newer_release_is_not_forgotten()


async def test_a_newer_release_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forgetful(membership: Membership) -> None:
        for shard_id, epoch in tuple(membership.released.items()):
            await membership.ledger.release_shard(shard_id, epoch)
            membership.released.pop(shard_id, None)

    monkeypatch.setattr(Membership, "release", forgetful)
    with pytest.raises(AssertionError):
        await a_newer_release_is_not_forgotten()


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


async def a_view_is_told_only_while_it_counts_on_every_shard() -> None:
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
    membership.tell(view)
    assert (await told(), ledger.heard[-1].watermark_ms) == ("behind", 500)
    with membership.opening():
        assert (await told(), ledger.heard[-1].watermark_ms) == ("settling", None)
        membership.mark()
        membership.tell(view)
        assert await told() == "settling", "the view was taken while it was opened"
        membership.mark()
    membership.tell(view)
    assert await told() == "settling", "the view was taken while it was opened"
    membership.mark()
    with membership.opening():
        pass
    membership.tell(view)
    assert await told() == "settling", "the view was taken before it was opened"
    membership.mark()
    with membership.opening():
        with membership.opening():
            pass
        membership.mark()
    membership.tell(view)
    assert await told() == "settling", "one of two was opened still"
    membership.mark()
    membership.tell(view)
    assert await told() == "behind"


async def test_a_view_is_told_only_while_it_counts_on_every_shard() -> None:
    await a_view_is_told_only_while_it_counts_on_every_shard()


@pytest.mark.parametrize("kept", ["_statement", "_counted"])
async def test_a_view_that_is_told_of_a_shard_that_it_does_not_count_is_found(
    monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    @contextlib.contextmanager
    def opening(membership: Membership) -> Iterator[None]:
        before = getattr(membership, kept)
        with right(membership):
            setattr(membership, kept, before)
            yield

    right = Membership.opening
    monkeypatch.setattr(Membership, "opening", opening)
    with pytest.raises(AssertionError):
        await a_view_is_told_only_while_it_counts_on_every_shard()
