"""Handlers that keep their position: their shard's moves as far as they have checkpointed, and no further."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator.outcomes import dead_letter, outcome
from coordinator.pipeline import Pipeline
from msgspec.structs import replace
from support.shards import accept

from mldserver.coordinator.core.flush import BufferedBatch, plan
from mldserver.coordinator.shards import IntakeSession
from mldserver.errors import LedgerError
from mldserver.ledger.contract import BatchProgress, PositionUpdate, SegmentKind
from mldserver.records import DeadLetter, Sequence

pytestmark = pytest.mark.quick

S = Sequence


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    return Pipeline(tmp_path, without_rows=True)


async def give(
    session: IntakeSession, numbers: list[int], position: int | None, letters: list[DeadLetter] | None = None
) -> None:
    """Deliver a batch; the handler has checkpointed up to ``position`` by its end."""
    made = outcome(
        session.shard_id,
        [(number, 1000) for number in numbers],
        after=session.after,
        rows=[],
        letters=letters,
    )
    session.batch_began()
    kept = replace(made, keeps_position=True, position=None if position is None else S(position))
    await accept(session, kept)


async def test_what_is_not_checkpointed_is_accepted_but_not_durable(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(session, [1, 2, 3], None)
        await pipeline.cycle()
        assert (session.after, session.position.durable, session.checkpoint_due()) == (S(3), None, None)
        await give(session, [4, 5], 2)
        assert session.checkpoint_due() is None
        await pipeline.cycle()
        assert session.checkpoint_due() == S(2)
        session.checkpointed(S(2))
        await give(session, [6], 2)
        await pipeline.cycle()
        assert (session.after, session.checkpoint_due()) == (S(6), None)
    assert pipeline.state().shards["a"].position == S(2)


async def test_an_empty_batch_may_bring_a_checkpoint(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(session, [1, 2], None)
        await give(session, [], 2)
        await pipeline.cycle()
        assert session.checkpoint_due() == S(2)


async def test_a_checkpoint_in_a_hook_is_durable_with_the_next_flush(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(session, [1, 2], 1)
        session.advance(S(2))
        session.advance(S(2))
        await session.drain()
        assert session.checkpoint_due() == S(2)
        session.disconnected()
        session.advance(S(3))
        assert not pipeline.coordinator.buffer


async def test_nothing_beyond_what_was_accepted_is_ever_claimed(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        session.advance(S(9))
        assert not pipeline.coordinator.buffer
        await give(session, [1, 2], 5)
        await session.drain()
        assert session.position.durable == S(2)


async def test_a_new_connection_gets_again_what_was_not_checkpointed(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(session, [1, 2, 3], 1)
        await pipeline.cycle()
        assert (await pipeline.open("a")).after == S(1)


async def test_checkpoints_that_were_not_durable_yet_die_with_their_connection(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(session, [1, 2, 3], 1)
        await pipeline.cycle()
        await give(session, [4], 4)
        again = await pipeline.open("a", S(1))
        assert again.after == S(1)
        await give(again, [2, 3], 3)
        await again.drain()
        assert again.checkpoint_due() == S(3)


async def test_the_end_of_a_shard_needs_no_checkpoint(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(session, [1, 2, 3], 1)
        assert await session.end()
    shard = pipeline.state().shards["a"]
    assert (shard.position, shard.ended) == (S(3), True)


async def test_dead_letters_are_stored_though_the_position_stands_still(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(session, [1, 2], 1)
        await give(session, [3], 1, [dead_letter("a", 3)])
        await pipeline.cycle()
        assert pipeline.coordinator.status().dead_letters == 1
    assert pipeline.stored_dead_letters() == [("a", S(3))]
    assert pipeline.state().shards["a"].position == S(1)


async def test_a_dead_letter_is_not_lost_when_the_answer_to_a_flush_was(pipeline: Pipeline) -> None:
    lost = [True]

    def hook(called: str, after: bool) -> None:
        if called == "register" and after and lost.pop():
            lost.append(False)
            raise OSError("the answer is lost")

    async with pipeline.life():
        session = await pipeline.open("a")
        await give(session, [1, 2], 1)
        pipeline.faults.hook = hook
        await pipeline.cycle()
        await give(session, [3], 1, [dead_letter("a", 3)])
        pipeline.faults.hook = None
        await pipeline.clock.advance(5)
    assert pipeline.stored_dead_letters() == [("a", S(3))]
    assert pipeline.state().shards["a"].position == S(1)


async def test_a_dead_letter_is_stored_once_though_the_answer_to_its_flush_was_lost(
    pipeline: Pipeline,
) -> None:
    lost = 0

    def hook(called: str, after: bool) -> None:
        nonlocal lost
        if called == "register" and after and lost < 3:
            lost += 1
            raise LedgerError("the answer is lost")

    letters = [dead_letter("a", 3), dead_letter("a", 3), dead_letter("a", 4)]
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(session, [1, 2], 1)
        await pipeline.cycle()
        pipeline.faults.hook = hook
        await give(session, [3], 1, letters[:2])
        await pipeline.cycle()
        await give(session, [4], 1, letters[2:])
        await pipeline.clock.advance(20)
        assert lost == 3
        await give(session, [5], 1, [dead_letter("a", 5)])
        await pipeline.cycle()
    assert pipeline.stored_dead_letters() == [("a", S(3)), ("a", S(3)), ("a", S(4)), ("a", S(5))]


async def test_a_dead_letter_is_stored_though_its_first_flush_failed_before_it_took_effect(
    pipeline: Pipeline,
) -> None:
    lost = [True]

    def hook(called: str, after: bool) -> None:
        if called == "register" and not after and lost and lost.pop():
            raise LedgerError("the ledger is out of reach")

    async with pipeline.life():
        session = await pipeline.open("a")
        pipeline.faults.hook = hook
        await give(session, [3], 1, [dead_letter("a", 3)])
        await pipeline.clock.advance(20)
    assert not lost
    assert pipeline.stored_dead_letters() == [("a", S(3))]


def test_a_flush_without_a_checkpoint_leaves_the_position_where_it_is() -> None:
    flush = plan(
        [
            BufferedBatch("a", 1),
            BufferedBatch("b", 1, last=S(4)),
            BufferedBatch("b", 1),
        ],
        spec=None,
        clock=0,
        progress=BatchProgress(),
        now_ms=0,
        durable={"a": S(3)},
        kind=lambda _key: SegmentKind.WINDOW,
    )
    assert flush.positions == (
        PositionUpdate("a", 1, S(3), None, None, previous=S(3)),
        PositionUpdate("b", 1, S(4), None, None),
    )


async def test_a_daemon_of_v1_is_asked_to_checkpoint_whole_batches_only(pipeline: Pipeline) -> None:
    async with pipeline.life():
        session = await pipeline.open("a", None, tells_lag=False, within_aggregates=False)
        await give(session, [1, 2], 1)
        await pipeline.cycle()
        assert (session.position.durable, session.checkpoint_due()) == (S(1), None)
        await give(session, [3], 2)
        await pipeline.cycle()
        assert session.checkpoint_due() == S(2)
