"""Shards and workers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.workers.worker import place, spread

PLANS = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 6), max_size=30)
WORKERS = st.sets(st.integers(0, 6), min_size=1)
STORES = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 9).map(str), min_size=1)
"""The store of each shard of a handler with keyed state."""


def spans(plan: dict[str, int], workers: set[int]) -> int:
    """Return how many shards the fullest worker has more than the emptiest."""
    loads = Counter(plan.values())
    return max(loads[worker] for worker in workers) - min(loads[worker] for worker in workers)


@given(PLANS, WORKERS)
def test_a_spread_moves_what_has_no_worker_and_nothing_else(plan: dict[str, int], workers: set[int]) -> None:
    made = spread(plan, workers)
    assert made.keys() == plan.keys()
    assert set(made.values()) <= workers
    staying = {shard: worker for shard, worker in plan.items() if worker in workers}
    assert made.items() >= staying.items()
    assert spans(made, workers) <= max(1, spans(staying, workers))


@given(st.lists(st.text("abc", min_size=1), unique=True), WORKERS, st.data())
def test_whoever_fails_a_balanced_plan_is_balanced_again(
    shards: list[str], workers: set[int], data: st.DataObject
) -> None:
    plan = spread(dict.fromkeys(shards, -1), workers)
    assert spans(plan, workers) <= 1
    left = data.draw(st.sets(st.sampled_from(sorted(workers)), min_size=1))
    assert spans(spread(plan, left), left) <= 1


@given(PLANS, WORKERS)
def test_spreading_again_moves_nothing(plan: dict[str, int], workers: set[int]) -> None:
    made = spread(plan, workers)
    assert spread(made, workers) == made


@given(st.lists(st.text("abc", min_size=1), unique=True), WORKERS)
def test_shards_that_come_one_by_one_are_balanced_too(shards: list[str], workers: set[int]) -> None:
    plan: dict[str, int] = {}
    for shard in shards:
        plan[shard] = place(plan, workers, shard)
    loads = Counter(plan.values())
    assert max(loads[worker] for worker in workers) - min(loads[worker] for worker in workers) <= 1


@given(STORES, WORKERS, st.data())
def test_shards_of_one_store_are_always_at_one_worker_and_the_stores_are_balanced(
    stores: dict[str, str], workers: set[int], data: st.DataObject
) -> None:
    plan: dict[str, int] = {}
    for shard in data.draw(st.permutations(sorted(stores))):
        plan[shard] = place(plan, workers, shard, stores.__getitem__)
    by_store = whole(plan, stores)
    assert spans(by_store, workers) <= 1
    left = data.draw(st.sets(st.sampled_from(sorted(workers)), min_size=1))
    stay = data.draw(st.sets(st.sampled_from(sorted(stores))))
    made = whole(spread(plan, left, stores.__getitem__, stay), stores)
    staying = {stores[shard] for shard in stay}
    assert {store for store in made if made[store] != by_store[store]} == {
        store for store, worker in by_store.items() if worker not in left and store not in staying
    }
    assert spans({store: at for store, at in made.items() if at in left}, left) <= 1


def whole(plan: dict[str, int], stores: dict[str, str]) -> dict[str, int]:
    """Return the worker of each store, after a check that it has only one."""
    pairs = {(stores[shard], worker) for shard, worker in plan.items()}
    assert len(pairs) == len(dict(pairs)) == len(set(map(stores.__getitem__, plan)))
    return dict(pairs)


def test_a_shard_joins_its_store_even_where_the_worker_has_failed() -> None:
    assert place({"a": 3}, {0, 1}, "b", {"a": "s", "b": "s"}.__getitem__) == 3


def test_without_a_worker_there_is_no_plan() -> None:
    with pytest.raises(ValueError, match="no worker"):
        place({}, (), "a")
    with pytest.raises(ValueError, match="no worker"):
        spread({"a": 1}, ())


def test_a_thousand_shards_over_three_workers_and_over_two_nodes_of_three() -> None:
    def loads(shards: int) -> list[int]:
        plan: dict[str, int] = {}
        for shard in range(shards):
            plan[f"shardId-{shard:012}"] = place(plan, {0, 1, 2}, f"shardId-{shard:012}")
        return sorted(Counter(plan.values()).values(), reverse=True)

    assert loads(1024) == [342, 341, 341]
    assert loads(1024 // 2) == [171, 171, 170]
    # The same when they come all at once.
    all_at_once = spread(dict.fromkeys(map(str, range(1024)), -1), {0, 1, 2})
    assert sorted(Counter(all_at_once.values()).values(), reverse=True) == [342, 341, 341]
