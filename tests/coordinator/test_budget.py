from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from mldserver.coordinator.backpressure import shards_to_hold

if TYPE_CHECKING:
    from collections.abc import Mapping


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
