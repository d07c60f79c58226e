"""Who is held back: whoever has a connection, whatever is known of the shard."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from coordinator.pipeline import RULES, Pipeline, listed
from hypothesis import given
from hypothesis import strategies as st

from mldserver.coordinator.backpressure import shards_to_hold
from mldserver.coordinator.shards import IntakeSession
from mldserver.errors import LedgerError
from mldserver.records import Sequence
from mldserver.testing import VirtualClock

pytestmark = pytest.mark.quick

LITTLE = replace(RULES, buffer_bytes=1)


def lose_the_ledger(pipeline: Pipeline) -> None:
    def hook(called: str, _after: bool) -> None:
        if called == "sync":
            raise LedgerError("out of reach")

    pipeline.faults.hook = hook


async def assert_held(pipeline: Pipeline, session: IntakeSession) -> None:
    """While nothing can be registered, the session's batches wait."""
    given = asyncio.get_running_loop().create_task(pipeline.give(session, [(1, 1000)]))
    await pipeline.clock.advance(30)
    assert pipeline.coordinator.buffer.bytes > 1
    assert not given.done()
    pipeline.faults.hook = None
    await pipeline.clock.advance(40)
    assert given.done()


async def test_a_connection_whose_shard_another_server_has_ended_meanwhile_is_held_back_too(
    tmp_path: Path,
) -> None:
    clock = VirtualClock(1_000_000)
    one = Pipeline(tmp_path, server_id="one", clock=clock, rules=LITTLE)
    other = Pipeline(tmp_path, server_id="other", clock=clock)
    async with one.life(), other.life():
        await clock.advance(3)
        stale = await one.open("p")
        assert await (await other.open("p")).end()
        await one.open("c", parents=("p",))
        lose_the_ledger(one)
        assert stale.alive, "no cycle has heard yet that the shard was opened elsewhere"
        await assert_held(one, stale)
        assert not stale.alive


async def test_a_connection_whose_shard_has_ended_as_far_as_its_child_shows_is_held_back_too(
    tmp_path: Path,
) -> None:
    pipeline = Pipeline(tmp_path, rules=LITTLE)
    async with pipeline.life() as coordinator:
        parent, _ = await pipeline.open("p"), await pipeline.open("c")
        coordinator.shards.add_listing(listed({"p": (), "c": ("p",)}))
        lose_the_ledger(pipeline)
        await assert_held(pipeline, parent)
        assert parent.alive
        assert parent.checkpoint_due() == Sequence(1)


def hold(reached_ms: Mapping[str, int | None], holder: str | None = None) -> set[str]:
    return set(shards_to_hold(reached_ms, holder=holder))


LOADS: dict[str, int | None] = {"far": 300, "mid": 200, "low": 100}


def test_those_ahead_of_the_holder_of_the_watermark_are_held() -> None:
    assert hold(LOADS, "low") == {"far", "mid"}


def test_shards_level_with_the_holder_or_behind_it_are_not_held() -> None:
    assert hold({"a": 100, "b": 100, "c": 101, "d": 99}, "a") == {"c"}


def test_a_shard_that_has_shown_nothing_is_the_furthest_behind() -> None:
    assert hold({"new": None, "old": 5}, "new") == {"old"}
    assert hold({"new": None, "also": None}, "new") == set()
    assert hold({"new": None, "old": 5}, "old") == set()


def test_a_holder_that_is_not_connected_here_holds_all_who_have_shown_something() -> None:
    assert hold(LOADS | {"new": None}, "gone") == {"far", "mid", "low"}


def test_times_before_1970_are_behind_and_not_unknown() -> None:
    loads = {"new": None, "ancient": -5, "epoch": 0}
    assert hold(loads, "new") == {"epoch", "ancient"}
    assert hold(loads, "ancient") == {"epoch"}


def test_without_a_holder_everyone_waits() -> None:
    assert hold(LOADS) == {"far", "mid", "low"}


@given(st.lists(st.none() | st.integers(-3, 3), min_size=1, max_size=6))
def test_whoever_is_furthest_behind_goes_on(reached: list[int | None]) -> None:
    loads = {f"s{number}": each for number, each in enumerate(reached)}
    holder, least = min(loads.items(), key=lambda load: (load[1] is not None, load[1] or 0))
    assert hold(loads, holder) == {shard for shard, ms in loads.items() if ms != least}
