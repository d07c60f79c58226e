"""Room in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.workers.shared_memory import Arena

MARK = 64


@pytest.fixture
def arena_of() -> Iterator[Callable[[int], Arena]]:
    made: list[Arena] = []

    def make(size: int) -> Arena:
        made.append(Arena(MARK + size))
        return made[-1]

    yield make
    for arena in made:
        arena.close()


@given(st.lists(st.one_of(st.integers(0, 700), st.integers(0, 30).map(lambda n: -1 - n)), max_size=80))
def test_what_is_taken_never_overlaps_and_all_of_it_comes_back(script: list[int]) -> None:
    arena = Arena(MARK + 2048)
    taken: list[tuple[int, int]] = []
    for step in script:
        if step < 0:
            if taken:
                arena.free(taken.pop(-step % len(taken))[0])
            continue
        offset = arena.allocate(step)
        if offset is None:
            assert arena.allocated
            continue
        assert MARK <= offset <= offset + step <= MARK + 2048
        assert all(offset + step <= other or other + size <= offset for other, size in taken)
        taken.append((offset, step))
    assert len(arena.allocated) == len(taken)
    for offset, _ in taken:
        arena.free(offset)
    assert arena.allocate(2048) == MARK
    arena.close()


def test_the_first_room_is_used_again(arena_of: Callable[[int], Arena]) -> None:
    arena = arena_of(1024)
    first = arena.allocate(100)
    arena.allocate(100)
    assert first is not None
    arena.free(first)
    assert arena.allocate(64) == first


def test_what_does_not_fit_is_refused(arena_of: Callable[[int], Arena]) -> None:
    arena = arena_of(128)
    assert arena.allocate(129) is None
    with pytest.raises(KeyError):
        arena.free(MARK)
