"""Shards in one order: the rules one by one, then random streams against a sort that knows everything."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.dynamodb_streams.merge import Merge

pytestmark = pytest.mark.quick

HOUR = 3_600_000


def merged(merge: Merge[str], limit: int = 100) -> list[str]:
    return merge.take(limit)


def opened(*shards: str) -> Merge[str]:
    merge: Merge[str] = Merge()
    for shard in shards:
        merge.open(shard)
    return merge


def test_the_worked_example_comes_out() -> None:
    def ago(hours: int) -> int:
        return (24 - hours) * HOUR

    merge = opened("S0")
    merge.feed("S0", ["R00"], [ago(7)], now_ms=1)
    merge.end("S0")
    order = merged(merge)
    merge.open("S1", floor_ms=ago(7))
    merge.open("S2", floor_ms=ago(7))
    merge.close("S0")
    merge.feed("S1", ["R11", "R12", "R13"], [ago(6), ago(4), ago(2)], now_ms=2)
    assert merged(merge) == []
    merge.feed("S2", ["R24", "R25", "R26"], [ago(4), ago(3), ago(3)], now_ms=3)
    order += merged(merge)
    assert order == ["R00", "R11", "R12", "R24", "R25", "R26"]
    merge.tip("S2", began_ms=4)
    assert merged(merge) == ["R13"]


def test_trap_01_an_earlier_time_inside_a_shard_does_not_reorder_it() -> None:
    merge = opened("a", "b")
    merge.feed("a", ["1", "2", "3"], [10, 5, 11], now_ms=0)
    merge.feed("b", ["x", "y"], [7, 12], now_ms=0)
    assert merged(merge) == ["x", "1", "2", "3"]


def test_trap_01_nor_does_one_at_the_beginning_of_a_page() -> None:
    merge = opened("a", "b")
    merge.feed("a", ["1"], [10], now_ms=0)
    merge.feed("a", ["2", "3"], [5, 11], now_ms=0)
    merge.feed("b", ["x", "y"], [7, 12], now_ms=0)
    assert merged(merge) == ["x", "1", "2", "3"]


def test_trap_02_reading_in_rounds_is_not_an_order_by_time() -> None:
    merge = opened("old", "new")
    for second in range(3):
        merge.feed("new", [f"new{second}"], [100 + second], now_ms=second)
        merge.feed("old", [f"old{second}"], [second], now_ms=second)
    assert merged(merge) == ["old0", "old1", "old2"]
    merge.tip("old", began_ms=3)
    merge.tip("new", began_ms=3)
    assert merged(merge) == ["new0", "new1", "new2"]


def test_nothing_goes_out_before_every_shard_was_heard_of() -> None:
    merge = opened("a", "b")
    merge.feed("a", ["1"], [5], now_ms=10)
    assert merged(merge) == []
    merge.feed("b", ["2"], [9], now_ms=11)
    assert merged(merge) == ["1"]


def test_a_look_at_the_tip_counts_for_what_was_here_before_it_began() -> None:
    merge = opened("a", "b")
    merge.feed("a", ["1"], [5000], now_ms=10)
    for began_ms in (9, 10):
        merge.tip("b", began_ms=began_ms)
        assert merged(merge) == []
    merge.tip("b", began_ms=11)
    assert merged(merge) == ["1"]


def test_of_equal_times_the_page_that_came_first_goes_first() -> None:
    merge = opened("a", "b")
    merge.feed("b", ["b1", "b2"], [5, 6], now_ms=0)
    merge.feed("a", ["a1", "a2"], [5, 6], now_ms=0)
    merge.feed("b", ["b3"], [6], now_ms=0)
    assert merged(merge) == ["b1", "a1", "b2", "a2", "b3"]


def test_what_is_still_to_come_at_the_same_time_comes_later_in_the_order() -> None:
    merge = opened("a", "b")
    merge.feed("a", ["1"], [5], now_ms=0)
    merge.feed("b", ["2", "3"], [5, 6], now_ms=0)
    assert merged(merge) == ["1", "2"]


def test_a_parents_children_take_its_place_before_anything_later() -> None:
    merge = opened("parent", "other")
    merge.feed("parent", ["p"], [5], now_ms=0)
    merge.tip("parent", began_ms=20)
    merge.feed("other", ["o"], [8], now_ms=10)
    merge.end("parent")
    assert merged(merge) == ["p"]
    merge.open("child", floor_ms=5)
    merge.close("parent")
    assert merged(merge) == []
    merge.feed("child", ["c"], [1], now_ms=30)
    merge.tip("child", began_ms=31)
    assert merged(merge) == ["c", "o"]


def test_a_shard_that_is_closed_holds_nothing_back() -> None:
    merge = opened("a", "b")
    merge.feed("a", ["1"], [5], now_ms=0)
    merge.end("b")
    assert merged(merge) == []
    merge.close("b")
    assert merged(merge) == ["1"]


def test_about_as_many_items_go_out_as_are_asked_for() -> None:
    merge = opened("a", "b")
    merge.feed("a", ["1", "2", "4"], [1, 1, 3], now_ms=0)
    merge.feed("b", ["3"], [2], now_ms=0)
    assert merge.waiting("a") == 3
    assert merged(merge, 1) == ["1", "2"]
    assert (merge.waiting("a"), merge.waiting("b")) == (1, 1)
    assert merged(merge, 1) == ["3"]
    assert merged(merge, 1) == []


# Random streams.


@dataclass
class Fake:
    """A shard as the stream has it, and how far it was read."""

    parent: str | None
    created: list[tuple[str, int]] = field(default_factory=list)
    """Items and their times."""
    closed: bool = False
    children: list[str] = field(default_factory=list)
    read: int = 0
    ended: bool = False


class World:
    """A stream that is written and read at random, in steady time that goes on at random."""

    def __init__(self, random: Random, *, live: bool) -> None:
        self.random = random
        self.live = live
        """Times are those of the clock, cut to seconds; else they are any, and no tip is told."""
        self.now_ms = 0
        self.merge: Merge[str] = Merge()
        self.shards: dict[str, Fake] = {}
        self.reading: list[str] = []
        self.pages: list[tuple[str, list[tuple[str, int]]]] = []
        """As they were handed over."""
        self.out: list[str] = []
        for _ in range(random.randint(1, 3)):
            self.reading.append(self.add(None))
            self.merge.open(self.reading[-1])

    def add(self, parent: str | None) -> str:
        shard_id = f"s{len(self.shards)}"
        self.shards[shard_id] = Fake(parent)
        return shard_id

    def pick(self, shards: list[str]) -> Fake | None:
        return self.shards[self.random.choice(shards)] if shards else None

    def write(self) -> None:
        shard = self.pick([name for name, each in self.shards.items() if not each.closed])
        if shard:
            time = self.now_ms // 1000 * 1000 if self.live else self.random.randint(0, 30)
            shard.created.append((f"item{sum(len(each.created) for each in self.shards.values())}", time))

    def split(self) -> None:
        name = self.random.choice(list(self.shards))
        if not self.shards[name].closed:
            self.shards[name].closed = True
            self.shards[name].children = [self.add(name) for _ in range(self.random.randint(1, 2))]

    def read(self) -> None:
        unfinished = [name for name in self.reading if not self.shards[name].ended]
        shard = self.pick(unfinished)
        if shard is None:
            return
        name = next(each for each in unfinished if self.shards[each] is shard)
        began_ms = self.now_ms
        page = shard.created[shard.read : shard.read + self.random.randint(1, 5)]
        ended = shard.closed and shard.read + len(page) == len(shard.created)
        self.pass_time()
        if page:
            shard.read += len(page)
            self.pages.append((name, page))
            self.merge.feed(name, [item for item, _ in page], [time for _, time in page], now_ms=self.now_ms)
        elif self.live and not ended:
            self.merge.tip(name, began_ms=began_ms)
        if ended:
            shard.ended = True
            self.merge.end(name)

    def take(self) -> None:
        self.out += self.merge.take(self.random.choice([1, 3, 100]))
        for name in list(self.reading):
            shard = self.shards[name]
            if shard.ended and not self.merge.waiting(name):
                last_ms = max(self.line_times(name), default=None)
                for child in shard.children:
                    self.merge.open(child, floor_ms=last_ms)
                self.reading += shard.children
                self.reading.remove(name)
                self.merge.close(name)

    def pass_time(self) -> None:
        self.now_ms += self.random.choice([0, 1, 300, 900])

    def line_times(self, name: str | None) -> list[int]:
        """All times of a shard and of its ancestors."""
        times = []
        while name is not None:
            times += [time for _, time in self.shards[name].created]
            name = self.shards[name].parent
        return times

    def expected(self) -> list[str]:
        """Sort all items, as whoever knows the whole stream and the order of its pages can."""
        keys: dict[str, tuple[int, int, int]] = {}
        for clock, (name, page) in enumerate(self.pages):
            for place, (item, _) in enumerate(page):
                created = self.shards[name].created
                upto = [time for _, time in created[: [each for each, _ in created].index(item) + 1]]
                keys[item] = (max(upto + self.line_times(self.shards[name].parent)), clock, place)
        return sorted(keys, key=keys.__getitem__)


@pytest.mark.parametrize("live", [False, True])
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 120))
def test_random_streams_come_out_as_a_sort_of_all_their_items(live: bool, seed: int, steps: int) -> None:
    random = Random(seed)
    world = World(random, live=live)
    for _ in range(steps):
        world.pass_time()
        random.choices([world.write, world.split, world.read, world.take], [6, 1, 6, 4])[0]()
        assert len(world.out) == len(set(world.out))
    for shard in world.shards.values():
        shard.closed = True
    while world.reading:
        world.read()
        world.take()
    created = [item for shard in world.shards.values() for item, _ in shard.created]
    assert sorted(world.out) == sorted(created)
    assert world.out == world.expected()


def test_a_shard_that_is_passed_over_holds_nothing_back_until_it_is_heard_of_again() -> None:
    merge = opened("a", "b")
    merge.feed("a", ["1"], [5], now_ms=0)
    assert merged(merge) == []
    assert merge.pass_over("b")
    assert not merge.pass_over("b")
    assert merged(merge) == ["1"]
    merge.feed("a", ["3"], [9], now_ms=1)
    merge.feed("b", ["2"], [7], now_ms=2)
    assert merged(merge) == ["2"]
    assert merge.pass_over("b")
    assert merged(merge) == ["3"]
    merge.tip("b", began_ms=3)
    merge.feed("a", ["4"], [12], now_ms=4)
    assert merged(merge) == []


def test_when_all_are_passed_over_all_that_came_goes_out() -> None:
    merge = opened("a", "b")
    merge.feed("a", ["1", "2"], [5, 9], now_ms=0)
    assert merge.pass_over("a")
    assert merge.pass_over("b")
    assert merged(merge) == ["1", "2"]
