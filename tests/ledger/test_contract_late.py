"""What any Ledger must do with rows that come after the cut: revisions, retention, the late dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mldserver.effects import Effects
from mldserver.errors import InternalError
from mldserver.ledger.contract import (
    Flush,
    FlushResult,
    Segment,
    SegmentKind,
    ServerState,
    WindowEntry,
    WindowState,
)
from mldserver.ledger.operations import Ledger
from tests.ledger.samples import (
    BATCH,
    W1,
    W2,
    W3,
    attempted,
    bring_to,
    entry,
    held,
    late,
    letter,
    more,
    move,
    opened,
    seg,
    take_to,
)

if TYPE_CHECKING:
    from tests.ledger.samples import Factory

AFTER_THE_CUT = [state for state in WindowState if state is not WindowState.OPEN]


async def add(ledger: Ledger, *segments: Segment) -> None:
    assert (await ledger.register(Flush((), segments))).registered


@pytest.mark.parametrize("state", AFTER_THE_CUT)
async def test_rows_that_come_after_the_cut_wait_for_the_next_revision(
    ledger_factory: Factory, state: WindowState
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, state)
        await add(ledger, more("r1"), more("r2"))
        found = await entry(ledger_factory)
        assert (found.state, found.segments) == (state, (seg("s1", revision=1),))
        assert (found.pending, found.rows_in, found.revision) == ((more("r1"), more("r2")), 5, 1)


@pytest.mark.parametrize("state", [WindowState.CUT, WindowState.SET_ASIDE])
async def test_a_skipped_window_takes_its_late_rows_along_and_no_more_of_them(
    ledger_factory: Factory, clock: Any, state: WindowState
) -> None:
    async with opened(ledger_factory) as (ledger, opening):
        await bring_to(ledger, state)
        await add(ledger, more("r1"), more("r2"))
        await ledger.halt(W1, "it failed", first=True)
        clock.ms = 7_000
        assert await ledger.decide(W1, "skip")
        skipped = await entry(ledger_factory)
        assert (skipped.state, skipped.error, skipped.is_skipped) == (
            WindowState.PUBLISHED,
            "it failed",
            True,
        )
        assert (skipped.pending, skipped.rows_in, skipped.retained) == ((), 15, True)
        assert [(each.path, each.revision) for each in skipped.segments] == [("s1", 1), ("r1", 1), ("r2", 1)]
        assert (await ledger.sync(ServerState("one", 9), opening.version)).windows[W1] == skipped
        # Nothing computes it again.
        assert await ledger.cut((W1,)) == ()
        assert await ledger.adopt() == ()
        for decision in ("retry", "set_aside", "skip"):
            assert not await ledger.decide(W1, decision)
        later = Flush((), (more("r3"), more("r4", W1)))
        assert await ledger.register(later) == FlushResult(expired_windows=frozenset({W1}))
        await add(ledger, late("l1"))
        assert await entry(ledger_factory) == skipped
        # Its segments go as those of any other.
        freed = await ledger.expire(published_before_ms=7_001, keep_bytes=10**9)
        assert [each.path for each in freed] == ["s1", "r1", "r2"]
        assert await ledger.prune(windows_before_ms=10_001, shards_before_ms=0) == 1


async def test_a_published_window_is_cut_again_over_all_its_rows(ledger_factory: Factory, clock: Any) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.CUT)
        await add(ledger, more("r1"))
        output = await attempted(ledger)
        assert await ledger.cut((W1,)) == ()
        await ledger.commit((output,))
        assert await ledger.cut((W1,)) == ()
        clock.ms = 7_000
        await ledger.published({W1: 1})
        again = WindowEntry(
            W1,
            WindowState.CUT,
            0,
            10_000,
            revision=2,
            attempt=1,
            owner="one",
            segments=(seg("s1", revision=1), more("r1", revision=2)),
            published_ms=7_000,
            files=("f1", "f2"),
            rows_in=10,
            rows_out=2,
        )
        assert await ledger.cut((W1,)) == (again,)
        assert await entry(ledger_factory) == again
        await add(ledger, more("r2"))
        assert (await attempted(ledger)).attempt == 2
    # The next revision is as durable as the first.
    async with opened(ledger_factory) as (ledger, _):
        (adopted,) = await ledger.adopt()
        assert (adopted.segments, adopted.pending) == (again.segments, (more("r2"),))
        await ledger.commit((await attempted(ledger),))
        clock.ms = 9_000
        await ledger.published({W1: 3})
        found = await entry(ledger_factory)
        assert (found.revision, found.published_ms, found.attempt) == (2, 9_000, 3)
        (third,) = await ledger.cut((W1,))
    assert (third.revision, third.rows_in) == (3, 15)
    assert third.segments == (*again.segments, more("r2", revision=3))


async def test_a_published_window_without_late_rows_is_not_cut_again(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.PUBLISHED)
        assert await ledger.cut((W1,)) == ()
        assert (await entry(ledger_factory)).state is WindowState.PUBLISHED


async def test_batches_take_late_rows_too(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.PUBLISHED, BATCH)
        await add(ledger, more("r1", BATCH))
        (again,) = await ledger.cut((BATCH,))
    assert again.segments == (seg("s1", BATCH, revision=1), more("r1", BATCH, revision=2))


async def test_late_rows_of_a_window_that_was_set_aside_are_in_the_revision_after_its_retry(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.SET_ASIDE)
        await add(ledger, more("r1"))
        await ledger.decide(W1, "retry")
        (first,) = await ledger.adopt()
        assert (first.revision, first.segments, first.pending) == (
            1,
            (seg("s1", revision=1),),
            (more("r1"),),
        )
        await ledger.commit((await attempted(ledger),))
        await ledger.published({W1: 2})
        (second,) = await ledger.cut((W1,))
    assert (second.revision, second.rows_in) == (2, 10)


async def test_a_revision_that_is_set_aside_leaves_what_is_visible_told(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.PUBLISHED)
        await add(ledger, more("r1"))
        await take_to(ledger, WindowState.SET_ASIDE)
    found = await entry(ledger_factory)
    assert (found.state, found.revision, found.files, found.rows_out) == (
        WindowState.SET_ASIDE,
        2,
        ("f1", "f2"),
        2,
    )
    assert found.published_ms == 1_000


async def test_late_rows_of_an_open_window_are_a_bug(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.OPEN)
        with pytest.raises(InternalError, match="is open"):
            await ledger.register(Flush((), (seg("s2"), more("r1"))))
        assert (await entry(ledger_factory)).segments == (seg("s1"),)


async def test_late_rows_keep_the_bounds_of_their_window(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.CUT)
        with pytest.raises(InternalError, match="other bounds"):
            await ledger.register(Flush((), (Segment("r1", W1, 1, 1, 0, 5_000, SegmentKind.RECOMPUTE),)))
        assert (await entry(ledger_factory)).pending == ()


async def test_late_rows_are_refused_when_their_window_is_not_retained_or_unknown(
    ledger_factory: Factory, clock: Any
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.open_shard("a")
        await bring_to(ledger, WindowState.COMMITTED, W1, "s1")
        await ledger.published({W1: 1}, retain=False)
        await bring_to(ledger, WindowState.PUBLISHED, W2, "s2")
        before = await held(ledger_factory)
        flush = Flush(
            (move(),),
            (more("r1"), more("r2", W2), more("r3", W3)),
            Effects(dead_letters=(letter(1),)),
            clock=9,
        )
        assert await ledger.register(flush) == FlushResult(expired_windows=frozenset({W1, W3}))
        assert await held(ledger_factory) == before
        await ledger.prune(windows_before_ms=clock.ms + 1, shards_before_ms=0)
        assert (await ledger.register(Flush((), (more("r1"),)))).expired_windows == {W1}


async def test_a_refusal_tells_every_reason_at_once(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        for shard in ("a", "a", "b", "b", "c"):
            await ledger.open_shard(shard)
        await bring_to(ledger, WindowState.CUT, W1, "s1")
        await bring_to(ledger, WindowState.PUBLISHED, W2, "s2")
        segments = (
            seg("s3"),
            seg("s4", W2),
            more("s5", W1),
            more("s6", W3),
            late("s7", W3),
            seg("s8", BATCH),
        )
        result = await ledger.register(Flush((move("a"), move("b"), move("c")), segments))
    assert result == FlushResult(frozenset({"a", "b"}), frozenset({W1, W2}), frozenset({W3}))
    assert set((await held(ledger_factory)).windows) == {W1, W2}


async def publish_each(ledger: Ledger, clock: Any, *window_ids: str) -> None:
    """Publish windows of 500 bytes a second apart, from 1000 on."""
    for window_id in window_ids:
        await bring_to(ledger, WindowState.PUBLISHED, window_id, f"s-{window_id}")
        clock.ms += 1_000


async def test_retention_ends_by_the_time_of_publishing(ledger_factory: Factory, clock: Any) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await publish_each(ledger, clock, W2, W1, W3)
        assert await ledger.expire(published_before_ms=1_000, keep_bytes=10**9) == ()
        assert await ledger.expire(published_before_ms=2_001, keep_bytes=10**9) == (
            seg(f"s-{W2}", W2, revision=1),
            seg(f"s-{W1}", W1, revision=1),
        )
        assert await ledger.expire(published_before_ms=2_001, keep_bytes=10**9) == ()
        assert set((await held(ledger_factory)).windows) == {W3}
        assert await ledger.prune(windows_before_ms=10**9, shards_before_ms=0) == 2


@pytest.mark.parametrize(
    ("keep_bytes", "gone"), [(1_500, []), (1_499, [W2]), (1_000, [W2]), (999, [W2, W1]), (0, [W2, W1, W3])]
)
async def test_retention_ends_for_the_oldest_beyond_a_number_of_bytes(
    ledger_factory: Factory, clock: Any, keep_bytes: int, gone: list[str]
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await publish_each(ledger, clock, W2, W1, W3)
        # What is not published is no retention, however large it is.
        await bring_to(ledger, WindowState.CUT, BATCH, "big")
        freed = await ledger.expire(published_before_ms=0, keep_bytes=keep_bytes)
        assert [each.window_id for each in freed] == gone
        assert set((await held(ledger_factory)).windows) == {W1, W2, W3, BATCH} - set(gone)


async def test_a_revision_starts_its_window_s_retention_anew(ledger_factory: Factory, clock: Any) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await publish_each(ledger, clock, W1, W2)
        await add(ledger, more("r1"))
        await take_to(ledger, WindowState.PUBLISHED)
        freed = await ledger.expire(published_before_ms=2_001, keep_bytes=10**9)
        assert [each.path for each in freed] == [f"s-{W2}"]
        freed = await ledger.expire(published_before_ms=3_001, keep_bytes=10**9)
        assert [each.path for each in freed] == [f"s-{W1}", "r1"]


async def test_windows_with_rows_that_wait_stay_retained(ledger_factory: Factory, clock: Any) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await publish_each(ledger, clock, W1, W2)
        await bring_to(ledger, WindowState.COMMITTED, W3, "s3")
        await add(ledger, more("r1"), more("r3", W3))
        freed = await ledger.expire(published_before_ms=10**9, keep_bytes=0)
        assert [each.window_id for each in freed] == [W2]
        assert await ledger.published({W3: 1}, retain=False) == ()
        windows = (await held(ledger_factory)).windows
        assert {each: windows[each].pending for each in windows} == {W1: (more("r1"),), W3: (more("r3", W3),)}


async def test_late_files_are_listed_until_they_are_visible(ledger_factory: Factory) -> None:
    files = tuple(late(f"l{n}", window) for n, window in enumerate((W1, W2, W1)))
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.CUT)
        await add(ledger, *files)
    async with opened(ledger_factory) as (ledger, state):
        assert state.late_segments == files
        assert state.windows[W1].segments == (seg("s1", revision=1),)
        assert W2 not in state.windows
        await ledger.late_published(("l0", "l2", "never-there"))
        await ledger.late_published(("l0",))
    assert (await held(ledger_factory)).late_segments == (files[1],)
