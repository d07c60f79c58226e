"""The bound on unread lines of all connections."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.sources.unread import ReadBudget

pytestmark = pytest.mark.quick


class Reader:
    def __init__(self) -> None:
        self.paused = False
        self.calls = 0

    def pause(self) -> None:
        assert not self.paused
        self.paused = True
        self.calls += 1

    def resume(self) -> None:
        assert self.paused
        self.paused = False
        self.calls += 1


def test_within_the_budget_nobody_waits() -> None:
    budget, reader = ReadBudget(10), Reader()
    budget.set_partial(reader, 10)
    assert (budget.held, reader.paused) == (10, False)


def test_beyond_the_budget_all_but_the_oldest_line_wait() -> None:
    budget, old, young = ReadBudget(10), Reader(), Reader()
    budget.hold(4)
    budget.set_partial(old, 4)
    budget.set_partial(young, 4)
    assert (old.paused, young.paused) == (False, True)


def test_a_freed_byte_wakes_those_that_wait() -> None:
    budget, old, young = ReadBudget(10), Reader(), Reader()
    budget.set_partial(old, 8)
    budget.set_partial(young, 8)
    budget.set_partial(old, 0)
    budget.hold(2)
    assert not young.paused
    assert budget.held == 10


def test_the_next_oldest_goes_on_when_the_oldest_is_gone() -> None:
    budget, first, second, third = ReadBudget(10), Reader(), Reader(), Reader()
    for reader in (first, second, third):
        budget.set_partial(reader, 20)
    budget.forget(first, 0)
    assert (second.paused, third.paused) == (False, True)


def test_a_reader_that_is_gone_is_not_called_any_more() -> None:
    budget, first, second = ReadBudget(10), Reader(), Reader()
    budget.set_partial(first, 20)
    budget.set_partial(second, 20)
    budget.hold(3)
    budget.forget(second, 0)
    budget.forget(first, 3)
    assert second.paused
    assert budget.held == 0


def test_as_many_go_on_as_there_is_room_for_those_first_that_wait_longest() -> None:
    budget = ReadBudget(100, step=20)
    readers = [Reader() for _ in range(6)]
    budget.hold(100)
    for reader in readers:
        budget.set_partial(reader, 1)
    assert [reader.paused for reader in readers] == [False, True, True, True, True, True]
    budget.hold(-46)
    assert [reader.paused for reader in readers] == [False, False, False, True, True, True]
    budget.set_partial(readers[0], 0)
    assert [reader.paused for reader in readers] == [False, False, False, False, True, True]


def test_a_line_that_is_done_wakes_a_few_of_a_thousand() -> None:
    budget = ReadBudget(10_000, step=100)
    readers = [Reader() for _ in range(1000)]
    for reader in readers:
        budget.set_partial(reader, 9)
    budget.hold(1200)
    budget.hold(-400)
    assert sum(not reader.paused for reader in readers) == 3
    calls = sum(reader.calls for reader in readers)
    budget.hold(400)
    assert sum(not reader.paused for reader in readers) == 1
    assert sum(reader.calls for reader in readers) == calls + 2


def test_a_reader_whose_line_is_dropped_while_it_waits_goes_on() -> None:
    budget, first, second = ReadBudget(10), Reader(), Reader()
    budget.set_partial(first, 20)
    budget.set_partial(second, 20)
    budget.set_partial(second, 0)
    assert (first.paused, second.paused) == (False, False)


sizes = st.lists(st.tuples(st.sampled_from("pwf"), st.integers(0, 4), st.integers(0, 30)))


@given(sizes, st.integers(1, 40), st.integers(1, 15))
def test_whoever_waits_there_are_always_as_many_that_go_on_as_there_is_room_for(
    steps: list[tuple[str, int, int]], limit: int, step: int
) -> None:
    budget, readers = ReadBudget(limit, step=step), [Reader() for _ in range(5)]
    partial: dict[int, int] = {}
    whole: dict[int, int] = {}
    for kind, index, size in steps:
        if kind == "p":
            budget.set_partial(readers[index], size)
            partial[index] = size
            if not size:
                del partial[index]
        elif kind == "w":
            budget.hold(size - whole.get(index, 0))
            whole[index] = size
        else:
            budget.forget(readers[index], whole.pop(index, 0))
            readers[index].paused = False
            partial.pop(index, None)
        assert budget.held == sum(partial.values()) + sum(whole.values())
        reading = list(partial)
        going = [index for index in reading if not readers[index].paused]
        if budget.held > limit:
            assert going == reading[:1]
        else:
            assert len(going) >= min(len(reading), 1 + (limit - budget.held) // step)
        assert bool(budget.paused) == (len(going) < len(reading))
        assert all(not reader.paused for index, reader in enumerate(readers) if index not in reading)
