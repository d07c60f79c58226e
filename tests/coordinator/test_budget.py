from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mldserver.coordinator.backpressure import Load, shards_to_hold


def hold(loads: list[Load], holder: str | None = None) -> set[str]:
    return set(shards_to_hold(loads, holder=holder))


LOADS = [Load("far", 300), Load("mid", 200), Load("low", 100)]


def test_those_ahead_of_the_holder_of_the_watermark_are_held() -> None:
    assert hold(LOADS, "low") == {"far", "mid"}


def test_shards_level_with_the_holder_or_behind_it_are_not_held() -> None:
    assert hold([Load("a", 100), Load("b", 100), Load("c", 101), Load("d", 99)], "a") == {"c"}


def test_a_shard_that_has_shown_nothing_is_the_furthest_behind() -> None:
    assert hold([Load("new", None), Load("old", 5)], "new") == {"old"}
    assert hold([Load("new", None), Load("also", None)], "new") == set()
    assert hold([Load("new", None), Load("old", 5)], "old") == set()


def test_a_holder_that_is_not_connected_here_holds_all_who_have_shown_something() -> None:
    assert hold([*LOADS, Load("new", None)], "gone") == {"far", "mid", "low"}


def test_times_before_1970_are_behind_and_not_unknown() -> None:
    loads = [Load("new", None), Load("ancient", -5), Load("epoch", 0)]
    assert hold(loads, "new") == {"epoch", "ancient"}
    assert hold(loads, "ancient") == {"epoch"}


def test_without_a_holder_everyone_waits() -> None:
    assert hold(LOADS) == {"far", "mid", "low"}


@given(st.lists(st.none() | st.integers(-3, 3), min_size=1, max_size=6))
def test_whoever_is_furthest_behind_goes_on(reached: list[int | None]) -> None:
    loads = [Load(f"s{number}", each) for number, each in enumerate(reached)]
    holder = min(loads, key=lambda load: (load.ahead_ms is not None, load.ahead_ms or 0))
    held = hold(loads, holder.shard_id)
    assert all((load.shard_id in held) == (load.ahead_ms != holder.ahead_ms) for load in loads)
