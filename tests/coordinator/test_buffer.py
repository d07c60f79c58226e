from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.coordinator.core.flush import Buffer, BufferedBatch
from mldserver.effects import NOTHING
from mldserver.records import Sequence

pytestmark = [pytest.mark.quick, pytest.mark.core]

NONE = np.empty(0, np.int64)


def batch(shard: str, size: int = 10) -> BufferedBatch:
    return BufferedBatch(shard, 1, NOTHING, NONE, None, None, None, size)


def test_a_new_buffer_is_empty() -> None:
    buffer = Buffer()
    assert (len(buffer), buffer.bytes, buffer.snapshot()) == (0, 0, {})


def test_batches_stay_in_the_order_in_which_they_were_accepted() -> None:
    buffer, batches = Buffer(), [batch("a"), batch("b"), batch("a")]
    for each in batches:
        buffer.add(each)
    assert list(buffer.snapshot().values()) == batches


def test_what_comes_after_a_snapshot_stays_when_the_snapshot_is_removed() -> None:
    buffer, later = Buffer(), batch("a", 3)
    buffer.add(batch("a"))
    seen = buffer.snapshot()
    buffer.add(later)
    buffer.remove(seen)
    assert list(buffer.snapshot().values()) == [later]
    assert buffer.bytes == 3


def test_removing_what_was_dropped_meanwhile_counts_nothing_twice() -> None:
    buffer = Buffer()
    buffer.add(batch("a"))
    buffer.add(batch("b", 5))
    seen = buffer.snapshot()
    assert buffer.drop_shard("a") == 1
    buffer.add(batch("a", 7))
    buffer.remove(seen)
    assert buffer.bytes == 7


def test_dropping_a_shard_that_has_nothing_is_fine() -> None:
    assert Buffer().drop_shard("a") == 0


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc"), st.integers(0, 9)),
        st.tuples(st.just("drop"), st.sampled_from("abc"), st.just(0)),
        st.tuples(st.sampled_from(["look", "remove"]), st.just(""), st.just(0)),
    ),
    max_size=40,
)


@given(steps)
def test_it_behaves_as_a_list_does(script: list[tuple[str, str, int]]) -> None:
    buffer, model, new = Buffer(), [], []
    seen, seen_model = buffer.snapshot(), []
    for step, shard, size in script:
        if step == "add":
            each = batch(shard, size)
            buffer.add(each)
            model.append(each)
            new.append(each)
        elif step == "drop":
            gone = [each for each in model if each.shard_id == shard]
            assert buffer.drop_shard(shard) == len(gone)
            model = [each for each in model if each.shard_id != shard]
        elif step == "look":
            seen, seen_model, new = buffer.snapshot(), list(model), []
            assert [id(each) for each in seen.values()] == [id(each) for each in model]
        else:
            buffer.remove(seen)
            model = [each for each in model if not any(each is old for old in seen_model)]
        left = [each for each in new if any(each is kept for kept in model)]
        sums = [sum(each.bytes for each in some) for some in (model, left)]
        assert (len(buffer), buffer.bytes, buffer.new_bytes) == (len(model), *sums)
    assert [id(each) for each in buffer.snapshot().values()] == [id(each) for each in model]


def test_what_the_ledger_has_already_is_dropped_up_to_its_position_but_not_a_shards_end() -> None:
    buffer = Buffer()

    def add(shard: str, last: int | None, epoch: int = 1, *, ends: bool = False) -> BufferedBatch:
        sequence = None if last is None else Sequence(last)
        added = BufferedBatch(shard, epoch, NOTHING, NONE, sequence, None, None, 10, ends_shard=ends)
        buffer.add(added)
        return added

    add("a", 3)
    kept = [add("a", 7), add("b", 3), add("a", 3, 2), add("a", None), add("a", 5, ends=True)]
    add("a", 5)
    buffer.drop_durable("a", 1, Sequence(5))
    assert list(buffer.snapshot().values()) == kept
    assert 1 in buffer
    assert 0 not in buffer


class LookedAt:
    """A batch that counts how often anyone asks whose it is."""

    epoch, bytes, last, ends_shard = 1, 10, Sequence(3), False

    def __init__(self, shard_id: str) -> None:
        self._shard_id = shard_id
        self.looks = 0

    @property
    def shard_id(self) -> str:
        self.looks += 1
        return self._shard_id


def test_however_many_shards_there_are_each_ones_batches_are_found_without_a_look_at_the_others() -> None:
    buffer, batches = Buffer(), [LookedAt(f"shard-{number % 100}") for number in range(1000)]
    for each in batches:
        buffer.add(each)  # type: ignore[arg-type]  # as much of one as a buffer looks at
    added = sum(each.looks for each in batches)
    for number in range(100):
        buffer.drop_durable(f"shard-{number}", 1, Sequence(2))
    for number in range(50):
        assert buffer.drop_shard(f"shard-{number}") == 10
    assert (len(buffer), buffer.bytes) == (500, 5000)
    assert sum(each.looks for each in batches) <= added + 10 * len(batches)


def moving(last: int | None, effective: int | None = None, event: int | None = None) -> Any:
    return None if last is None else Sequence(last), effective, event


def held(buffer: Buffer) -> list[Any]:
    return [
        (each.shard_id, each.epoch, each.last, each.effective_ms, each.latest_event_ms)
        for each in buffer.snapshot().values()
    ]


def test_of_batches_without_rows_one_is_kept_that_says_what_all_did() -> None:
    buffer = Buffer()
    buffer.move("a", 1, *moving(3, 30, 9))
    buffer.move("b", 1, *moving(1))
    buffer.move("a", 1, *moving(None))
    buffer.move("a", 1, *moving(5, None, 7))
    buffer.move("b", 1, *moving(None, 4, 4))
    buffer.move("b", 1, *moving(None, None, 6))
    assert held(buffer) == [("a", 1, Sequence(5), 30, 9), ("b", 1, Sequence(1), 4, 6)]


def test_what_a_cycle_has_seen_stays_as_it_was() -> None:
    buffer = Buffer()
    buffer.move("a", 1, Sequence(3))
    seen = buffer.snapshot()
    buffer.move("a", 1, Sequence(5))
    assert [each.last for each in seen.values()] == [Sequence(3)]
    buffer.remove(seen)
    assert [each.last for each in buffer.snapshot().values()] == [Sequence(5)]


def test_a_position_does_not_move_past_rows_that_came_before_it_nor_into_another_epoch() -> None:
    buffer, rows = Buffer(), batch("a")
    buffer.move("a", 1, Sequence(1))
    buffer.add(rows)
    buffer.move("a", 1, Sequence(3))
    buffer.move("a", 2, Sequence(4))
    assert [(place, last) for _, place, last, *_ in held(buffer)] == [
        (1, Sequence(1)),
        (1, None),
        (1, Sequence(3)),
        (2, Sequence(4)),
    ]


def test_what_was_dropped_is_not_added_to() -> None:
    buffer = Buffer()
    buffer.move("a", 1, Sequence(3))
    buffer.drop_shard("a")
    buffer.move("a", 1, Sequence(5))
    assert [last for _, _, last, *_ in held(buffer)] == [Sequence(5)]
