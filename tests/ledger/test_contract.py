"""What any Ledger must do with shards, flushes and dead letters. New kinds join the fixture ``ledger_factory``."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from mldserver.effects import Effects
from mldserver.errors import InternalError, LedgerVersionError
from mldserver.ledger.contract import (
    BatchProgress,
    BatchStep,
    Flush,
    FlushResult,
    LedgerState,
    Segment,
    ShardState,
    WindowEntry,
    WindowState,
)
from mldserver.records import Sequence
from tests.ledger.samples import BATCH, DIGITS_56, HUGE, W1, W2, held, late, letter, move, opened, seg

if TYPE_CHECKING:
    from tests.ledger.samples import Factory


async def test_a_new_ledger_holds_nothing(ledger_factory: Factory) -> None:
    async with opened(ledger_factory):
        assert await held(ledger_factory) == LedgerState()


async def test_each_opening_of_a_shard_raises_its_epoch_across_restarts_too(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        assert (await ledger.open_shard("a")).epoch == 1
        assert (await ledger.open_shard("a")).epoch == 2
        assert (await ledger.open_shard("b")).epoch == 1
    async with opened(ledger_factory) as (ledger, _):
        assert await ledger.open_shard("a") == ShardState("a", epoch=3, owner="one")


async def test_parents_stay_until_others_are_given(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        assert (await ledger.open_shard("c", ("a", "b"))).parents == ("a", "b")
        assert (await ledger.open_shard("c")).parents == ("a", "b")
        assert (await ledger.open_shard("c", ("x",))).parents == ("x",)


async def test_an_opening_touches_no_position_and_no_other_shard(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.open_shard("a")
        await ledger.register(Flush((move(effective_ms=5, event_ms=4, ended=True),)))
        await ledger.open_shard("b", ("a",))
        await ledger.open_shard("a")
    assert (await held(ledger_factory)).shards == {
        "a": ShardState("a", 2, HUGE, 5, 4, ended_ms=1_000, owner="one"),
        "b": ShardState("b", 1, parents=("a",), owner="one"),
    }


async def test_an_ended_shard_stays_ended(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.open_shard("a")
        await ledger.end_shards(frozenset({"a", "never-seen"}))
        await ledger.register(Flush((move(ended=False),)))
        assert (await ledger.open_shard("a")).ended
        assert (await ledger.open_shard("never-seen")).epoch == 1
    assert all(shard.ended for shard in (await held(ledger_factory)).shards.values())


async def test_a_flush_is_registered_whole_and_survives_a_restart(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.open_shard("a")
        flush = Flush(
            (move(effective_ms=70, event_ms=60),),
            (seg("s1", rows=2), seg("s2", W2), late("l1"), seg("s3", rows=3)),
            Effects(dead_letters=(letter(1),)),
            clock=41,
            batches=BatchStep(BatchProgress(), BatchProgress(7, 100, 99), 1000),
        )
        assert (await ledger.register(flush)) == FlushResult()
    assert await held(ledger_factory) == LedgerState(
        shards={"a": ShardState("a", 1, HUGE, 70, 60, owner="one")},
        windows={
            W1: WindowEntry(
                W1, WindowState.OPEN, 0, 10_000, segments=(seg("s1", rows=2), seg("s3", rows=3)), rows_in=5
            ),
            W2: WindowEntry(W2, WindowState.OPEN, 10_000, 20_000, segments=(seg("s2", W2),), rows_in=5),
        },
        late_segments=(late("l1"),),
        clock=41,
        batch_progress=BatchProgress(7, 100, 99),
        dead_letters=1,
    )


@pytest.mark.parametrize("epoch", [1, 3])
async def test_only_the_latest_epoch_moves_a_position(ledger_factory: Factory, epoch: int) -> None:
    async with opened(ledger_factory) as (ledger, _):
        for shard in ("a", "a", "b"):
            await ledger.open_shard(shard)
        flush = Flush(
            (move(epoch=epoch), move("b")),
            (seg("s1"), late("l1")),
            Effects(dead_letters=(letter(1),)),
            clock=9,
        )
        assert (await ledger.register(flush)) == FlushResult(lost_shards=frozenset("a"))
    state = await held(ledger_factory)
    assert state == LedgerState(
        shards={"a": ShardState("a", 2, owner="one"), "b": ShardState("b", 1, owner="one")}
    )


@pytest.mark.parametrize("previous", [None, Sequence(9), Sequence(10, 1), Sequence(11)])
async def test_a_position_goes_on_only_from_where_the_ledger_stands(
    ledger_factory: Factory, previous: Sequence | None
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.open_shard("a")
        await ledger.register(Flush((move(position=Sequence(10)),)))
        before = await held(ledger_factory)
        flush = Flush((move(previous=previous),), (seg("s1"),), Effects(dead_letters=(letter(1),)), clock=9)
        assert (await ledger.register(flush)) == FlushResult(lost_shards=frozenset("a"))
    assert await held(ledger_factory) == before


async def test_a_registration_whose_answer_was_lost_is_not_repeated(ledger_factory: Factory) -> None:
    flush = Flush((move(),), (), Effects(dead_letters=(letter(1),)), clock=9)
    async with opened(ledger_factory) as (ledger, _):
        await ledger.open_shard("a")
        assert (await ledger.register(flush)).registered
        assert (await ledger.register(flush)).lost_shards == {"a"}
    assert (await held(ledger_factory)).dead_letters == 1


async def test_a_shard_that_nobody_knows_is_lost(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        assert (await ledger.register(Flush((move("z"),)))).lost_shards == {"z"}


@pytest.mark.parametrize(
    ("stored", "given"),
    [
        (Sequence(10), Sequence(9)),
        (HUGE, Sequence(DIGITS_56, 2)),
        (HUGE, Sequence(9 * 10**54, 9)),
        (Sequence(1), None),
    ],
)
async def test_a_position_never_goes_down(
    ledger_factory: Factory, stored: Sequence, given: Sequence | None
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        for shard in ("a", "b"):
            await ledger.open_shard(shard)
        await ledger.register(Flush((move(position=stored),)))
        before = await held(ledger_factory)
        with pytest.raises(InternalError, match="shard a would go back"):
            await ledger.register(
                Flush((move("b"), move(position=given, previous=stored)), (seg("s1"),), clock=3)
            )
        assert await held(ledger_factory) == before


async def test_positions_are_compared_as_numbers(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.open_shard("a")
        previous = None
        for position in (
            None,
            Sequence(9),
            Sequence(9),
            Sequence(10),
            Sequence(10, 9),
            Sequence(10, 10),
            HUGE,
        ):
            update = move(position=position, previous=previous)
            assert (await ledger.register(Flush((update,)))).registered
            previous = position
    assert (await held(ledger_factory)).shards["a"].position == HUGE


async def test_times_and_the_clock_never_go_back(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.open_shard("a")
        await ledger.register(Flush((move(effective_ms=70, event_ms=60),), clock=9))
        await ledger.register(Flush((move(effective_ms=69, previous=HUGE),), clock=8))
    state = await held(ledger_factory)
    assert (state.shards["a"].effective_ms, state.shards["a"].event_ms, state.clock) == (70, 60, 9)


def put_in(since: BatchProgress, until: BatchProgress, *segments: Segment) -> Flush:
    return Flush((), segments, batches=BatchStep(since, until, max_rows=10))


async def test_batches_stand_where_the_last_flush_ended(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.register(put_in(BatchProgress(), BatchProgress(3, 5, 9)))
        await ledger.register(Flush(()))
    assert (await held(ledger_factory)).batch_progress == BatchProgress(3, 5, 9)
    async with opened(ledger_factory) as (ledger, _):
        await ledger.register(put_in(BatchProgress(3, 5, 9), BatchProgress(4)))
    assert (await held(ledger_factory)).batch_progress == BatchProgress(4, 0, None)


async def test_what_several_servers_put_into_a_batch_adds_up(ledger_factory: Factory) -> None:
    begun = BatchProgress(1)
    async with opened(ledger_factory) as (one, _), opened(ledger_factory, "two") as (two, _):

        async def stands_after(
            ledger: Any, since: BatchProgress, until: BatchProgress, *segments: Segment
        ) -> BatchProgress:
            assert (await ledger.register(put_in(since, until, *segments))).registered
            return (await held(ledger_factory)).batch_progress

        await one.register(put_in(BatchProgress(), begun))
        # Both have planned on from the same place.
        await stands_after(one, begun, BatchProgress(1, 4, 100), seg("s1", BATCH, rows=4))
        stands = await stands_after(two, begun, BatchProgress(1, 3, 200), seg("s2", BATCH, rows=3))
        assert stands == BatchProgress(1, 7, 100)
        # Each keeps the bound by what it knew; together they exceed it, and the batch is full.
        since = BatchProgress(1, 4, 100)
        stands = await stands_after(one, since, BatchProgress(1, 9, 100), seg("s3", BATCH, rows=5))
        assert stands == BatchProgress(2)
        # What was planned for a batch that is full and not cut yet goes there; who puts nothing in changes nothing.
        since = BatchProgress(1, 7, 100)
        assert await stands_after(two, since, BatchProgress(1, 8, 100), seg("s4", BATCH, rows=1)) == stands
        assert await stands_after(two, since, since) == stands
        # Both have begun the next batch.
        until = BatchProgress(2, 2, 300)
        assert await stands_after(two, since, until, seg("s5", BATCH, rows=5)) == until
        assert await stands_after(one, since, BatchProgress(2, 1, 400)) == BatchProgress(2, 3, 300)


async def test_a_file_is_registered_once(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.open_shard("a")
        await ledger.register(Flush((), (seg("s1"),)))
        with pytest.raises(InternalError):
            await ledger.register(Flush((move(),), (seg("s2"), seg("s1"))))
    state = await held(ledger_factory)
    assert state.shards["a"].position is None
    assert state.windows[W1].segments == (seg("s1"),)
    assert set(state.windows) == {W1}


async def test_ended_shards_are_pruned_by_when_they_ended_first(ledger_factory: Factory, clock: Any) -> None:
    async with opened(ledger_factory) as (ledger, _):
        for shard in ("a", "b"):
            await ledger.open_shard(shard)
        await ledger.register(Flush((move(ended=True), move("b"))))
        clock.ms += 100
        assert (await ledger.register(Flush((move(ended=True, previous=HUGE),)))).registered
        assert await ledger.prune(windows_before_ms=0, shards_before_ms=1_000) == 0
        assert await ledger.prune(windows_before_ms=0, shards_before_ms=1_001) == 1
        assert (await ledger.register(Flush((move(),)))).lost_shards == {"a"}
    assert set((await held(ledger_factory)).shards) == {"b"}


async def test_ended_shards_that_are_to_be_kept_are_not_pruned(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.end_shards(frozenset({"a", "b", "c"}))
        kept = frozenset({"a", "c", "unknown"})
        assert await ledger.prune(windows_before_ms=0, shards_before_ms=10**15, keep_shards=kept) == 1
        assert await ledger.prune(windows_before_ms=0, shards_before_ms=10**15, keep_shards=kept) == 0
    assert set((await held(ledger_factory)).shards) == {"a", "c"}


BEHIND = letter(3, parked_behind=HUGE, handler_version="sha256:0123456789ab")


async def test_dead_letters_come_back_as_they_went_in_oldest_first(ledger_factory: Factory) -> None:
    letters = (letter(1), letter(2, partition_key=None, arrival_ms=None, data=b""), BEHIND)
    async with opened(ledger_factory) as (ledger, _):
        await ledger.register(Flush((), effects=Effects(dead_letters=letters[:2])))
        await ledger.register(Flush((), effects=Effects(dead_letters=letters[2:])))
    async with opened(ledger_factory) as (ledger, state):
        assert state.dead_letters == 3
        assert await ledger.dead_letters() == letters
        assert await ledger.dead_letters(2) == letters[:2]


async def test_the_keys_of_a_shards_dead_letters_are_parked_behind_the_first_of_the_shard_wherever_it_is_stored(
    ledger_factory: Factory,
) -> None:
    letters = (letter(5), letter(2), letter(3, partition_key="other"), letter(4, partition_key=None))
    async with opened(ledger_factory) as (ledger, _):
        assert await ledger.parked_keys("a") == {}
        await ledger.register(Flush((), effects=Effects(dead_letters=letters[:1])))
        await ledger.register(Flush((), effects=Effects(dead_letters=letters[1:])))
    async with opened(ledger_factory) as (ledger, _):
        shard, key = letters[0].shard_id, letters[0].partition_key
        assert await ledger.parked_keys(shard) == {key: letters[1].sequence, "other": letters[2].sequence}
        assert await ledger.parked_keys("another") == {}


async def test_no_text_of_a_handler_keeps_a_dead_letter_out(ledger_factory: Factory) -> None:
    odd = letter(1, error="E: \udc80\x00", traceback="\ud800", partition_key="k\udfff", handler="\udcfe.py")
    async with opened(ledger_factory) as (ledger, _):
        await ledger.register(Flush((), effects=Effects(dead_letters=(odd,))))
        (kept,) = await ledger.dead_letters()
    assert (kept.error, kept.traceback, kept.partition_key, kept.handler, kept.data) == (
        "E: \\udc80\x00",
        "\\ud800",
        "k\\udfff",
        "\\udcfe.py",
        odd.data,
    )


async def test_a_pipeline_never_sees_the_ledger_of_another(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await ledger.open_shard("a")
    before = await held(ledger_factory)
    other = ledger_factory(pipeline="other")
    try:
        # A file is of one pipeline, and refused; a table may be of several.
        with contextlib.suppress(LedgerVersionError):
            assert not (await other.open()).shards
            await other.open_shard("b")
    finally:
        await other.close()
    assert await held(ledger_factory) == before


async def test_no_call_follows_the_close(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        pass
    with pytest.raises(InternalError, match="closed"):
        await ledger.open_shard("a")
    await ledger.close()
