"""Timers that fire, as the coordinator sees them: rows and changes of state that no position accounts for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from coordinator.keyed import CLAIM, firing, key_of, pending, setting
from coordinator.outcomes import dead_letter
from coordinator.pipeline import RULES, Pipeline, listed, two
from support.shards import accept

from mldserver.coordinator.shards import IntakeSession
from mldserver.errors import LedgerError
from mldserver.records import Sequence
from mldserver.stores import ALL_KEYS, KeyRange, StoreClaim, hash_of

FIRST = "1970-01-01T00-00-00Z"
FAMILY = StoreClaim(None)
MIDDLE = 1 << 127


async def session_of(
    pipeline: Pipeline, shard: str = "a", claim: StoreClaim = CLAIM, *parents: str
) -> IntakeSession:
    return await pipeline.open(shard, store=claim, parents=parents)


def losing(*calls: str) -> Callable[[str, bool], None]:
    """Return a hook that loses the ledger's first answers to these calls: they take effect."""
    left = list(calls)

    def lose(name: str, after: bool) -> None:
        if after and left and name == left[0]:
            left.pop(0)
            raise LedgerError("lost")

    return lose


async def close_windows(pipeline: Pipeline, session: IntakeSession, number: int = 9) -> None:
    """Deliver a record so late that all windows before it close."""
    await pipeline.give(session, [(number, 60_000)])
    for _ in range(5):
        await pipeline.cycle()


async def test_timers_fire_between_records_and_move_no_position(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path / "out")
    async with pipeline.life():
        session = await session_of(pipeline)
        await accept(session, setting(session, (1, 1000), (50, 3000), (60, 90_000)))
        assert session.next_due_ms == 3000
        assert session.accept_firing(firing(session, (50, 3000), next_due_ms=90_000))
        assert (session.next_due_ms, session.after) == (90_000, Sequence(1))
        await pipeline.give(session, [(2, 2000)])
        assert await pending(session) == {60: 90_000}
        await pipeline.cycle()
        assert await pending(session) == {60: 90_000}
        state = pipeline.state()
        assert state.stores["a"].next_due_ms == 90_000
        shard = state.shards["a"]
        assert (shard.position, shard.effective_ms) == (Sequence(2), 3000)
        await close_windows(pipeline, session)
    assert pipeline.published()[FIRST] == [50, 2], "the record behind the timer has the timer's time"


async def test_a_firing_does_not_move_the_watermark_also_not_after_a_restart(tmp_path: Path) -> None:
    """A record that had arrived before may still come."""
    pipeline = Pipeline(tmp_path / "out")
    async with pipeline.life() as coordinator:
        session = await session_of(pipeline)
        await accept(session, setting(session, (1, 1000), (50, 3000)))
        session.accept_firing(firing(session, (50, 3000)))
        await pipeline.cycle()
        assert coordinator.watermark.reached_ms() == {"a": 1000}
    async with pipeline.life() as coordinator:
        await session_of(pipeline)
        assert coordinator.watermark.reached_ms() == {"a": 1000}


async def test_a_child_without_timers_corrects_the_time_that_its_parent_had(tmp_path: Path) -> None:
    """Otherwise servers would look for its timers for ever, once the child has ended."""
    pipeline = Pipeline(tmp_path / "out")
    async with pipeline.life() as coordinator:
        parent = await session_of(pipeline)
        await accept(parent, setting(parent, (1, 1000), (50, 3000)))
        assert await parent.end()
        hashed = hash_of(key_of(50))
        child = await session_of(pipeline, "b", StoreClaim(KeyRange(hashed + 1, ALL_KEYS.last)), "a")
        assert pipeline.state().stores["b"].next_due_ms == 3000
        assert await pending(child) == {}
        assert child.next_due_ms == 3000
        child.accept_firing(firing(child))
        assert child.next_due_ms is None
        await pipeline.cycle()
        assert pipeline.state().stores["b"].next_due_ms is None
        assert await pending(child) == {}
        child.accept_firing(firing(child))
        assert len(coordinator.buffer) == 0, "the ledger has it right now"


async def test_a_portion_in_which_no_timer_was_due_counts_as_an_outcome_only(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path / "out")
    async with pipeline.life() as coordinator:
        session = await session_of(pipeline)
        number = session.next_number
        assert number is not None
        session.accept_firing(firing(session))
        assert session.next_number == number + 1
        assert len(coordinator.buffer) == 0


@pytest.mark.parametrize("lost", [("register",), ("register", "sync"), ("register", "sync", "sync")])
async def test_timers_whose_registration_was_not_answered_fire_once(
    tmp_path: Path, lost: tuple[str, ...]
) -> None:
    """No position shows that they were registered, only the file of their store."""
    pipeline = Pipeline(tmp_path / "out")
    async with pipeline.life() as coordinator:
        session = await session_of(pipeline)
        await accept(session, setting(session, (1, 1000), (50, 2000), (60, 3000), (70, 90_000)))
        await pipeline.cycle()
        session.accept_firing(firing(session, (50, 2000), next_due_ms=3000))
        pipeline.faults.hook = losing(*lost)
        await pipeline.cycle()
        assert coordinator.status().flush_failing
        session.accept_firing(firing(session, (60, 3000), next_due_ms=90_000))
        assert await pending(session) == {70: 90_000}
        await pipeline.clock.advance(30)
        assert not coordinator.status().flush_failing
        assert session.alive
        assert await pending(session) == {70: 90_000}
        assert pipeline.state().stores["a"].next_due_ms == 90_000
        await close_windows(pipeline, session)
    assert pipeline.published()[FIRST] == [50, 60]


async def test_what_was_accepted_after_a_lost_answer_stays_when_the_ledger_fails_again(
    tmp_path: Path,
) -> None:
    """The flusher looks once more which files were registered before it begins: that call fails."""
    pipeline = Pipeline(tmp_path / "out")
    async with pipeline.life():
        session = await session_of(pipeline)
        await accept(session, setting(session, (1, 1000), (50, 2000), (60, 3000)))
        await pipeline.cycle()
        session.accept_firing(firing(session, (50, 2000), next_due_ms=3000))
        pipeline.faults.hook = losing("register", "peek")
        await pipeline.cycle()
        session.accept_firing(firing(session, (60, 3000)))
        await pipeline.clock.advance(30)
        assert session.alive
        assert await pending(session) == {}
        await close_windows(pipeline, session)
    assert pipeline.published()[FIRST] == [50, 60]


async def test_a_shard_without_room_fires_nothing_and_asks_for_a_flush(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path / "out", rules=replace(RULES, buffer_bytes=10, flush_interval_ms=60_000))
    async with pipeline.life() as coordinator:
        session = await session_of(pipeline)
        assert session.may_fire
        assert not session.accept_firing(firing(session, (50, 3000)))
        assert not session.may_fire
        await pipeline.clock.advance(0)
        assert session.may_fire, "what was accepted is durable"
        await session.finish()
        assert not session.may_fire
        session.disconnected()
        assert session.accept_firing(firing(session, (50, 3000)))
        assert len(coordinator.buffer) == 0, "a session that is over takes nothing"


async def test_a_snapshot_says_when_the_first_timer_is_due(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path / "out")
    async with pipeline.life():
        session = await session_of(pipeline)
        await accept(session, setting(session, (1, 1000), (50, 3000)))
        await pipeline.cycle()
    async with pipeline.life():
        session = await session_of(pipeline)
        assert session.next_due_ms is None
        assert await pending(session) == {50: 3000}
        assert session.next_due_ms == 3000


@pytest.mark.parametrize("purged", [False, True])
async def test_timers_that_redriven_letters_set_are_due_in_time(tmp_path: Path, purged: bool) -> None:
    """If the letters were purged meanwhile, the runtime loads the store again with the next portion, which comes at once."""
    pipeline = Pipeline(tmp_path / "out")
    async with pipeline.life() as coordinator:
        session = await session_of(pipeline)
        await pipeline.give(session, [(1, 1000)], rows=[], letters=[dead_letter("a", 1)])
        await pipeline.cycle()
        (letter,) = await pipeline.ledger.letters(limit=9)
        await pipeline.ledger.redrive((letter.id,))
        redriving, made = coordinator.redriving, setting(session, (1, 1000), (50, 3000))
        with redriving.visit("a", "a") as visit:
            if purged:
                await pipeline.ledger.purge((letter.id,))
            await pipeline.clock.drive(redriving.register("a", made, (letter.id,), visit))
        assert session.next_due_ms == (0 if purged else 3000)
        assert await pending(session) == ({} if purged else {50: 3000})


# Stores whose shards have ended.


async def answers() -> bool:
    """Answer as a stream does that lists no shard."""
    return True


async def ended(pipeline: Pipeline, claim: StoreClaim = CLAIM) -> IntakeSession:
    """Return the session of a shard that has set two timers and ended."""
    session = await session_of(pipeline, claim=claim)
    await accept(session, setting(session, (1, 1000), (50, 2000), (60, 3000)))
    assert await session.end()
    return session


async def test_the_server_that_has_read_a_shard_to_its_end_fires_its_timers(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path / "out")
    async with pipeline.life() as coordinator:
        before = await ended(pipeline)
        session = await coordinator.shards.adopt("a")
        assert session is not None
        assert (session.epoch, session.alive, session.may_fire) == (before.epoch + 1, True, True)
        assert await coordinator.shards.adopt("a") is None, "it has it already"
        assert await pending(session) == {50: 2000, 60: 3000}
        session.accept_firing(firing(session, (50, 2000), next_due_ms=3000))
        await pipeline.clock.advance(5)
        assert pipeline.published() == {FIRST: [50]}, "no window waits for it"
        state = pipeline.state()
        assert (state.stores["a"].next_due_ms, state.shards["a"].ended) == (3000, True)
        session.disconnected()
        await pipeline.cycle()
        assert pipeline.state().shards["a"].owner is None
        again = await coordinator.shards.adopt("a")
        assert again is not None
        assert await pending(again) == {60: 3000}


async def test_a_store_is_adopted_when_the_stream_says_that_its_shard_has_no_child(tmp_path: Path) -> None:
    shards: dict[str, tuple[str, ...]] = {"a": ()}
    answers = True

    async def ask() -> bool:
        pipeline.coordinator.shards.add_listing(listed(shards if answers else {}))
        return answers

    pipeline = Pipeline(tmp_path / "out", ask_stream=ask)
    async with pipeline.life() as coordinator:
        await ended(pipeline)
        answers = False
        assert await coordinator.shards.adopt("a") is None
        answers = True
        shards["b"] = ("a",)
        assert await coordinator.shards.adopt("a") is None
        assert pipeline.state().shards["a"].epoch == 1
        del shards["b"]
        coordinator.lineage.nodes["a"].children.clear()
        assert await coordinator.shards.adopt("a") is not None


async def test_a_shard_that_was_forgotten_lately_is_adopted_at_a_later_look(tmp_path: Path) -> None:
    """The ledger keeps it because of its timers, and names it again with the next cycle."""
    pipeline = Pipeline(tmp_path / "out")
    async with pipeline.life() as coordinator:
        await ended(pipeline)
        coordinator.shards.ask_stream = answers
        coordinator.lineage.forget_ended(coordinator.clock.steady_ms() + 1)
        assert await coordinator.shards.adopt("a") is None
        await pipeline.cycle()
        assert await coordinator.shards.adopt("a") is not None


async def test_another_server_adopts_a_store_once_the_first_is_gone(tmp_path: Path) -> None:
    one, other = two(tmp_path / "out")
    async with other.life() as coordinator:
        async with one.life() as first:
            await ended(one)
            assert await coordinator.shards.adopt("a") is None
            await first.leave()
        session = await coordinator.shards.adopt("a")
        assert session is not None
        assert await pending(session) == {50: 2000, 60: 3000}


async def test_a_child_that_is_opened_elsewhere_refuses_what_the_adopter_fires(tmp_path: Path) -> None:
    one, other = two(tmp_path / "out")
    async with one.life() as coordinator, other.life():
        await ended(one)
        session = await coordinator.shards.adopt("a")
        assert session is not None
        session.accept_firing(firing(session, (50, 2000), next_due_ms=3000))
        child = await session_of(other, "b", CLAIM, "a")
        assert await pending(child) == {50: 2000, 60: 3000}
        await one.clock.advance(3)
        assert not session.alive
        assert len(coordinator.buffer) == 0
        assert await pending(child) == {50: 2000, 60: 3000}
        assert one.state().shards["a"].owner is None


@pytest.mark.parametrize("here", [True, False])
async def test_a_child_in_an_adopted_family_goes_on_with_its_store(tmp_path: Path, here: bool) -> None:
    one, other = two(tmp_path / "out")
    async with one.life() as coordinator, other.life():
        await ended(one, FAMILY)
        session = await coordinator.shards.adopt("a")
        assert session is not None
        session.accept_firing(firing(session, (50, 2000), next_due_ms=3000))
        reader = one if here else other
        child = await session_of(reader, "b", FAMILY, "a")
        assert await pending(child) == {50: 2000, 60: 3000}
        child.accept_firing(firing(child, (50, 2000), next_due_ms=3000))
        await one.clock.advance(10)
        assert (session.alive, child.alive) == (False, True)
        assert await pending(child) == {60: 3000}


async def test_an_adopter_with_nothing_to_fire_gives_up_when_a_child_has_come(tmp_path: Path) -> None:
    one, other = two(tmp_path / "out")
    async with one.life() as coordinator, other.life():
        await ended(one)
        session = await coordinator.shards.adopt("a")
        assert session is not None
        await session_of(other, "b", StoreClaim(KeyRange(0, MIDDLE)), "a")
        await one.cycle()
        assert not session.alive


async def test_a_store_of_which_this_server_has_a_shard_is_not_adopted(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path / "out")
    async with pipeline.life() as coordinator:
        session = await session_of(pipeline)
        await accept(session, setting(session, (1, 1000), (50, 2000)))
        await pipeline.cycle()
        # A tool marks it as ended, and its connection is still there.
        await pipeline.ledger.end_shards(frozenset("a"))
        assert await coordinator.shards.adopt("a") is None
        assert session.alive
