"""What any Ledger must do with windows, segments and the late dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mldserver.errors import InternalError
from mldserver.state.ledger import (
    Flush,
    FlushResult,
    LedgerState,
    Segment,
    WindowEntry,
    WindowState,
)
from tests.state.samples import W1, W2, bring_to, held, letter, move, opened, seg

if TYPE_CHECKING:
    from tests.state.samples import Factory


@pytest.mark.parametrize("state", [state for state in WindowState if state is not WindowState.OPEN])
async def test_a_window_that_is_cut_takes_no_more_rows(ledger_factory: Factory, state: WindowState) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.open_shard("a")
        await bring_to(ledger, state)
    before = await held(ledger_factory)
    async with opened(ledger_factory) as (ledger, _):
        flush = Flush((move(),), (seg("s2"), seg("s3", W2)), (letter(1),), clock=5)
        assert (await ledger.register(flush)) == FlushResult(cut_windows=frozenset({W1}))
    assert await held(ledger_factory) == before


async def test_a_refusal_tells_every_reason_at_once(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        for shard in ("a", "a", "b", "b", "c"):
            await ledger.open_shard(shard)
        await bring_to(ledger, WindowState.CUT, W1, "s1")
        await bring_to(ledger, WindowState.PUBLISHED, W2, "s2")
        result = await ledger.register(
            Flush(
                (move("a"), move("b"), move("c")), (seg("s3"), seg("s4", W2), seg("s5", "batch-000000000001"))
            )
        )
    assert result == FlushResult(frozenset({"a", "b"}), frozenset({W1, W2}))


async def test_an_open_window_keeps_its_bounds(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.register(Flush((), (seg("s1"),)))
        with pytest.raises(InternalError, match="other bounds"):
            await ledger.register(Flush((), (Segment("s2", W1, 1, 1, 0, 5_000),)))
    assert (await held(ledger_factory)).windows[W1].segments == (seg("s1"),)


async def test_late_files_are_listed_until_they_are_visible(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.CUT)
        late = tuple(seg(f"l{n}", window, late=True) for n, window in enumerate((W1, W2, W1)))
        assert (await ledger.register(Flush((), late))).registered
    async with opened(ledger_factory) as (ledger, state):
        assert state.late_segments == late
        assert state.windows[W1].segments == (seg("s1"),)
        assert W2 not in state.windows
        await ledger.late_published(("l0", "l2", "never-there"))
        await ledger.late_published(("l0",))
    assert (await held(ledger_factory)).late_segments == (late[1],)


async def test_a_cut_fixes_the_segments_and_leaves_out_windows_that_are_not_open(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.COMMITTED, W2, "s0")
        await ledger.register(Flush((), (seg("s2"), seg("s1"), seg("b", "batch-000000000001", rows=9))))
        entries = await ledger.cut(("batch-000000000001", W1, W2, "unknown", W1))
        assert entries == (
            WindowEntry(
                "batch-000000000001",
                WindowState.CUT,
                segments=(seg("b", "batch-000000000001", rows=9),),
                rows_in=9,
            ),
            WindowEntry(W1, WindowState.CUT, 0, 10_000, segments=(seg("s2"), seg("s1")), rows_in=10),
        )
    assert (await held(ledger_factory)).windows[W1] == entries[1]


async def test_attempts_are_counted_and_bring_a_set_aside_window_back(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.CUT)
        assert [await ledger.begin_attempt(W1), await ledger.begin_attempt(W1)] == [1, 2]
        await ledger.set_aside(W1, "Boom: no \udcff")
    async with opened(ledger_factory) as (ledger, state):
        entry = state.windows[W1]
        assert (entry.state, entry.error) == (WindowState.SET_ASIDE, "Boom: no \\udcff")
        assert entry.segments == (seg("s1"),)
        assert await ledger.cut((W1,)) == ()
        assert await ledger.begin_attempt(W1) == 3
    entry = (await held(ledger_factory)).windows[W1]
    assert (entry.state, entry.attempt, entry.error) == (WindowState.CUT, 3, None)


@pytest.mark.parametrize("state", [None, WindowState.OPEN, WindowState.COMMITTED, WindowState.PUBLISHED])
async def test_an_attempt_needs_a_window_that_is_cut(
    ledger_factory: Factory, state: WindowState | None
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        if state:
            await bring_to(ledger, state)
        with pytest.raises(InternalError, match=f"is {state or 'unknown'}, not cut or set_aside"):
            await ledger.begin_attempt(W1)
        with pytest.raises(InternalError):
            await ledger.set_aside(W1, "no")


async def test_only_the_latest_attempt_at_a_cut_window_commits(ledger_factory: Factory) -> None:
    output = {"staging": "stage/2", "files": ("f1", "f2"), "rows_out": 3}
    async with opened(ledger_factory) as (ledger, _):
        assert not await ledger.commit(W1, attempt=0, **output)
        await bring_to(ledger, WindowState.OPEN)
        assert not await ledger.commit(W1, attempt=0, **output)
        await ledger.cut((W1,))
        await ledger.begin_attempt(W1)
        await ledger.set_aside(W1, "no")
        assert not await ledger.commit(W1, attempt=1, **output)
        await ledger.begin_attempt(W1)
        assert not await ledger.commit(W1, attempt=1, **output)
        assert not await ledger.commit(W1, attempt=3, **output)
        assert await ledger.commit(W1, attempt=2, **output)
        assert not await ledger.commit(W1, attempt=2, **output)
    assert (await held(ledger_factory)).windows[W1] == WindowEntry(
        W1,
        WindowState.COMMITTED,
        0,
        10_000,
        attempt=2,
        segments=(seg("s1"),),
        staging="stage/2",
        files=("f1", "f2"),
        rows_in=5,
        rows_out=3,
    )


async def test_publishing_frees_the_segments_and_keeps_the_window(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.COMMITTED)
        assert await ledger.published(W1) == (seg("s1"),)
        assert await ledger.published(W1) == ()
    assert (await held(ledger_factory)).windows[W1] == WindowEntry(
        W1, WindowState.PUBLISHED, 0, 10_000, attempt=1, files=("f1", "f2"), rows_in=5, rows_out=2
    )


@pytest.mark.parametrize("state", [None, WindowState.OPEN, WindowState.CUT, WindowState.SET_ASIDE])
async def test_only_what_is_committed_is_published(
    ledger_factory: Factory, state: WindowState | None
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        if state:
            await bring_to(ledger, state)
        with pytest.raises(InternalError, match="not committed or published"):
            await ledger.published(W1)


async def test_pruned_windows_stay_cut_for_rows_that_still_come(ledger_factory: Factory, clock: Any) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.register(Flush((), (seg("s1"), seg("s2", W2))))
        clock.ms = 5_000
        await ledger.cut((W2,))
        await ledger.begin_attempt(W2)
        await ledger.commit(W2, attempt=1, staging="x", files=(), rows_out=0)
        await ledger.published(W2)
        assert await ledger.prune(windows_before_ms=5_000, shards_before_ms=5_000) == 0
        assert await ledger.prune(windows_before_ms=5_001, shards_before_ms=0) == 1
        assert await ledger.prune(windows_before_ms=9_000, shards_before_ms=0) == 0
    async with opened(ledger_factory) as (ledger, state):
        assert set(state.windows) == {W1}
        assert state.cut_below_ms == 20_000
        refused = (
            seg("s3", W2),
            Segment("s4", "empty", 1, 1, 12_000, 19_000),
        )
        result = await ledger.register(Flush((), (*refused, Segment("s5", "next", 1, 1, 20_000, 30_000))))
        assert result.cut_windows == {W2, "empty"}
        # W1 still has an entry of its own, and that says open.
        assert (await ledger.register(Flush((), (seg("s6"), seg("s7", W2, late=True))))).registered


async def test_pruning_an_earlier_window_does_not_take_the_mark_back(
    ledger_factory: Factory, clock: Any
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.OPEN, W1, "s1")
        await bring_to(ledger, WindowState.PUBLISHED, W2, "s2")
        await ledger.prune(windows_before_ms=clock.ms + 1, shards_before_ms=0)
        await bring_to(ledger, WindowState.PUBLISHED, W1, "s3")
        await ledger.prune(windows_before_ms=clock.ms + 1, shards_before_ms=0)
    state = await held(ledger_factory)
    assert (state.cut_below_ms, state.windows) == (20_000, {})


async def test_batches_are_pruned_by_the_time_they_were_published(
    ledger_factory: Factory, clock: Any
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.PUBLISHED, "batch-000000000001")
        assert await ledger.prune(windows_before_ms=clock.ms + 1, shards_before_ms=0) == 1
    assert await held(ledger_factory) == LedgerState()


@pytest.mark.parametrize("state", [state for state in WindowState if state is not WindowState.PUBLISHED])
async def test_windows_that_are_not_published_are_never_pruned(
    ledger_factory: Factory, state: WindowState
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, state)
        assert await ledger.prune(windows_before_ms=10**15, shards_before_ms=10**15) == 0
