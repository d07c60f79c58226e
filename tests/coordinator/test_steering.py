"""Pause, drain and flush over virtual time: who is answered when, and what is durable by then."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coordinator.outcomes import outcome
from coordinator.pipeline import Pipeline, fail

from mldserver.admin.acts import carry_out
from mldserver.coordinator.shards import IntakeSession
from mldserver.errors import LedgerError
from mldserver.function import Function
from mldserver.records import Sequence
from mldserver.testing import VirtualClock

pytestmark = pytest.mark.quick


class SteeredFunction(Function):
    """A function whose pipeline a test has made; it starts or stops if there is none."""

    def __init__(self, pipeline: Pipeline | None) -> None:
        self.name = "departures"
        self._around: Any = SimpleNamespace(clock=pipeline and pipeline.clock)
        begun = pipeline and SimpleNamespace(
            coordinator=pipeline.coordinator, ledger=pipeline.ledger, runtime=None
        )
        self.pipeline: Any = SimpleNamespace(begun=begun, has_closed_ledger=False)
        self._ended = None


def carry_out_on(pipeline: Pipeline, act: str, argument: str = "") -> Coroutine[None, None, tuple[bool, str]]:
    return carry_out({"departures": SteeredFunction(pipeline)}, pipeline.clock, act, argument)


async def carried_out(pipeline: Pipeline, act: str, argument: str = "") -> tuple[bool, str]:
    """Carry an act out, however long it waits."""
    asked = asyncio.create_task(carry_out_on(pipeline, act, argument))
    await pipeline.clock.advance(10)
    return await asked


def giving(pipeline: Pipeline, session: IntakeSession, number: int) -> asyncio.Task[None]:
    """Hand a batch in; done when its daemon may be answered."""
    return asyncio.create_task(pipeline.give(session, [(number, 1000 + number)]))


async def test_a_pause_holds_every_answer_until_it_is_ended_and_rows_become_durable_meanwhile(
    tmp_path: Path,
) -> None:
    pipeline = Pipeline(tmp_path)
    async with pipeline.life():
        session, other = await pipeline.open("a"), await pipeline.open("b")
        assert (await carried_out(pipeline, "pause"))[0]
        given = [giving(pipeline, session, 1), giving(pipeline, other, 1)]
        await pipeline.clock.advance(600)
        assert not any(each.done() for each in given)
        assert session.checkpoint_due() == Sequence(1), "it is durable, though its daemon waits"
        assert await carried_out(pipeline, "resume") == (True, "All shards go on.")
        assert all(each.done() for each in given)
        assert await carried_out(pipeline, "resume") == (True, "Nothing was paused.")


async def test_one_shard_may_be_paused_by_itself(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    async with pipeline.life():
        session, other = await pipeline.open("a"), await pipeline.open("b")
        await carried_out(pipeline, "pause", "a")
        held, free = giving(pipeline, session, 1), giving(pipeline, other, 1)
        await pipeline.clock.advance(60)
        assert (held.done(), free.done()) == (False, True)
        assert await carried_out(pipeline, "resume", "a") == (True, "Shard a goes on.")
        assert held.done()


async def test_what_is_answered_already_is_worked_on_to_its_end_whatever_is_paused(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        await carried_out(pipeline, "pause")
        async with asyncio.timeout(800):
            await session.wait_for_room(answered=True)


async def test_no_window_closes_past_a_paused_shard_whose_daemon_waits(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    async with pipeline.life():
        session, other = await pipeline.open("a"), await pipeline.open("b")
        await carried_out(pipeline, "pause", "a")
        held = giving(pipeline, session, 1)
        for number in range(1, 40):
            await pipeline.give(other, [(number, 1000 * number)])
            await pipeline.clock.advance(2)
        assert pipeline.published() == {}
        status = pipeline.coordinator.status()
        assert (status.held_by, status.reason) == ("a", "paused"), "readiness says so, once windows are due"
        await carried_out(pipeline, "resume")
        assert held.done()
        await pipeline.give(session, [(2, 60_000)])
        await pipeline.clock.advance(10)
        assert pipeline.published() != {}
        assert pipeline.late() == []


async def test_a_server_that_stops_answers_what_is_paused(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        await carried_out(pipeline, "pause")
        held = giving(pipeline, session, 1)
        await pipeline.clock.advance(10)
        await session.finish()
        async with asyncio.timeout(800):
            await held


async def test_a_drained_shard_is_durable_and_checkpointed_before_its_daemon_waits(tmp_path: Path) -> None:
    pipeline, stored = Pipeline(tmp_path), []
    async with pipeline.life():
        session = await pipeline.open("a")

        async def checkpoint() -> None:
            if (due := session.checkpoint_due()) is not None:
                stored.append(due)
                session.checkpointed(due)

        done, text = await carried_out(pipeline, "drain-shard", "a")
        assert (done, "with its next batch" in text) == (True, True), "nobody waits for an answer"
        held = asyncio.create_task(_handed_in(pipeline, session, checkpoint))
        await pipeline.clock.advance(1)
        assert stored == [Sequence(1)]
        assert not held.done()
        done, text = await carried_out(pipeline, "drain-shard", "a")
        assert done
        assert "checkpointed at 1," in text
        await carried_out(pipeline, "resume", "a")
        assert held.done()


async def _handed_in(pipeline: Pipeline, session: IntakeSession, checkpoint: Any) -> None:
    session.batch_began()
    assert not session.accept_batch(outcome("a", [(1, 1000)]), pipeline.clock.steady_ms())
    await session.wait_for_room(checkpoint=checkpoint)


async def test_a_shard_that_is_paused_already_can_be_drained_and_a_checkpoint_that_fails_is_told(
    tmp_path: Path,
) -> None:
    pipeline = Pipeline(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        await carried_out(pipeline, "pause")
        held = giving(pipeline, session, 1)
        done, text = await carried_out(pipeline, "drain-shard", "a")
        assert not done
        assert text.startswith("What shard a gave is durable, but its daemon has not stored the checkpoint.")
        assert not held.done()
        await carried_out(pipeline, "resume")
        assert held.done()


async def test_flush_makes_durable_what_was_taken_in(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (2, 1000)])
        done, text = await carry_out_on(pipeline, "flush")
        assert done
        assert "2 rows since the start" in text
        assert session.checkpoint_due() == Sequence(2)
        fail(pipeline, "register", lambda: LedgerError("out of reach"))
        await pipeline.give(session, [(3, 1000)])
        done, text = await carried_out(pipeline, "flush")
        assert not done
        assert text.startswith("Rows cannot be made durable now.")
        pipeline.faults.hook = None


REFUSED = {
    ("pause", "z"): "No shard 'z' is connected to this server. There are a, b.",
    ("drain-shard", "z"): "No shard 'z' is connected to this server. There are a, b.",
    ("drain-shard", ""): "Which shard? There are a, b.",
    ("resume", "a"): "Shard a is not paused. There are none.",
    ("log-level", "loud"): "There is no level 'loud'. Levels are debug, info, warning, error, critical.",
    (
        "flush",
        "a",
    ): "There is no act 'flush a'. Acts are pause, resume, flush, drain-shard, cancel-timers, log-level, reload.",
    (
        "explode",
        "",
    ): "There is no act 'explode'. Acts are pause, resume, flush, drain-shard, cancel-timers, log-level, reload.",
}


@pytest.mark.parametrize("asked", REFUSED)
async def test_what_makes_no_sense_is_refused_with_what_would(tmp_path: Path, asked: tuple[str, str]) -> None:
    pipeline = Pipeline(tmp_path)
    async with pipeline.life():
        await pipeline.open("a")
        await pipeline.open("b")
        assert await carried_out(pipeline, *asked) == (False, REFUSED[asked])


async def test_while_all_are_paused_no_single_shard_goes_on(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    async with pipeline.life():
        await pipeline.open("a")
        await carried_out(pipeline, "pause")
        done, text = await carried_out(pipeline, "resume", "a")
        assert (done, text.split(".")[0]) == (False, "All shards are paused")


async def test_a_server_that_starts_or_stops_takes_no_acts() -> None:
    done, text = await carry_out({"departures": SteeredFunction(None)}, VirtualClock(), "pause", "")
    assert (done, text) == (False, "The server is starting or stopping and cannot be steered now.")


async def test_with_several_functions_an_act_names_one_of_them(tmp_path: Path) -> None:
    first, second = Pipeline(tmp_path / "a"), Pipeline(tmp_path / "b")
    async with first.life(), second.life():
        functions = {"arrivals": SteeredFunction(first), "departures": SteeredFunction(second)}
        done, text = await carry_out(functions, first.clock, "pause", "")
        assert (done, text) == (
            False,
            "This server has several functions. Name one with --function: arrivals, departures.",
        )
        done, text = await carry_out(functions, first.clock, "pause", "", "trips")
        assert (done, text.split(".")[0]) == (False, "This server has no function 'trips'")
        assert (await carry_out(functions, first.clock, "pause", "", "departures"))[0]
        paused = [each.coordinator.shards.backpressure.paused for each in (first, second)]
        assert paused == [False, True]
        assert (await carry_out(functions, first.clock, "log-level", "info"))[0], "it is the server's"
        stopped = functions | {"arrivals": SteeredFunction(None)}
        done, text = await carry_out(stopped, first.clock, "flush", "", "arrivals")
        assert (done, text) == (
            False,
            "The function arrivals is starting or stopping and cannot be steered now.",
        )
