"""A batch's effects are one value from the handler to the ledger's transaction: a new kind passes all parts in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from coordinator.outcomes import dead_letter, outcome
from coordinator.writing import Writing
from msgspec import structs

from mldserver import effects
from mldserver.children.channel import decode, encode
from mldserver.coordinator import flusher
from mldserver.coordinator.core import flush
from mldserver.effects import NOTHING, EffectKind, Effects
from mldserver.ledger import row_rules
from mldserver.ledger.book import Draft
from mldserver.ledger.contract import Flush, FlushResult
from mldserver.windows import TimeWindows
from mldserver.workers import wire

pytestmark = [pytest.mark.quick, pytest.mark.core]

LETTER = dead_letter("a", 1)
ROWS = pa.table({"n": [1, 2]})


def test_effects_without_anything_are_false() -> None:
    assert not NOTHING
    assert not Effects()
    assert Effects(ROWS)
    assert Effects(dead_letters=(LETTER,))


def test_the_bytes_of_effects_are_those_of_all_kinds() -> None:
    assert NOTHING.nbytes == 0
    assert Effects(ROWS, (LETTER,)).nbytes == ROWS.nbytes + len(LETTER.data) + len(LETTER.traceback)


def test_parts_are_joined_in_their_order_without_rows() -> None:
    letters = [dead_letter("a", number) for number in (3, 1, 2)]
    parts = [Effects(ROWS, (letters[0],)), NOTHING, Effects(None, tuple(letters[1:]))]
    assert Effects.without_rows(parts) == Effects(dead_letters=tuple(letters))
    assert Effects.without_rows([Effects(ROWS)]) is NOTHING
    assert Effects.without_rows([]) is NOTHING


class Marked(Effects, frozen=True):
    """``Effects`` with one more field."""

    marks: tuple[int, ...] = ()


async def test_a_new_kind_changes_three_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a worker's answer through joining, buffer and flush to the transaction, no other file knows the kind."""
    # In effects.py: the field, its size, and its form between processes.
    monkeypatch.setitem(effects.KINDS, "marks", EffectKind(lambda _: 8, str, int))
    monkeypatch.setattr(effects, "NOTHING", Marked())
    for module in (wire, flush, flusher):
        monkeypatch.setattr(module, "Effects", Marked)
    # In ledger/row_rules.py: what the transaction does with it.
    registered: list[int] = []
    register = row_rules.register

    def registering_marks(draft: Draft, new: Flush, now_ms: int) -> FlushResult:
        result = register(draft, new, now_ms)
        assert isinstance(new.effects, Marked)
        if result.registered:
            registered.extend(new.effects.marks)
        return result

    monkeypatch.setattr(row_rules, "register", registering_marks)

    # In the third file, which produces it: this test.
    def crossed(records: list[tuple[int, int]], **more: Any) -> Any:
        made = outcome("a", records, rows=[], letters=[LETTER])
        marked = Marked(dead_letters=made.effects.dead_letters, **more)
        (done,) = decode(
            wire.FromWorker, b"\x91" + encode(wire.done_of(1, structs.replace(made, effects=marked)))
        )
        return wire.outcome_of(done, [])

    writing = await Writing.begin(tmp_path, TimeWindows(10_000))
    shard = await writing.ledger.open_shard("a")
    batch = wire.joined([crossed([(1, 1000)], marks=(7, 8)), crossed([(2, 2000)], marks=(9,))])
    buffered = flush.buffered("a", shard.epoch, batch, floor_ms=None, spec=writing.spec)
    assert buffered.bytes == 3 * 8 + 2 * (len(LETTER.data) + len(LETTER.traceback))
    await writing.flush([buffered])
    assert registered == [7, 8, 9]
    assert writing.registered().dead_letters == 2
    writing.ledger.store.close()
