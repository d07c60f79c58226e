"""The oracle of keyed state finds numbers that are lost, doubled, foreign or out of order, and state that is in the wrong place."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.counted import Named, Run, check_counts, check_stored

from mldserver.ledger.contract import StateFile, StoreState
from mldserver.stores import KeyRange

RUN = Run("key", ["a", "b", "c", "d"], silent={"b"})
MIDDLE = 1 << 127
LOW = next(f"key-{n}" for n in range(99) if int(hashlib.md5(f"key-{n}".encode()).hexdigest(), 16) < MIDDLE)
HIGH = next(f"key-{n}" for n in range(99) if int(hashlib.md5(f"key-{n}".encode()).hexdigest(), 16) >= MIDDLE)


def test_numbers_in_the_order_of_the_records_pass() -> None:
    assert check_counts([RUN, Run("other", ["x"])], [("a", 1), ("c", 3), ("d", 4), ("x", 1)]) == []


@pytest.mark.parametrize(
    "rows",
    [
        {"a": 1, "c": 2, "d": 3},  # b did not count
        {"a": 1, "c": 3, "d": 5},  # a batch counted twice
        {"a": 1, "c": 4, "d": 3},
        {"a": 1, "c": 3, "d": 3},
        {"a": 1, "c": 3},
        {"a": 1, "b": 2, "c": 3, "d": 4},
        {"a": 1, "c": 3, "d": 4, "e": 5},
        {"a": 0, "c": 3, "d": 4},
    ],
)
def test_other_numbers_are_named(rows: Mapping[str, int]) -> None:
    assert check_counts([RUN], rows.items())


def test_a_record_with_two_rows_is_named() -> None:
    assert check_counts([Run("key", ["a", "b"])], [("a", 1), ("b", 2), ("a", 1)])


@pytest.mark.parametrize("numbers", [(2, 1, 3, 4), (3, 1, 2, 4), (4, 1, 2, 3), (1, 2, 3, 4)])
def test_a_record_that_was_redriven_counts_at_any_later_place(numbers: tuple[int, ...]) -> None:
    run = Run("key", ["a", "b", "c", "d"], again={"a"})
    assert check_counts([run], zip("abcd", numbers, strict=True)) == []


def test_a_redriven_record_cannot_count_before_records_that_precede_it() -> None:
    run = Run("key", ["a", "b", "c"], again={"c"})
    assert check_counts([run], [("a", 2), ("b", 3), ("c", 1)])


class Ledger:
    """What a ledger names."""

    def __init__(self) -> None:
        self.stores = {
            "parent": StoreState("parent", 2, closed=True),
            "low": StoreState("low", 3, 0, MIDDLE - 1),
            "high": StoreState("high", 3, MIDDLE),
        }
        halves = {"low": (KeyRange(0, MIDDLE - 1),), "high": (KeyRange(MIDDLE, (1 << 128) - 1),)}
        self.state_files = {
            "old": StateFile("old", halves, 3, 1),
            "new": StateFile("new", {"low": halves["low"]}, 1, 1),
        }


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write(tmp_path / "old", ("parent", LOW, 1, 1), ("parent", HIGH, 7, 1), ("parent", LOW, 2, 2))
    write(tmp_path / "new", ("low", LOW, 3, 3))
    return tmp_path


def write(path: Path, *rows: tuple[str, str, int | None, int]) -> None:
    table = [
        {
            "store": store,
            "key": key.encode(),
            "value": n and msgspec.msgpack.encode({"n": n}),
            "serial": serial,
        }
        for store, key, n, serial in rows
    ]
    pq.write_table(pa.Table.from_pylist(table), path)


def test_the_newest_row_of_each_key_counts(out: Path, ledger: Ledger) -> None:
    assert check_stored(out, Named.of(ledger), {LOW: 3, HIGH: 7}) == []


def change_number(out: Path, _: Ledger) -> None:
    write(out / "new", ("low", LOW, 4, 3))


def change_serial(out: Path, _: Ledger) -> None:
    write(out / "new", ("low", LOW, 3, 1))


def delete_key(out: Path, _: Ledger) -> None:
    write(out / "new", ("low", LOW, None, 3))


def add_key(out: Path, _: Ledger) -> None:
    write(out / "new", ("low", LOW, 3, 3), ("low", HIGH, 8, 3))


def need_too_much(_: Path, ledger: Ledger) -> None:
    everything = (KeyRange(0, (1 << 128) - 1),)
    ledger.state_files["old"] = StateFile("old", {"low": everything, "high": everything}, 3, 1)


def need_too_little(_: Path, ledger: Ledger) -> None:
    ledger.state_files["old"] = StateFile("old", {"low": ledger.state_files["old"].needed["low"]}, 3, 1)


def leave_it_with_the_parent(_: Path, ledger: Ledger) -> None:
    ledger.state_files["old"] = StateFile(
        "old", {**ledger.state_files["old"].needed, "parent": (KeyRange(0, 1),)}, 3, 1
    )


@pytest.mark.parametrize(
    "change",
    [change_number, change_serial, delete_key, need_too_much, need_too_little, leave_it_with_the_parent],
)
def test_other_state_is_named(out: Path, ledger: Ledger, change: Any) -> None:
    change(out, ledger)
    assert check_stored(out, Named.of(ledger), {LOW: 3, HIGH: 7})


def test_rows_for_which_no_store_needs_the_file_do_not_count(out: Path, ledger: Ledger) -> None:
    add_key(out, ledger)
    assert check_stored(out, Named.of(ledger), {LOW: 3, HIGH: 7}) == []


def test_state_that_has_expired_may_be_there_or_not(out: Path, ledger: Ledger) -> None:
    assert check_stored(out, Named.of(ledger), {LOW: 3}, forgotten={HIGH}) == []
    assert check_stored(out, Named.of(ledger), {LOW: 3, HIGH: 7, "gone": 1}, forgotten={"gone"}) == []
