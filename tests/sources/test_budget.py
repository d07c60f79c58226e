"""The bound on unread lines of all connections."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mldserver.sources.budget import ReadBudget


class Reader:
    def __init__(self) -> None:
        self.paused = False

    def pause(self) -> None:
        assert not self.paused
        self.paused = True

    def resume(self) -> None:
        assert self.paused
        self.paused = False


def test_within_the_budget_nobody_waits() -> None:
    budget, reader = ReadBudget(10), Reader()
    budget.set_partial(reader, 10)
    assert (budget.held, reader.paused) == (10, False)


def test_beyond_the_budget_all_but_the_oldest_line_wait() -> None:
    budget, old, young, whole = ReadBudget(10), Reader(), Reader(), Reader()
    budget.set_whole(whole, 4)
    budget.set_partial(old, 4)
    budget.set_partial(young, 4)
    assert (old.paused, young.paused, whole.paused) == (False, True, False)


def test_a_freed_byte_wakes_those_that_wait() -> None:
    budget, old, young = ReadBudget(10), Reader(), Reader()
    budget.set_partial(old, 8)
    budget.set_partial(young, 8)
    budget.set_partial(old, 0)
    budget.set_whole(old, 2)
    assert not young.paused
    assert budget.held == 10


def test_the_next_oldest_goes_on_when_the_oldest_is_gone() -> None:
    budget, first, second, third = ReadBudget(10), Reader(), Reader(), Reader()
    for reader in (first, second, third):
        budget.set_partial(reader, 20)
    budget.forget(first)
    assert (second.paused, third.paused) == (False, True)


def test_a_reader_that_is_gone_is_not_called_any_more() -> None:
    budget, first, second = ReadBudget(10), Reader(), Reader()
    budget.set_partial(first, 20)
    budget.set_partial(second, 20)
    budget.forget(second)
    budget.forget(first)
    assert second.paused
    assert budget.held == 0


sizes = st.lists(st.tuples(st.sampled_from("pwf"), st.integers(0, 4), st.integers(0, 30)))


@given(sizes, st.integers(1, 40))
def test_whoever_waits_there_is_always_one_that_goes_on(
    steps: list[tuple[str, int, int]], limit: int
) -> None:
    budget, readers = ReadBudget(limit), [Reader() for _ in range(5)]
    partial: dict[int, int] = {}
    whole: dict[int, int] = {}
    for kind, index, size in steps:
        if kind == "p":
            budget.set_partial(readers[index], size)
            partial[index] = size
        elif kind == "w":
            budget.set_whole(readers[index], size)
            whole[index] = size
        else:
            budget.forget(readers[index])
            readers[index].paused = False
            partial[index] = whole[index] = 0
        assert budget.held == sum(partial.values()) + sum(whole.values())
        reading = [index for index, held in partial.items() if held]
        waiting = [index for index in reading if readers[index].paused]
        assert len(waiting) == (max(len(reading) - 1, 0) if budget.held > limit else 0)
        assert all(not reader.paused for index, reader in enumerate(readers) if index not in reading)
