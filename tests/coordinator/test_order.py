"""The merge equals what a heap over single records gives, by the rules of facts/stream_ordering.md."""

from __future__ import annotations

import heapq
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.coordinator.core.flush import effective_times, merge_order

pytestmark = [pytest.mark.quick, pytest.mark.core]

HOUR = 3_600_000


def ms(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def merged(runs: list[np.ndarray], names: list[list[str]]) -> list[str]:
    flat = [name for run in names for name in run]
    order = merge_order(runs)
    return flat if order is None else [flat[i] for i in order]


def heap_of_records(
    shards: dict[str, list[int]], parents: dict[str, tuple[str, ...]]
) -> list[tuple[str, int]]:
    """Return (shard, index) record by record: a shard is opened once its parents are used up, and the heap holds the
    next record of each open shard under (effective time, clock of its shard)."""
    last: dict[str, int] = {}
    done: set[str] = set()
    clocks = {shard: place for place, shard in enumerate(shards)}
    heap: list[tuple[int, int, str, int]] = []

    def push(shard: str, index: int) -> None:
        floors = [last[p] for p in parents.get(shard, ()) if p in last]
        effective = max([shards[shard][index], *floors, *([last[shard]] if shard in last else [])])
        last[shard] = effective
        heapq.heappush(heap, (effective, clocks[shard], shard, index))

    def open_ready() -> None:
        for shard, times in shards.items():
            if shard not in started and all(p in done for p in parents.get(shard, ())):
                started.add(shard)
                if times:
                    push(shard, 0)
                else:
                    done.add(shard)

    started: set[str] = set()
    out: list[tuple[str, int]] = []
    open_ready()
    while heap:
        _, _, shard, index = heapq.heappop(heap)
        out.append((shard, index))
        if index + 1 < len(shards[shard]):
            push(shard, index + 1)
        else:
            done.add(shard)
            open_ready()
    return out


def test_the_worked_example_of_a_parent_and_two_children_holds_exactly() -> None:
    now = 100 * HOUR
    parent = effective_times(ms(now - 7 * HOUR), None)
    floor = int(parent[-1])
    one = effective_times(ms(now - 6 * HOUR, now - 4 * HOUR, now - 2 * HOUR), floor)
    two = effective_times(ms(now - 4 * HOUR, now - 3 * HOUR, now - 3 * HOUR), floor)
    names = [["R00"], ["R11", "R12", "R13"], ["R24", "R25", "R26"]]
    assert merged([parent, one, two], names) == ["R00", "R11", "R12", "R24", "R25", "R26", "R13"]


def test_a_later_record_with_an_earlier_time_is_not_reordered_inside_its_shard() -> None:
    times = effective_times(ms(10, 5, 11), None)
    assert times.tolist() == [10, 10, 11]
    assert merged([times], [["1", "2", "3"]]) == ["1", "2", "3"]


def test_shards_at_far_apart_times_do_not_interleave() -> None:
    late, early = ms(100, 101), ms(0, 1, 2)
    assert merged([late, early], [["L0", "L1"], ["E0", "E1", "E2"]]) == ["E0", "E1", "E2", "L0", "L1"]


def test_a_floor_raises_the_times_below_it_and_no_others() -> None:
    assert effective_times(ms(1, 7, 5), 4).tolist() == [4, 7, 7]


def test_no_records_have_no_times_with_and_without_a_floor() -> None:
    assert effective_times(ms(), None).tolist() == []
    assert effective_times(ms(), 5).tolist() == []


def test_runs_that_are_in_order_need_no_permutation() -> None:
    assert merge_order([]) is None
    assert merge_order([ms()]) is None
    assert merge_order([ms(3)]) is None
    assert merge_order([ms(1, 2), ms(2, 3)]) is None


def test_ties_keep_the_order_in_which_batches_were_accepted() -> None:
    order = merge_order([ms(5, 9), ms(5, 7)])
    assert order is not None
    assert order.tolist() == [0, 2, 3, 1]


times_of_shards = st.dictionaries(
    st.sampled_from("abcde"), st.lists(st.integers(-50, 50), max_size=8), min_size=1, max_size=5
)


@given(times_of_shards)
def test_the_merge_of_unrelated_shards_equals_a_heap_of_single_records(shards: dict[str, list[int]]) -> None:
    runs = [effective_times(np.array(times, np.int64), None) for times in shards.values()]
    names = [[f"{shard}{i}" for i in range(len(times))] for shard, times in shards.items()]
    assert merged(runs, names) == [f"{shard}{i}" for shard, i in heap_of_records(shards, {})]


@given(st.lists(st.lists(st.integers(-50, 50), max_size=6), min_size=3, max_size=3))
def test_the_merge_of_a_split_equals_a_heap_of_single_records(times: list[list[int]]) -> None:
    shards = dict(zip(["p", "x", "y"], times, strict=True))
    parent = effective_times(np.array(times[0], np.int64), None)
    floor = int(parent[-1]) if len(parent) else None
    runs = [parent, *(effective_times(np.array(each, np.int64), floor) for each in times[1:])]
    names = [[f"{shard}{i}" for i in range(len(each))] for shard, each in shards.items()]
    expected = [f"{s}{i}" for s, i in heap_of_records(shards, {"x": ("p",), "y": ("p",)})]
    assert merged(runs, names) == expected


@given(times_of_shards, st.randoms())
def test_order_inside_a_shard_holds_however_its_batches_are_cut_and_mixed(
    shards: dict[str, list[int]], random: Random
) -> None:
    left = {shard: list(enumerate(times)) for shard, times in shards.items()}
    floors: dict[str, int | None] = dict.fromkeys(shards)
    runs, names = [], []
    while any(left.values()):
        shard = random.choice([s for s, records in left.items() if records])
        size = random.randint(1, len(left[shard]))
        batch, left[shard] = left[shard][:size], left[shard][size:]
        times = effective_times(np.array([t for _, t in batch], np.int64), floors[shard])
        floors[shard] = int(times[-1])
        runs.append(times)
        names.append([(shard, i) for i, _ in batch])
    out = merged(runs, names)
    for shard, times in shards.items():
        assert [i for s, i in out if s == shard] == list(range(len(times)))
