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
from tests.ledger.samples import BATCH, HUGE, W1, W2, held, late, letter, move, opened, seg

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


async def test_a_registration_whose_answer_was_lost_is_not_repeated(ledger_factory: Factory) -> None:
    flush = Flush((move(),), (), Effects(dead_letters=(letter(1),)), clock=9)
    async with opened(ledger_factory) as (ledger, _):
        await ledger.open_shard("a")
        assert (await ledger.register(flush)).registered
        assert (await ledger.register(flush)).lost_shards == {"a"}
    assert (await held(ledger_factory)).dead_letters == 1


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


def put_in(since: BatchProgress, until: BatchProgress, *segments: Segment) -> Flush:
    return Flush((), segments, batches=BatchStep(since, until, max_rows=10))


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


async def test_a_child_goes_on_with_the_parked_keys_of_all_its_ancestors(ledger_factory: Factory) -> None:
    letters = (letter(5), letter(2, shard_id="b"), letter(3, shard_id="b", partition_key="other"))
    async with opened(ledger_factory) as (ledger, _):
        await ledger.open_shard("b", ("a",))
        await ledger.open_shard("c", ("b", "pruned"))
        await ledger.register(Flush((), effects=Effects(dead_letters=letters)))
        key = letters[0].partition_key
        assert await ledger.parked_keys("c") == {key: letters[1].sequence, "other": letters[2].sequence}
        assert await ledger.parked_keys("a") == {key: letters[0].sequence}, (
            "a parent has none of its children's"
        )


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
