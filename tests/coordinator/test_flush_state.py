"""What a flush makes of the changes of keyed state."""

from __future__ import annotations

from typing import Any

import pytest

from mldserver.coordinator.core.flush import Buffer, BufferedBatch, FlushPlan, plan
from mldserver.effects import NOTHING, Effects
from mldserver.ledger.contract import BatchProgress, PositionUpdate, SegmentKind, StoreUpdate
from mldserver.records import Sequence
from mldserver.runtime.interface import TimerReport
from mldserver.stores import StateChange, pack_changes

pytestmark = [pytest.mark.quick, pytest.mark.core]

S = Sequence


def changed(shard: str, *pairs: tuple[str, int], store: str = "s", **named: Any) -> BufferedBatch:
    blob = pack_changes(StateChange(key.encode(), str(value).encode()) for key, value in pairs)
    return BufferedBatch(shard, 1, Effects(state=(blob,)), store=store, **named)


def planned(*batches: BufferedBatch, due_ms: int | None = None) -> FlushPlan:
    stores = {name: StoreUpdate(name, 4, ("a", "b"), due_ms) for name in ("s", "t")}
    return plan(
        batches,
        spec=None,
        clock=0,
        progress=BatchProgress(),
        now_ms=0,
        durable={"a": S(1)},
        kind=lambda _: SegmentKind.WINDOW,
        stores=stores,
    )


def test_the_changes_of_all_stores_are_one_file_with_the_newest_of_each_key() -> None:
    plan_ = planned(
        changed("a", ("x", 1), ("y", 1)), changed("c", ("x", 7), store="t"), changed("b", ("x", 2))
    )
    assert plan_.state is not None
    rows = [(row["store"], row["key"], row["value"], row["serial"]) for row in plan_.state.to_pylist()]
    assert sorted(rows) == [("s", b"x", b"2", 5), ("s", b"y", b"1", 5), ("t", b"x", b"7", 5)]
    assert plan_.stores == (StoreUpdate("s", 4, ("a", "b")), StoreUpdate("t", 4, ("a", "b")))
    assert plan_.effects == NOTHING


def test_a_flush_says_when_the_first_timer_of_each_store_is_due_as_its_last_batch_does() -> None:
    reports = [TimerReport(next_due_ms=ms) for ms in (70, 60, None)]
    batches = [changed("a", ("x", number), timers=each) for number, each in enumerate(reports)]
    assert planned(*batches[:2], changed("b", ("x", 9))).stores == (StoreUpdate("s", 4, ("a", "b"), 60),)
    assert planned(*batches).stores == (StoreUpdate("s", 4, ("a", "b")),)


def test_a_store_keeps_its_time_when_no_batch_says_anything_of_timers() -> None:
    """The handler has none now, and the store still has those of an earlier version."""
    assert planned(changed("a", ("x", 1)), due_ms=70).stores == (StoreUpdate("s", 4, ("a", "b"), 70),)


def test_the_batches_of_a_flush_that_was_registered_leave_the_buffer_also_where_no_position_moves() -> None:
    buffer = Buffer()
    fired, letter, later = (
        changed("a", ("x", number), redriven=("1.0",) if number == 2 else ()) for number in (1, 2, 3)
    )
    end = BufferedBatch("a", 1, last=S(9), ends_shard=True, store="s")
    other = changed("c", ("x", 1), store="t")
    flushed = [buffer.add(batch) for batch in (fired, letter, end, other)]
    buffer.add(later)
    buffer.drop_registered([*flushed, 99], {"s"})
    assert list(buffer.snapshot().values()) == [letter, end, other, later]


def test_batches_that_change_no_state_write_no_file() -> None:
    plan_ = planned(BufferedBatch("a", 1, last=S(2), store="s"))
    assert (plan_.state, plan_.stores) == (None, ())


def test_redriven_letters_that_change_a_store_prove_the_epoch_of_its_shard_and_move_nothing() -> None:
    plan_ = planned(changed("a", ("x", 1), redriven=("17.0",)))
    assert plan_.positions == (PositionUpdate("a", 1, S(1), None, None, previous=S(1)),)
    assert len(plan_.stores) == 1


def test_the_batches_of_a_store_are_found_in_order_without_redriven_ones() -> None:
    buffer = Buffer()
    batches = [changed("a", ("x", 1)), changed("b", ("x", 2)), changed("c", ("x", 3), store="t")]
    for batch in (*batches, changed("a", ("x", 9), redriven=("1.0",))):
        buffer.add(batch)
    assert buffer.of_store("s") == batches[:2]


def test_the_buffer_counts_what_leaves_it() -> None:
    buffer = Buffer()
    number = buffer.add(changed("a", ("x", 1)))
    buffer.remove([number, number])
    assert buffer.removals == 1
