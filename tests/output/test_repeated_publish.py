"""A publication that is repeated because its answer was lost, while another server is at the next revision."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from coordinator.outcomes import dead_letter, outcome
from coordinator.pipeline import Pipeline

from mldserver.errors import LedgerError
from mldserver.ledger.contract import WindowState
from mldserver.testing import VirtualClock
from mldserver.windows import time_window_id

pytestmark = pytest.mark.quick

START = 990_000
W = time_window_id(START)


async def run_again(pipeline: Pipeline, number: int, ms: int) -> None:
    """A dead letter of long ago gives a row now: late, for a window that is published."""
    store = pipeline.ledger.store
    store.add_letters((dead_letter("b", number),), wanted=True)
    (stored,) = store.letters(wanted=True)
    coordinator = pipeline.coordinator
    await pipeline.clock.drive(
        coordinator.redriving.register("b", outcome("b", [(number, ms)]), (stored.id,)), step=0.2
    )


def entry(pipeline: Pipeline) -> Any:
    (found,) = pipeline.ledger.store.find((W,))
    return found


async def test_it_shows_nothing_of_the_revision_that_another_server_has_committed_and_not_shown(
    tmp_path: Path,
) -> None:
    clock = VirtualClock(1_000_000)

    def server(server_id: str) -> Pipeline:
        return Pipeline(
            tmp_path,
            server_id=server_id,
            clock=clock,
            recompute=True,
            delay_ms=100,
            retry_seconds=(30.0, 30.0),
        )

    one, other = server("one"), server("two")
    lost: list[str] = []

    def lose_the_answer(name: str, after: bool) -> None:
        if name == "published" and after and not lost:
            lost.append(name)
            raise LedgerError("the answer is lost")

    def fail_to_show(name: str, after: bool) -> None:
        if name == "cut" and not lost:
            raise LedgerError("the other server shall be the first")
        if name == "exchange":
            raise OSError(errno.EIO, "the disk fails")

    async with one.life(), other.life():
        one.faults.hook, other.faults.hook = lose_the_answer, fail_to_show
        a, b = await one.open("a"), await other.open("b")
        await one.give(a, [(1, START + 1000), (2, START + 25_000)], lag_ms=60_000)
        await other.give(b, [(10, START + 24_000)], lag_ms=60_000)
        await clock.advance(8)
        assert (entry(one).state, entry(one).revision, lost) == (WindowState.PUBLISHED, 1, ["published"])
        one.faults.hook = lambda name, _: stay_behind(name)
        await run_again(other, 5, START + 1500)
        await clock.advance(3)
        assert (entry(one).state, entry(one).revision) == (WindowState.COMMITTED, 2)
        assert entry(one).owner == "two"
        await clock.advance(30)
        assert len(one.runner.unfinished) == 0, "it has repeated what it was not told of"
        assert (entry(one).state, entry(one).owner) == (WindowState.COMMITTED, "two")
        assert one.published()[W] == [1]
    third = server("three")
    async with third.life():
        await clock.advance(40)
        assert third.published()[W] == [1, 5]
        assert (entry(third).state, entry(third).revision) == (WindowState.PUBLISHED, 2)


def stay_behind(name: str) -> None:
    """Let the other server cut the next revision."""
    if name == "cut":
        raise LedgerError("out of reach")
