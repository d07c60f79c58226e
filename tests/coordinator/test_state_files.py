"""The content of state files: coalesced changes, a store's entries, and compaction; and a random model of all of it."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from coordinator.state_model import Model, Rules

from mldserver.coordinator.core.state_files import (
    COLUMNS,
    FILES_AT_ONCE,
    MOST_FILES,
    STEP_BYTES,
    changes,
    choose,
    compaction,
    entries,
    first_due_ms,
    pending_timers,
)
from mldserver.ledger.contract import StateFile, StoreState
from mldserver.stores import ALL_KEYS, KeyRange, StateChange, divide, hash_of, pack_changes

pytestmark = [pytest.mark.quick, pytest.mark.core]

Change = tuple[str, str | None] | tuple[str, str | None, int]
WHOLE = (ALL_KEYS,)
LOWER, UPPER = KeyRange(0, ALL_KEYS.last // 2), KeyRange(ALL_KEYS.last // 2 + 1, ALL_KEYS.last)
LOW = next(f"k{number}" for number in range(99) if hash_of(f"k{number}".encode()) in LOWER)
HIGH = next(f"k{number}" for number in range(99) if hash_of(f"k{number}".encode()) in UPPER)


def blob(*found: Change) -> bytes:
    return pack_changes(
        StateChange(key.encode(), None if value is None else value.encode(), *expires)
        for key, value, *expires in found
    )


def table(store: str, serial: int, *found: Change) -> pa.Table:
    return changes([(store, blob(*found))], {store: serial})


def a_file(path: str = "f", size: int = 100, **needed: tuple[KeyRange, ...]) -> StateFile:
    return StateFile(path, needed, rows=1, bytes=size)


def shown(rows: pa.Table) -> dict[str, str]:
    """Return the values by key."""
    keys, values = (rows.column(name).to_pylist() for name in ("key", "value"))
    assert len(set(keys)) == len(keys)
    return {
        key.decode(): "gone" if value is None else value.decode()
        for key, value in zip(keys, values, strict=True)
    }


# What a flush writes.


def test_of_several_changes_of_a_key_the_newest_is_written() -> None:
    found = changes([("s", blob(("a", "2"), ("b", None))), ("s", blob(("a", "1"), ("c", "1", 9)))], {"s": 4})
    assert shown(found) == {"a": "2", "b": "gone", "c": "1"}
    assert found.column("serial").to_pylist() == [4, 4, 4]
    assert found.column("expires_ms").to_pylist() == [None, None, 9]


def test_the_rows_of_a_file_are_in_the_order_of_their_stores_each_with_its_serial() -> None:
    found = changes(
        [("t", blob(("a", "1"))), ("s", blob(("a", "2"))), ("t", blob(("b", "3")))], {"s": 7, "t": 1}
    )
    assert found.column("store").to_pylist() == ["s", "t", "t"]
    assert found.column("serial").to_pylist() == [7, 1, 1]


def test_of_more_changes_than_a_portion_the_newest_of_each_key_is_written_too() -> None:
    """The newest are in the last blob, and its keys in others too."""
    blobs = [blob(*((f"k{key}", f"{number}") for key in range(700))) for number in range(4)]
    found = changes([("s", each) for each in reversed(blobs)], {"s": 1})
    assert shown(found) == {f"k{key}": "3" for key in range(700)}


def test_no_changes_are_a_table_without_rows() -> None:
    assert len(changes([], {})) == 0


# What a store holds.


def test_the_highest_serial_of_a_key_counts_in_whichever_order_the_files_stand() -> None:
    old, new = table("s", 1, ("a", "1"), ("b", "1")), table("s", 2, ("a", "2"))
    for files in ([old, new], [new, old]):
        found = entries([(each, a_file(s=WHOLE)) for each in files], StoreState("s"))
        assert shown(found) == {"a": "2", "b": "1"}


def test_deleted_keys_are_no_entries() -> None:
    files = [
        (table("s", 1, ("a", "1"), ("b", "1")), a_file(s=WHOLE)),
        (table("s", 2, ("a", None)), a_file(s=WHOLE)),
    ]
    assert shown(entries(files, StoreState("s"))) == {"b": "1"}


def test_entries_that_have_expired_are_left_out_once_the_time_is_known() -> None:
    files = [(table("s", 1, ("a", "1", 10), ("b", "1", 11), ("c", "1")), a_file(s=WHOLE))]
    assert shown(entries(files, StoreState("s"), expired_ms=10)) == {"b": "1", "c": "1"}
    assert shown(entries(files, StoreState("s"))) == {"a": "1", "b": "1", "c": "1"}


def test_an_expired_entry_hides_the_older_one_of_its_key() -> None:
    files = [(table("s", 1, ("a", "1")), a_file(s=WHOLE)), (table("s", 2, ("a", "2", 5)), a_file(s=WHOLE))]
    assert shown(entries(files, StoreState("s"), expired_ms=6)) == {}


def test_changes_in_the_buffer_are_newer_than_all_files() -> None:
    files = [(table("s", 5, ("a", "1"), ("b", "1")), a_file(s=WHOLE))]
    found = entries(files, StoreState("s"), buffered=table("s", 1 << 62, ("a", None), ("c", "2")))
    assert shown(found) == {"b": "1", "c": "2"}


def test_a_store_without_files_is_empty() -> None:
    assert shown(entries([], StoreState("s"))) == {}


def test_rows_of_other_stores_in_a_file_are_not_taken() -> None:
    """Families of DynamoDB Streams all have the full range."""
    both = pa.concat_tables([table("s", 1, ("a", "1")), table("t", 1, ("a", "2"), ("b", "2"))])
    assert shown(entries([(both, a_file(s=WHOLE, t=WHOLE))], StoreState("s"))) == {"a": "1"}


@pytest.mark.parametrize(("part", "key"), [(LOWER, LOW), (UPPER, HIGH)])
def test_of_an_inherited_file_a_child_takes_the_rows_in_its_range(part: KeyRange, key: str) -> None:
    parent = table("parent", 3, (LOW, "1"), (HIGH, "1"))
    child = StoreState("child", 4, *part)
    assert shown(entries([(parent, a_file(child=(part,)))], child)) == {key: "1"}


def test_of_a_file_of_its_own_a_store_takes_only_the_ranges_for_which_it_still_needs_it() -> None:
    own = table("s", 1, (LOW, "1"), (HIGH, "1"))
    assert shown(entries([(own, a_file(s=(UPPER,)))], StoreState("s"))) == {HIGH: "1"}


def test_both_bounds_of_a_range_are_inside() -> None:
    at = hash_of(LOW.encode())
    parent = table("parent", 1, (LOW, "1"))
    for inside, bounds in ((True, (at, at)), (False, (at - 1, at - 1)), (False, (at + 1, at + 1))):
        part = KeyRange(*bounds)
        found = entries([(parent, a_file(child=(part,)))], StoreState("child", 2, *part))
        assert shown(found) == ({LOW: "1"} if inside else {})


def test_of_a_file_with_its_own_rows_a_store_takes_no_others_also_where_it_needs_a_part_of_it() -> None:
    """Two families, of whose file a part was compacted."""
    both = pa.concat_tables([table("s", 1, (LOW, "1"), (HIGH, "1")), table("t", 1, (HIGH, "2"))])
    assert shown(entries([(both, a_file(s=(UPPER,), t=WHOLE))], StoreState("s"))) == {HIGH: "1"}


# Timers.


def timers(store: str, serial: int, *found: tuple[str, str, int | None]) -> pa.Table:
    """Return changes of a key's state and timers: id, value or "", and due time."""
    rows = [StateChange(b"a", value.encode() or None, due_ms, timer) for timer, value, due_ms in found]
    return changes([(store, pack_changes(rows))], {store: serial})


def shown_timers(rows: pa.Table) -> dict[str | None, tuple[str, int | None]]:
    return {
        row["timer"]: (row["value"] and row["value"].decode(), row["expires_ms"]) for row in rows.to_pylist()
    }


def test_a_key_has_a_state_and_timers_each_with_its_newest_row() -> None:
    old = timers("s", 1, ("", "state", None), ("alarm", "1", 7), ("alarm/x", "1", 8), ("gone", "1", 9))
    new = timers("s", 2, ("alarm", "2", 6), ("gone", "", None))
    found = entries([(each, a_file(s=WHOLE)) for each in (new, old)], StoreState("s"))
    assert shown_timers(found) == {None: ("state", None), "alarm": ("2", 6), "alarm/x": ("1", 8)}
    assert first_due_ms(found) == 6
    assert pending_timers(found) == (2, ("alarm",))


def test_of_a_batch_with_timers_and_one_without_the_newest_change_of_each_counts() -> None:
    newest = pack_changes([StateChange(b"a", b"2")])
    older = pack_changes([StateChange(b"a", b"1"), StateChange(b"a", b"t", 5, "alarm")])
    assert shown_timers(changes([("s", newest), ("s", older)], {"s": 1})) == {
        None: ("2", None),
        "alarm": ("t", 5),
    }


def test_timers_that_were_due_long_ago_stay_in_snapshots_and_compactions() -> None:
    rows = timers("s", 1, ("", "state", 5), ("alarm", "1", 5))
    found = entries([(rows, a_file(s=WHOLE))], StoreState("s"), expired_ms=99)
    assert shown_timers(found) == {"alarm": ("1", 5)}
    assert shown_timers(compacted((a_file("old", s=WHOLE), rows), expired_ms=99)[0]) == {"alarm": ("1", 5)}


def test_a_store_without_timers_has_no_first_one() -> None:
    assert first_due_ms(entries([], StoreState("s"))) is None
    assert pending_timers(entries([], StoreState("s"))) == (0, ())
    assert first_due_ms(entries([(table("s", 1, ("a", "1", 5)), a_file(s=WHOLE))], StoreState("s"))) is None


def test_files_without_the_column_of_timers_have_states_only() -> None:
    before, now = (
        table("s", 1, ("a", "1"), ("b", "1")).drop_columns("timer"),
        timers("s", 2, ("alarm", "1", 5)),
    )
    found = entries([(each, a_file(s=WHOLE)) for each in (before, now)], StoreState("s"))
    assert found.column("timer").to_pylist().count(None) == 2
    assert first_due_ms(found) == 5
    rows, _ = compacted((a_file("old", s=WHOLE), before), (a_file("new", s=WHOLE), now))
    assert (len(rows), rows.schema) == (3, COLUMNS)


# Compaction.


def compacted(
    *files: tuple[StateFile, pa.Table],
    left: tuple[StateFile, ...] = (),
    stores: tuple[str, ...] = ("s",),
    part: KeyRange = ALL_KEYS,
    expired_ms: int | None = None,
) -> tuple[pa.Table, dict[str, tuple[KeyRange, ...]]]:
    content = {file.path: rows for file, rows in files}
    chosen = [file for file, _ in files]
    step = compaction(chosen, [*chosen, *left], set(stores), part)
    states = {store: StoreState(store) for store in step.stores}
    rows = step.rows(
        lambda file: content[file.path],
        states,
        {} if expired_ms is None else dict.fromkeys(step.stores, expired_ms),
    )
    return rows, step.needed


OLD = (a_file("old", s=WHOLE), table("s", 1, ("a", "1"), ("b", "1")))
NEW = (a_file("new", s=WHOLE), table("s", 2, ("a", "2"), ("b", None), ("c", "2", 10)))


def test_compaction_of_all_files_drops_tombstones_and_what_has_expired() -> None:
    rows, needed = compacted(OLD, NEW, expired_ms=10)
    assert shown(rows) == {"a": "2"}
    assert needed == {"s": WHOLE}
    assert rows.column("serial").to_pylist() == [2]


def test_compaction_of_some_files_keeps_what_hides_rows_in_the_others() -> None:
    rows, _ = compacted(OLD, NEW, left=(a_file("older", s=WHOLE),), expired_ms=10)
    assert shown(rows) == {"a": "2", "b": "gone", "c": "2"}


def test_a_store_that_needs_other_files_only_for_other_ranges_is_compacted_whole() -> None:
    rows, needed = compacted(OLD, NEW, left=(a_file("older", s=(UPPER,)),), part=LOWER)
    assert needed == {"s": (LOWER,)}
    assert set(shown(rows)) <= {"a", "c"}


def test_compaction_takes_only_the_rows_of_stores_that_are_served_here() -> None:
    both = pa.concat_tables([OLD[1], table("t", 1, ("x", "1"))])
    rows, needed = compacted((a_file("both", s=WHOLE, t=WHOLE), both), NEW)
    assert rows.column("store").to_pylist() == ["s", "s"]
    assert needed == {"s": WHOLE}


def test_inherited_rows_become_the_rows_of_the_store_that_compacts_them() -> None:
    inherited = table("parent", 1, (LOW, "1"), (HIGH, "1"))
    rows, needed = compacted(
        (a_file("old", s=(LOWER,)), inherited), (a_file("new", s=(LOWER,)), table("s", 2))
    )
    assert rows.to_pylist() == [
        {
            "store": "s",
            "key": LOW.encode(),
            "expires_ms": None,
            "value": b"1",
            "serial": 1,
            "timer": None,
        }
    ]
    assert needed == {"s": (LOWER,)}


def test_of_ranges_that_touch_the_new_file_names_one() -> None:
    files = [
        (a_file("old", s=(UPPER,)), table("parent", 1, (HIGH, "1"))),
        (a_file("new", s=(LOWER,)), table("other", 1, (LOW, "1"))),
    ]
    assert compacted(*files)[1] == {"s": WHOLE}
    gap = KeyRange(0, 7), KeyRange(9, 10)
    assert compacted((a_file("old", s=gap), files[0][1]))[1] == {"s": gap}


def test_a_store_of_which_nothing_is_left_keeps_a_row_by_which_its_files_are_told_from_inherited_ones() -> (
    None
):
    rows, needed = compacted(
        (
            a_file("old", s=WHOLE, t=WHOLE),
            pa.concat_tables([table("s", 1, ("a", None)), table("t", 1, ("b", "1"))]),
        ),
        stores=("s", "t"),
    )
    assert needed == {"s": WHOLE, "t": WHOLE}
    for store, left in (("s", {}), ("t", {"b": "1"})):
        assert shown(entries([(rows, a_file(**needed))], StoreState(store))) == left


def test_a_store_that_needs_the_files_only_outside_the_part_takes_no_part() -> None:
    rows, needed = compacted((a_file("old", s=(UPPER,)), OLD[1]), part=LOWER)
    assert (len(rows), needed) == (0, {})


# Which files are compacted.


def files_of(*sizes: int) -> list[StateFile]:
    return [a_file(f"file-{number}", size, s=WHOLE) for number, size in enumerate(sizes)]


def chosen_of(*sizes: int) -> list[int]:
    step = choose(files_of(*sizes), {"s"})
    return [] if step is None else [file.bytes for file in step.files]


def test_few_files_are_left_as_they_are() -> None:
    assert chosen_of(*[100] * (FILES_AT_ONCE - 1)) == []


def test_all_become_one_when_the_others_are_as_large_as_the_largest() -> None:
    sizes = [700, *[100] * 7]
    assert sorted(chosen_of(*sizes)) == sorted(sizes)
    step = choose(files_of(*sizes), {"s"})
    assert step is not None
    assert step.whole == {"s"}


def test_files_of_similar_size_become_one_beside_a_large_one() -> None:
    assert chosen_of(9000, 10, 100, 100, 110, 120, 130, 140, 150, 400) == [
        100,
        100,
        110,
        120,
        130,
        140,
        150,
        400,
    ]


def test_files_of_different_sizes_wait() -> None:
    assert chosen_of(*(10**number for number in range(1, 9))) == []


def test_too_many_files_of_any_size_make_one_of_the_smallest() -> None:
    # Seven of each size: no eight are alike. The largest is larger than all others together.
    sizes = sorted([1, 5, 25] * 7 + [125] * (MOST_FILES - 22) + [10_000])
    assert chosen_of(*sizes) == []
    assert chosen_of(*sizes, 60_000) == sizes[:FILES_AT_ONCE]


def test_files_of_stores_elsewhere_do_not_count() -> None:
    files = [*files_of(*[100] * 7), a_file("elsewhere", 100, t=WHOLE)]
    assert choose(files, {"s"}) is None
    assert choose(files, {"s", "t"}) is not None


def test_more_than_a_step_holds_is_compacted_by_parts_of_the_hashes() -> None:
    large, small = STEP_BYTES // 9 * 8, STEP_BYTES // 9
    files = files_of(large, *[small] * 8)
    left: tuple[KeyRange, ...] = WHOLE
    for number in range(3):
        step = choose(files, {"s"})
        assert step is not None
        assert (len(step.files), step.whole) == (9, {"s"})
        assert divide(left, step.part)[0] == (step.part,)
        left = divide(left, step.part)[1]
        old = [replace(file, needed={"s": left} if left else {}) for file in files[:9]]
        files = [*old, *files[9:], a_file(f"part-{number}", large // (1 if number else 2), s=(step.part,))]
    assert left == ()
    assert choose(files, {"s"}) is None


def test_similar_files_that_do_not_fit_a_step_together_stay() -> None:
    assert chosen_of(9 * STEP_BYTES, *[STEP_BYTES // 7] * 8) == []


# The random model.


@pytest.mark.parametrize("seed", range(4))
def test_files_always_give_what_was_written(seed: int) -> None:
    Model(seed).run(400)


@pytest.mark.long
def test_files_always_give_what_was_written_in_many_runs() -> None:
    for seed in range(300):
        Model(seed).run(400)


class StoresNeedWholeFiles(Rules):
    def needed_by(self, file: StateFile, store: StoreState) -> StateFile:
        return replace(file, needed={store.store_id: (store.key_range,)})


class SerialsRestart(Rules):
    def child_serial(self, parents: list[StoreState]) -> int:
        return 0 * len(parents)


class NoRange(Rules):
    def needed_by(self, file: StateFile, store: StoreState) -> StateFile:
        return replace(file, needed={store.store_id: WHOLE})

    def handed_over(self, ranges: tuple[KeyRange, ...], child: KeyRange) -> tuple[KeyRange, ...]:
        return ranges


class AnyCompactionDropsTombstones(Rules):
    def may_forget(self, whole: frozenset[str], stores: tuple[str, ...]) -> frozenset[str]:
        return whole | frozenset(stores)


@pytest.mark.parametrize(
    ("rules", "seed"),
    [
        (StoresNeedWholeFiles(), 3),
        (SerialsRestart(), 0),
        (NoRange(), 0),
        (AnyCompactionDropsTombstones(), 2),
    ],
    ids=lambda each: type(each).__name__,
)
def test_the_model_finds_rules_that_are_wrong(rules: Rules, seed: int) -> None:
    """Of 300 runs, the first breaks 86; of 30, the others break 30, 30 and 26."""
    with pytest.raises(AssertionError):
        Model(seed, rules).run(400)
