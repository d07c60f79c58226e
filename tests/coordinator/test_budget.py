from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mldserver.coordinator.budget import Load, shards_to_hold


def hold(loads: list[Load], *, budget: int, holder: str | None = None, used: int | None = None) -> set[str]:
    used = sum(load.bytes for load in loads) if used is None else used
    return set(shards_to_hold(loads, used=used, budget=budget, holder=holder))


LOADS = [Load("far", 40, 300), Load("mid", 40, 200), Load("low", 40, 100)]


def test_nobody_is_held_within_the_budget() -> None:
    assert hold(LOADS, budget=120) == set()


def test_the_shards_furthest_ahead_are_held_first_and_no_more_than_needed() -> None:
    assert hold(LOADS, budget=119, holder="low") == {"far"}
    assert hold(LOADS, budget=79, holder="low") == {"far", "mid"}


def test_the_holder_of_the_watermark_is_never_held() -> None:
    assert hold(LOADS, budget=0, holder="low") == {"far", "mid"}


def test_shards_level_with_the_holder_are_not_held_either() -> None:
    assert hold([Load("a", 50, 100), Load("b", 50, 100), Load("c", 50, 101)], budget=0, holder="a") == {"c"}


def test_a_shard_that_has_shown_nothing_is_the_furthest_behind() -> None:
    assert hold([Load("new", 50, None), Load("old", 50, 5)], budget=50, holder="new") == {"old"}
    assert hold([Load("new", 50, None), Load("also", 50, None)], budget=0, holder="new") == set()


def test_times_before_1970_are_behind_and_not_unknown() -> None:
    assert hold(
        [Load("new", 1, None), Load("ancient", 1, -5), Load("epoch", 1, 0)], budget=1, holder="new"
    ) == {
        "epoch",
        "ancient",
    }


def test_without_a_holder_everyone_may_have_to_wait() -> None:
    assert hold(LOADS, budget=0) == {"far", "mid", "low"}


def test_bytes_of_shards_that_are_gone_count_too() -> None:
    assert hold(LOADS, used=500, budget=450, holder="low") == {"far", "mid"}


def test_a_full_disk_holds_all_who_are_ahead_since_holding_frees_none_of_it() -> None:
    assert hold([load._replace(bytes=0) for load in LOADS], used=9, budget=8, holder="low") == {"far", "mid"}


loads = st.lists(
    st.tuples(st.integers(0, 50), st.none() | st.integers(-3, 3)).map(lambda t: t), min_size=1, max_size=6
).map(lambda each: [Load(f"s{i}", size, ahead) for i, (size, ahead) in enumerate(each)])


@given(loads, st.integers(0, 200), st.integers(0, 6), st.integers(0, 40))
def test_what_the_others_use_fits_unless_only_shards_level_with_the_holder_are_left(
    all_loads: list[Load], budget: int, place: int, gone: int
) -> None:
    holder = None
    if place < len(all_loads):  # the holder is the furthest behind
        holder = min(all_loads, key=lambda load: (load.ahead_ms is not None, load.ahead_ms or 0))
    name = holder.shard_id if holder else None
    used = gone + sum(load.bytes for load in all_loads)
    held = hold(all_loads, budget=budget, holder=name, used=used)
    assert name not in held
    rest = [load for load in all_loads if load.shard_id not in held]
    fits = used - sum(load.bytes for load in all_loads if load.shard_id in held) <= budget
    assert fits or all(holder is not None and load.ahead_ms == holder.ahead_ms for load in rest)

    def ahead(load: Load) -> tuple[bool, int]:
        return load.ahead_ms is not None, load.ahead_ms or 0

    furthest = [load for load in all_loads if load.shard_id in held]
    assert all(ahead(one) >= ahead(other) for one in furthest for other in rest)
