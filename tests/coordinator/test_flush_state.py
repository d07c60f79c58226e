"""What a flush makes of the changes of keyed state."""

from __future__ import annotations

from typing import Any

import pytest

from mldserver.coordinator.core.flush import Buffer, BufferedBatch, FlushPlan, plan
from mldserver.effects import NOTHING, Effects
from mldserver.ledger.contract import BatchProgress, PositionUpdate, SegmentKind, StoreUpdate
from mldserver.records import Sequence
from mldserver.stores import StateChange, pack_changes

pytestmark = [pytest.mark.quick, pytest.mark.core]

S = Sequence


def changed(shard: str, *pairs: tuple[str, int], store: str = "s", **named: Any) -> BufferedBatch:
    blob = pack_changes(StateChange(key.encode(), str(value).encode()) for key, value in pairs)
    return BufferedBatch(shard, 1, Effects(state=(blob,)), store=store, **named)


def planned(*batches: BufferedBatch) -> FlushPlan:
    stores = {name: StoreUpdate(name, 4, ("a", "b")) for name in ("s", "t")}
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
