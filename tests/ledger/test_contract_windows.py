"""What any Ledger must do with a window from its first segment to its pruning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mldserver.effects import Effects
from mldserver.errors import InternalError
from mldserver.ledger.contract import (
    BatchProgress,
    BatchStep,
    Commit,
    Flush,
    FlushResult,
    LedgerState,
    Segment,
    ServerState,
    WindowEntry,
    WindowState,
)
from tests.ledger.samples import (
    BATCH,
    W1,
    W2,
    attempted,
    bring_to,
    entry,
    held,
    late,
    letter,
    more,
    move,
    opened,
    peeked,
    seg,
    take_to,
)

if TYPE_CHECKING:
    from tests.ledger.samples import Factory


@pytest.mark.parametrize("state", [state for state in WindowState if state is not WindowState.OPEN])
async def test_a_window_that_is_cut_takes_no_more_rows(ledger_factory: Factory, state: WindowState) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.open_shard("a")
        await bring_to(ledger, state)
        before = await held(ledger_factory)
        flush = Flush((move(),), (seg("s2"), seg("s3", W2)), Effects(dead_letters=(letter(1),)), clock=5)
        assert (await ledger.register(flush)) == FlushResult(cut_windows=frozenset({W1}))
        assert await held(ledger_factory) == before


async def test_an_open_window_keeps_its_bounds(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.register(Flush((), (seg("s1"),)))
        with pytest.raises(InternalError, match="other bounds"):
            await ledger.register(Flush((), (Segment("s2", W1, 1, 1, 0, 5_000),)))
    assert (await held(ledger_factory)).windows[W1].segments == (seg("s1"),)


async def test_a_cut_fixes_the_segments_and_leaves_out_windows_that_are_not_open(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.COMMITTED, W2, "s0")
        await ledger.register(Flush((), (seg("s2"), seg("s1"), seg("b", BATCH, rows=9))))
        entries = await ledger.cut((BATCH, W1, W2, "unknown", W1))
        assert entries == (
            WindowEntry(
                BATCH,
                WindowState.CUT,
                owner="one",
                segments=(seg("b", BATCH, rows=9, revision=1),),
                rows_in=9,
            ),
            WindowEntry(
                W1,
                WindowState.CUT,
                0,
                10_000,
                owner="one",
                segments=(seg("s2", revision=1), seg("s1", revision=1)),
                rows_in=10,
            ),
        )
        assert await entry(ledger_factory) == entries[1]


async def test_attempts_are_counted_across_restarts(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.CUT)
        await ledger.begin_attempts((W1,))
        assert await ledger.begin_attempts((W1,)) == {W1: 2}
    async with opened(ledger_factory) as (ledger, state):
        assert state.windows[W1].attempt == 2
        await ledger.adopt()
        assert await ledger.begin_attempts((W1,)) == {W1: 3}


async def test_attempts_at_a_group_are_counted_together_those_that_cannot_be_are_left_out(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        for window, path in ((W1, "s1"), (W2, "s2")):
            await bring_to(ledger, WindowState.CUT, window, path)
        await bring_to(ledger, WindowState.OPEN, BATCH, "s3")
        await ledger.begin_attempts((W2,))
        assert await ledger.begin_attempts((W1, BATCH, "none", W2)) == {W1: 1, W2: 2}
        assert await ledger.begin_attempts(()) == {}
        windows = (await held(ledger_factory)).windows
        assert [windows[each].attempt for each in (W1, W2, BATCH)] == [1, 2, 0]


@pytest.mark.parametrize("state", [None, *(state for state in WindowState if state is not WindowState.CUT)])
async def test_an_attempt_needs_a_window_that_is_cut(
    ledger_factory: Factory, state: WindowState | None
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        if state:
            await bring_to(ledger, state)
        before = (await held(ledger_factory)).windows
        assert await ledger.begin_attempts((W1,)) == {}
        await ledger.set_aside(W1, "no")
        assert (await held(ledger_factory)).windows == before


async def test_only_the_latest_attempt_at_a_cut_window_commits(ledger_factory: Factory) -> None:
    def output(attempt: int) -> tuple[Commit]:
        return (Commit(W1, attempt, f"stage/{attempt}", ("f1", "f2"), 3),)

    async with opened(ledger_factory) as (ledger, _):
        assert not await ledger.commit(output(0))
        await bring_to(ledger, WindowState.OPEN)
        assert not await ledger.commit(output(0))
        await ledger.cut((W1,))
        await ledger.begin_attempts((W1,))
        await ledger.begin_attempts((W1,))
        assert not await ledger.commit(output(1))
        assert not await ledger.commit(output(3))
        assert await ledger.commit(output(2)) == {W1}
        assert not await ledger.commit(output(2))
        assert await entry(ledger_factory) == WindowEntry(
            W1,
            WindowState.COMMITTED,
            0,
            10_000,
            attempt=2,
            owner="one",
            segments=(seg("s1", revision=1),),
            staging="stage/2",
            files=("f1", "f2"),
            rows_in=5,
            rows_out=3,
        )


async def test_windows_commit_and_are_published_together_but_for_those_that_cannot(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.CUT, W1, "s1")
        await bring_to(ledger, WindowState.CUT, W2, "s2")
        await bring_to(ledger, WindowState.CUT, BATCH, "s3")
        stale = await attempted(ledger, W2)
        outputs = (await attempted(ledger, W1), stale, await attempted(ledger, BATCH))
        await ledger.begin_attempts((W2,))
        assert await ledger.commit(outputs) == {W1, BATCH}
        assert await ledger.commit(()) == frozenset()
        assert await ledger.published({W2: 1, BATCH: 1, "unknown": 1, W1: 1}) == ()
    windows = (await held(ledger_factory)).windows
    assert {each.window_id: each.state for each in windows.values()} == {
        W1: WindowState.PUBLISHED,
        W2: WindowState.CUT,
        BATCH: WindowState.PUBLISHED,
    }


async def test_a_published_window_keeps_its_segments_while_it_is_retained(
    ledger_factory: Factory, clock: Any
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.COMMITTED)
        clock.ms = 7_000
        assert await ledger.published({W1: 1}) == ()
        clock.ms = 8_000
        assert await ledger.published({W1: 1}) == ()
    assert await entry(ledger_factory) == WindowEntry(
        W1,
        WindowState.PUBLISHED,
        0,
        10_000,
        attempt=1,
        segments=(seg("s1", revision=1),),
        published_ms=7_000,
        files=("f1", "f2"),
        rows_in=5,
        rows_out=2,
    )


async def test_publishing_frees_the_segments_of_windows_that_are_not_to_be_retained(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.COMMITTED, W1, "s1")
        await bring_to(ledger, WindowState.COMMITTED, W2, "s2")
        freed = (seg("s1", revision=1), seg("s2", W2, revision=1))
        assert await ledger.published({W1: 1, W2: 1}, retain=False) == freed
        assert await ledger.published({W1: 1, W2: 1}, retain=False) == ()
        assert (await held(ledger_factory)).windows == {}
        # They are out of the state, and cut all the same.
        assert (await ledger.register(Flush((), (seg("s3"),)))).cut_windows == {W1}


@pytest.mark.parametrize(
    "state", [None, *(state for state in WindowState if state is not WindowState.COMMITTED)]
)
async def test_only_what_is_committed_is_published(
    ledger_factory: Factory, state: WindowState | None
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        if state:
            await bring_to(ledger, state)
        before = (await held(ledger_factory)).windows
        for attempt in (0, 1):
            assert await ledger.published({W1: attempt}, retain=False) == ()
        assert (await held(ledger_factory)).windows == before


async def test_who_repeats_a_publication_does_not_show_the_revision_that_another_committed_meanwhile(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory) as (one, _), opened(ledger_factory, "two") as (two, _):
        await bring_to(one, WindowState.PUBLISHED)
        await one.register(Flush((), (more("r1"),)))
        await take_to(two, WindowState.COMMITTED)
        before = await entry(ledger_factory)
        # The answer to the first was lost, say. Nor does the right attempt help a server that has not made it.
        for attempt in (1, 2, 3):
            assert await one.published({W1: attempt}, retain=False) == ()
        assert await two.published({W1: 1}, retain=False) == ()
        assert await entry(ledger_factory) == before
    # Both die: the revision is there for the next to show.
    async with opened(ledger_factory) as (one, _):
        assert await one.bury({"two": 1_000}) == {"two"}
        (adopted,) = await one.adopt()
        assert (adopted.state, adopted.revision) == (WindowState.COMMITTED, 2)
        await one.published({W1: adopted.attempt})
    shown = await entry(ledger_factory)
    assert (shown.state, shown.revision) == (WindowState.PUBLISHED, 2)


async def test_a_window_that_was_set_aside_is_run_again_on_request(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.CUT)
        assert not await ledger.decide(W1, "retry")
        await ledger.begin_attempts((W1,))
        await ledger.set_aside(W1, "Boom: no \udcff")
        aside = await entry(ledger_factory)
        assert (aside.state, aside.error, aside.owner) == (WindowState.SET_ASIDE, "Boom: no \\udcff", None)
        assert aside.segments == (seg("s1", revision=1),)
        assert await ledger.cut((W1,)) == ()
        assert await ledger.adopt() == ()
        assert await ledger.decide(W1, "retry")
        assert not await ledger.decide(W1, "retry")
        assert not await ledger.decide("unknown", "retry")
        (again,) = await ledger.adopt()
        assert (again.state, again.attempt, again.error, again.owner) == (WindowState.CUT, 1, None, "one")
        assert await ledger.begin_attempts((W1,)) == {W1: 2}


async def test_a_halted_window_keeps_its_error_until_it_commits_and_again_until_it_is_published(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        assert not await ledger.halt(W1, "no", first=True)
        await bring_to(ledger, WindowState.CUT)
        assert not (await entry(ledger_factory)).is_halted
        assert await ledger.halt(W1, "Boom: no \udcff", first=True)
        assert await ledger.halt(W1, "Boom: still no", first=False)
        halted = await entry(ledger_factory)
        assert (halted.state, halted.error, halted.owner) == (WindowState.CUT, "Boom: still no", "one")
        assert halted.is_halted
        output = await attempted(ledger)
        assert (await entry(ledger_factory)).is_halted, "a try is not a success"
        await ledger.commit((output,))
        assert not (await entry(ledger_factory)).is_halted
        assert await ledger.halt(W1, "no table", first=True)
        assert (await entry(ledger_factory)).is_halted
        await ledger.published({W1: 1})
        assert (await entry(ledger_factory)).error is None
        assert not await ledger.halt(W1, "late", first=True)


async def test_only_the_server_that_has_a_window_halts_it_and_the_next_learns_why(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory) as (one, _), opened(ledger_factory, "two") as (two, _):
        await bring_to(one, WindowState.CUT)
        assert not await two.halt(W1, "no", first=True)
        assert await one.halt(W1, "no", first=True)
        await one.leave()
        (adopted,) = await two.adopt()
        assert (adopted.error, adopted.owner) == ("no", "two")


async def test_a_retry_of_a_halted_window_clears_its_error_which_its_server_learns_with_the_next_one(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory) as (ledger, state), peeked(ledger_factory) as (tool, _):
        for window, path, at in ((W1, "s1", WindowState.CUT), (W2, "s2", WindowState.COMMITTED)):
            await bring_to(ledger, at, window, path)
            assert not await tool.decide(window, "retry")
            await ledger.halt(window, "no", first=True)
            assert await tool.decide(window, "retry")
            assert not await tool.decide(window, "retry")
            found = await entry(ledger_factory, window)
            assert (found.state, found.error, found.owner) == (at, None, "one")
            assert not await ledger.halt(window, "the try before", first=False)
            assert (await entry(ledger_factory, window)).error is None
        news = await ledger.sync(ServerState("one", 9), state.version)
        assert [each.error for each in news.windows.values()] == [None, None]


async def test_a_halted_window_is_set_aside_on_request_with_its_segments_and_its_error(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory) as (ledger, _), peeked(ledger_factory) as (tool, _):
        await bring_to(ledger, WindowState.CUT)
        assert not await tool.decide(W1, "set_aside")
        output = await attempted(ledger)
        await ledger.halt(W1, "no", first=True)
        assert await tool.decide(W1, "set_aside")
        assert not await tool.decide(W1, "set_aside")
        aside = await entry(ledger_factory)
        assert (aside.state, aside.error, aside.owner) == (WindowState.SET_ASIDE, "no", None)
        assert aside.segments == (seg("s1", revision=1),)
        assert not await ledger.commit((output,))
        assert not await ledger.halt(W1, "no", first=True)
        assert await tool.decide(W1, "retry")
        assert [each.error for each in await ledger.adopt()] == [None]


@pytest.mark.parametrize("aside", [False, True])
async def test_a_skipped_window_counts_as_published_without_output(
    ledger_factory: Factory, clock: Any, aside: bool
) -> None:
    async with opened(ledger_factory) as (ledger, _), peeked(ledger_factory) as (tool, _):
        assert not await tool.decide("unknown", "skip")
        await bring_to(ledger, WindowState.CUT)
        assert not await tool.decide(W1, "skip")
        output = await attempted(ledger)
        await ledger.halt(W1, "no", first=True)
        if aside:
            await ledger.set_aside(W1, "no")
        clock.ms = 7_000
        assert await tool.decide(W1, "skip")
        assert not await tool.decide(W1, "skip")
        assert not await ledger.commit((output,))
        assert await entry(ledger_factory) == WindowEntry(
            W1,
            WindowState.PUBLISHED,
            0,
            10_000,
            attempt=1,
            segments=(seg("s1", revision=1),),
            published_ms=7_000,
            rows_in=5,
            error="no",
        )
        assert [each.path for each in await ledger.expire(published_before_ms=7_001, keep_bytes=100)] == [
            "s1"
        ]


async def test_a_revision_that_is_skipped_leaves_what_readers_see(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.PUBLISHED)
        await ledger.register(Flush((), (more("r1"),)))
        await take_to(ledger, WindowState.CUT)
        await ledger.halt(W1, "no", first=True)
        assert await ledger.decide(W1, "skip")
        shown = await entry(ledger_factory)
        assert (shown.state, shown.revision, shown.files) == (WindowState.PUBLISHED, 2, ("f1", "f2"))


async def test_a_published_window_is_computed_again_as_its_next_revision_while_its_segments_are_there(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory) as (ledger, _), peeked(ledger_factory) as (tool, _):
        assert not await tool.decide("unknown", "recompute")
        await bring_to(ledger, WindowState.CUT)
        assert not await tool.decide(W1, "recompute")
        output = await attempted(ledger)
        await ledger.commit((output,))
        assert not await tool.decide(W1, "recompute")
        await ledger.published({W1: output.attempt})
        await ledger.register(Flush((), (more("r1"),)))
        assert await tool.decide(W1, "recompute")
        assert not await tool.decide(W1, "recompute")
        (again,) = await ledger.adopt()
        assert (again.state, again.revision, again.pending) == (WindowState.CUT, 2, ())
        assert [(each.path, each.revision) for each in again.segments] == [("s1", 1), ("r1", 2)]
        # Until the new revision counts, readers see the one before.
        assert again.files == ("f1", "f2")
        output = await attempted(ledger)
        assert await ledger.commit((output,)) == {W1}
        await ledger.published({W1: output.attempt})
        assert await ledger.expire(published_before_ms=2**60, keep_bytes=0)
        assert not await tool.decide(W1, "recompute")


async def test_a_skipped_window_is_not_computed_again(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.CUT)
        await ledger.halt(W1, "no", first=True)
        assert await ledger.decide(W1, "skip")
        assert not await ledger.decide(W1, "recompute")


async def test_what_counts_already_is_neither_set_aside_nor_skipped(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.COMMITTED)
        await ledger.halt(W1, "no", first=True)
        assert not await ledger.decide(W1, "set_aside")
        assert not await ledger.decide(W1, "skip")
        assert (await entry(ledger_factory)).state is WindowState.COMMITTED


async def test_pruned_windows_stay_cut_for_rows_that_still_come(ledger_factory: Factory, clock: Any) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.register(Flush((), (seg("s1"), seg("s2", W2))))
        await take_to(ledger, WindowState.COMMITTED, W2)
        clock.ms = 25_000
        await ledger.published({W2: 1}, retain=False)
        assert await ledger.prune(windows_before_ms=25_000, shards_before_ms=25_000) == 0
        assert await ledger.prune(windows_before_ms=25_001, shards_before_ms=0) == 1
        assert await ledger.prune(windows_before_ms=29_000, shards_before_ms=0) == 0
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
        assert (await ledger.register(Flush((), (seg("s6"), late("s7", W2))))).registered


async def test_pruning_an_earlier_window_does_not_take_the_mark_back(
    ledger_factory: Factory, clock: Any
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.OPEN, W1, "s1")
        for window_id, path in ((W2, "s2"), (W1, "s3")):
            await bring_to(ledger, WindowState.COMMITTED, window_id, path)
            await ledger.published({window_id: 1}, retain=False)
            await ledger.prune(windows_before_ms=clock.ms + 20_000, shards_before_ms=0)
    state = await held(ledger_factory)
    assert (state.cut_below_ms, state.windows) == (20_000, {})


async def test_a_window_that_ends_in_the_future_is_not_forgotten_and_closes_no_other(
    ledger_factory: Factory, clock: Any
) -> None:
    def row(number: int) -> Segment:
        return Segment(f"s{number}", "2096", 1, 1, 4 * 10**12, 4 * 10**12 + 10_000)

    async with opened(ledger_factory) as (ledger, _):
        await ledger.register(Flush((), (row(1),)))
        await take_to(ledger, WindowState.COMMITTED, "2096")
        await ledger.published({"2096": 1}, retain=False)
        clock.ms += 1
        await bring_to(ledger, WindowState.COMMITTED)
        await ledger.published({W1: 1}, retain=False)
        # Those that stay do not count towards the limit: whatever is over behind them is forgotten.
        assert await ledger.prune(windows_before_ms=10**9, shards_before_ms=0, limit=1) == 1
        assert await ledger.prune(windows_before_ms=10**9, shards_before_ms=0) == 0
        assert (await held(ledger_factory)).cut_below_ms == 10_000
        # The future is open, but for the window that was cut: its rows are late, and its id is not given again.
        result = await ledger.register(Flush((), (row(2), seg("s3", W2))))
        assert result == FlushResult(cut_windows=frozenset({"2096"}))
        assert (await ledger.register(Flush((), (seg("s4", W2),)))).registered
        # Long after its end it goes as any other.
        assert await ledger.prune(windows_before_ms=4 * 10**12 + 9_999, shards_before_ms=0) == 0
        assert await ledger.prune(windows_before_ms=4 * 10**12 + 10_000, shards_before_ms=0) == 1
        assert (await held(ledger_factory)).cut_below_ms == 4 * 10**12 + 10_000


async def test_batches_are_pruned_by_the_time_they_were_published(
    ledger_factory: Factory, clock: Any
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.COMMITTED, BATCH)
        await ledger.published({BATCH: 1}, retain=False)
        assert await ledger.prune(windows_before_ms=clock.ms + 1, shards_before_ms=0) == 1
    assert await held(ledger_factory) == LedgerState(batch_progress=BatchProgress(2))


async def test_the_number_of_a_batch_that_is_cut_is_never_given_again(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.register(
            Flush((), (seg("s1", BATCH),), batches=BatchStep(BatchProgress(), BatchProgress(1, 5, 100), 9))
        )
        await ledger.cut((BATCH,))
        assert (await held(ledger_factory)).batch_progress == BatchProgress(2)
        # A server that has not heard of it goes on from what it knew.
        await ledger.register(
            Flush((), batches=BatchStep(BatchProgress(1, 5, 100), BatchProgress(1, 6, 100), 9))
        )
        assert (await held(ledger_factory)).batch_progress == BatchProgress(2)
        await ledger.register(
            Flush((), (seg("s2", W1),), batches=BatchStep(BatchProgress(2), BatchProgress(4, 5, 200), 9))
        )
        await ledger.register(Flush((), (more("r1", BATCH),)))
        await take_to(ledger, WindowState.CUT, W1)
        await ledger.commit((await attempted(ledger, BATCH),))
        await ledger.published({BATCH: 1})
        (again,) = await ledger.cut((BATCH,))
        assert again.revision == 2
        assert (await held(ledger_factory)).batch_progress == BatchProgress(4, 5, 200)


@pytest.mark.parametrize("state", WindowState)
async def test_windows_that_are_not_published_or_are_retained_are_never_pruned(
    ledger_factory: Factory, state: WindowState
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, state)
        assert await ledger.prune(windows_before_ms=10**15, shards_before_ms=10**15) == 0
        assert (await entry(ledger_factory)).state is state
