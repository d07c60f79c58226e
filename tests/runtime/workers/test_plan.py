"""Shards and workers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.runtime.workers.plan import place, spread

PLANS = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 6), max_size=30)
WORKERS = st.sets(st.integers(0, 6), min_size=1)


def fewest_moves(plan: dict[str, int], workers: set[int]) -> int:
    """Count by hand: give the larger shares to who holds most, and see what is beyond them."""
    share, more = divmod(len(plan), len(workers))
    held = sorted((Counter(plan.values())[worker] for worker in workers), reverse=True)
    kept = sum(min(count, share + (number < more)) for number, count in enumerate(held))
    return len(plan) - kept


@given(PLANS, WORKERS)
def test_a_spread_is_balanced_within_one_and_moves_as_little_as_that_takes(
    plan: dict[str, int], workers: set[int]
) -> None:
    made = spread(plan, workers)
    assert made.keys() == plan.keys()
    assert set(made.values()) <= workers
    loads = Counter(made.values())
    assert max(loads[worker] for worker in workers) - min(loads[worker] for worker in workers) <= 1
    assert sum(made[shard] != plan[shard] for shard in plan) == fewest_moves(plan, workers)


@given(PLANS, WORKERS)
def test_spreading_again_moves_nothing(plan: dict[str, int], workers: set[int]) -> None:
    made = spread(plan, workers)
    assert spread(made, workers) == made


@given(st.lists(st.text("abc", min_size=1), unique=True), WORKERS)
def test_shards_that_come_one_by_one_are_balanced_too(shards: list[str], workers: set[int]) -> None:
    plan: dict[str, int] = {}
    for shard in shards:
        plan[shard] = place(plan, workers)
    loads = Counter(plan.values())
    assert max(loads[worker] for worker in workers) - min(loads[worker] for worker in workers) <= 1


def test_without_a_worker_there_is_no_plan() -> None:
    with pytest.raises(ValueError, match="no worker"):
        place({}, ())
    with pytest.raises(ValueError, match="no worker"):
        spread({"a": 1}, ())
