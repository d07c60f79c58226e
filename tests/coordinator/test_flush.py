from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from coordinator.outcomes import dead_letter, outcome
from hypothesis import given
from hypothesis import strategies as st

from mldserver.coordinator.core.flush import (
    Ahead,
    BufferedBatch,
    FlushPlan,
    buffered,
    flush_at,
    plan,
)
from mldserver.coordinator.core.open_windows import WindowKey
from mldserver.effects import NOTHING, Effects
from mldserver.ledger.contract import BatchProgress, PositionUpdate, SegmentKind, batch_id
from mldserver.records import Sequence
from mldserver.windows import Batches, TimeWindows, WindowSpec, time_window_id

pytestmark = [pytest.mark.quick, pytest.mark.core]

SPEC = TimeWindows(1000)
S = Sequence


def take(
    shard: str, records: list[tuple[int, int]], *, floor_ms: int | None = None, spec: WindowSpec | None = SPEC
) -> BufferedBatch:
    return buffered(shard, 1, outcome(shard, records), floor_ms=floor_ms, spec=spec)


def planned(
    *batches: BufferedBatch,
    spec: WindowSpec | None = SPEC,
    clock: int = 0,
    progress: BatchProgress | None = None,
    durable: dict[str, Sequence | None] | None = None,
    kind: Callable[[WindowKey], SegmentKind] = lambda key: SegmentKind.WINDOW,
) -> FlushPlan:
    return plan(
        batches,
        spec=spec,
        clock=clock,
        progress=progress or BatchProgress(),
        now_ms=77,
        durable=durable or {},
        kind=kind,
    )


def rows(flush: FlushPlan) -> dict[str, list[tuple[int, int, int]]]:
    """Return (_time, _clock, sequence) of each window's rows."""
    columns = ("_time", "_clock", "_sequence")
    return {
        file.key.id: list(
            zip(*(map(int, file.rows.column(name).to_pylist()) for name in columns), strict=True)
        )
        for file in flush.files
    }


# A batch.


def test_rows_carry_effective_times_that_never_go_down_and_start_at_the_floor() -> None:
    batch = take("a", [(1, 10), (2, 5), (3, 40)], floor_ms=20)
    assert batch.effects.rows.column("_time").to_pylist() == [20, 20, 40]
    assert batch.event_ms.tolist() == [20, 20, 40]
    assert (batch.last, batch.effective_ms, batch.latest_event_ms) == (S(3), 40, 40)


def test_records_without_rows_move_the_shard_all_the_same() -> None:
    result = outcome("a", [(1, 10), (2, 50)], rows=[])
    batch = buffered("a", 3, result, floor_ms=None, spec=SPEC)
    assert batch.effects.rows is None
    assert (batch.epoch, batch.last, batch.effective_ms, batch.latest_event_ms) == (3, S(2), 50, 50)


def test_an_empty_table_is_no_rows() -> None:
    result = outcome("a", [(1, 10)])
    empty = type(result)(result.outline, Effects(result.effects.rows.slice(0, 0)))
    assert buffered("a", 1, empty, floor_ms=None, spec=SPEC).effects.rows is None


def test_an_empty_batch_shows_nothing() -> None:
    batch = take("a", [], floor_ms=20)
    assert (batch.effects.rows, batch.last, batch.effective_ms, batch.latest_event_ms) == (
        None,
        None,
        None,
        None,
    )


def test_the_size_counts_rows_and_dead_letters() -> None:
    letter = dead_letter("a", 2)
    plain = buffered("a", 1, outcome("a", [(1, 10)]), floor_ms=None, spec=SPEC)
    with_letter = buffered("a", 1, outcome("a", [(1, 10)], letters=[letter]), floor_ms=None, spec=SPEC)
    assert plain.bytes == plain.effects.rows.nbytes > 0
    assert with_letter.bytes == plain.bytes + len(letter.data) + len(letter.traceback)
    assert with_letter.effects.dead_letters == (letter,)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC"])
def test_event_times_come_from_the_column_in_any_unit(unit: str, zone: str | None) -> None:
    at = [datetime(1969, 12, 31, 23, 59, 58, tzinfo=UTC), datetime(2013, 1, 1, tzinfo=UTC)]
    column = pa.array([each.replace(tzinfo=None) for each in at], pa.timestamp(unit))
    if zone:
        column = column.cast(pa.timestamp(unit, tz=zone))
    result = outcome("a", [(1, 10), (2, 20)], columns={"at": column})
    batch = buffered("a", 1, result, floor_ms=None, spec=TimeWindows(1000, "at"))
    assert batch.event_ms.tolist() == [-2000, 1_356_998_400_000]
    assert batch.latest_event_ms == 1_356_998_400_000
    assert batch.effects.rows.column("_time").to_pylist() == [10, 20]


def test_event_times_before_1970_are_rounded_down() -> None:
    column = pa.array([-1, -1000, 999], pa.timestamp("us"))
    result = outcome("a", [(1, 1), (2, 2), (3, 3)], columns={"at": column})
    batch = buffered("a", 1, result, floor_ms=None, spec=TimeWindows(1000, "at"))
    assert batch.event_ms.tolist() == [-1, -1, 0]


def test_cut_on_a_column_records_without_rows_show_no_event_time() -> None:
    result = outcome("a", [(1, 10)], rows=[])
    batch = buffered("a", 1, result, floor_ms=None, spec=TimeWindows(1000, "at"))
    assert (batch.effective_ms, batch.latest_event_ms) == (10, None)


NOON = 1_700_000_000_000


@pytest.mark.parametrize(
    ("ahead_ms", "latest", "rows"),
    [([-5, 100, 0], NOON + 102, 0), ([-5, 101, 0], NOON + 3, 1), ([101, 10**12, 102], None, 3)],
)
def test_rows_that_run_further_ahead_than_they_may_say_nothing_of_how_far_the_shard_is(
    ahead_ms: list[int], latest: int | None, rows: int
) -> None:
    records = [(number, NOON + number) for number in (1, 2, 3)]
    at = pa.array([ms + ahead for (_, ms), ahead in zip(records, ahead_ms, strict=True)], pa.timestamp("ms"))
    result = outcome("a", records, columns={"at": at})
    batch = buffered("a", 1, result, floor_ms=None, spec=TimeWindows(1000, "at"), max_ahead_ms=100)
    assert batch.latest_event_ms == latest
    assert batch.event_ms.tolist() == at.cast("int64").to_pylist(), "they are kept, in their own windows"
    assert batch.ahead == (Ahead(rows, "2", ahead_ms[1]) if rows else None)
    freely = buffered("a", 1, result, floor_ms=None, spec=TimeWindows(1000, "at"))
    assert (freely.ahead, freely.latest_event_ms) == (None, max(batch.event_ms))


def test_ahead_is_what_is_after_the_effective_arrival_and_the_record_is_named_in_its_aggregate() -> None:
    at = pa.array([NOON, NOON + 500], pa.timestamp("ms"))
    result = outcome("a", [(1, NOON), (2, NOON - 1000)], columns={"at": at})
    rows = result.effects.rows.set_column(4, "_sub_sequence", pa.array([0, 3], pa.int64()))
    assert rows.schema.names[4] == result.effects.rows.schema.names[4] == "_sub_sequence"
    batch = buffered(
        "a",
        1,
        type(result)(result.outline, Effects(rows)),
        floor_ms=None,
        spec=TimeWindows(1000, "at"),
        max_ahead_ms=400,
    )
    assert batch.ahead == Ahead(1, "2/3", 500)


# A plan.


def test_nothing_plans_nothing() -> None:
    assert planned(clock=5) == FlushPlan((), (), NOTHING, 0, 5, BatchProgress())


def test_a_handler_without_rows_moves_positions_only() -> None:
    flush = planned(take("a", [(1, 10)], spec=None), spec=None, clock=5)
    assert flush.files == ()
    assert flush.clock == 5
    assert flush.positions == (PositionUpdate("a", 1, S(1), 10, 10),)


def test_rows_are_merged_by_effective_time_and_numbered_by_the_clock() -> None:
    flush = planned(take("a", [(1, 10), (2, 30)]), take("b", [(7, 20), (8, 30)]), clock=100)
    assert rows(flush) == {time_window_id(0): [(10, 100, 1), (20, 101, 7), (30, 102, 2), (30, 103, 8)]}
    assert flush.clock == 104
    assert flush.rows == 4


def test_each_window_is_one_file_in_merge_order() -> None:
    flush = planned(take("a", [(1, 10), (2, 1500)]), take("b", [(7, 1200), (8, 2500)]))
    assert rows(flush) == {
        time_window_id(0): [(10, 0, 1)],
        time_window_id(1000): [(1200, 1, 7), (1500, 2, 2)],
        time_window_id(2000): [(2500, 3, 8)],
    }


def test_batches_that_are_in_order_over_several_windows_stay_so() -> None:
    flush = planned(take("a", [(1, 10), (2, 1500)]), take("a", [(3, 1600), (4, 2500)], floor_ms=1500))
    assert [r for each in rows(flush).values() for r in each] == [
        (10, 0, 1),
        (1500, 1, 2),
        (1600, 2, 3),
        (2500, 3, 4),
    ]


def test_event_times_of_a_column_go_with_their_rows_through_the_merge() -> None:
    spec = TimeWindows(1000, "at")

    def on_column(shard: str, *records: tuple[int, int, int]) -> BufferedBatch:
        column = pa.array([event for _, _, event in records], pa.timestamp("ms"))
        result = outcome(shard, [(n, at) for n, at, _ in records], columns={"at": column})
        return buffered(shard, 1, result, floor_ms=None, spec=spec)

    flush = planned(on_column("a", (1, 30, 100), (2, 40, 5100)), on_column("b", (7, 20, 5200)), spec=spec)
    assert rows(flush) == {time_window_id(0): [(30, 1, 1)], time_window_id(5000): [(20, 0, 7), (40, 2, 2)]}


def test_each_windows_rows_are_told_what_they_are_for() -> None:
    kinds = {0: SegmentKind.RECOMPUTE, 1000: SegmentKind.LATE, 2000: SegmentKind.WINDOW}
    batch = take("a", [(1, 10), (2, 1500), (3, 2500)])
    flush = planned(batch, kind=lambda key: kinds[key.start_ms])
    assert [(file.key.start_ms, file.kind) for file in flush.files] == list(kinds.items())
    assert flush.rows == 3


def test_batches_windows_take_rows_in_merge_order() -> None:
    spec = Batches(2, 60_000)
    a, b = take("a", [(1, 10), (2, 30)], spec=spec), take("b", [(7, 20)], spec=spec)
    flush = planned(a, b, spec=spec, progress=BatchProgress(4, 1, 5))
    assert rows(flush) == {batch_id(4): [(10, 0, 1)], batch_id(5): [(20, 1, 7), (30, 2, 2)]}
    assert flush.progress == BatchProgress(6)


def test_a_shards_positions_become_one_update_with_the_last_word() -> None:
    end = BufferedBatch("a", 1, last=S(3), ends_shard=True)
    flush = planned(take("a", [(1, 10)]), take("b", [(7, 99)]), take("a", [(3, 30)], floor_ms=10), end)
    assert flush.positions == (
        PositionUpdate("a", 1, S(3), 30, 30, ended=True),
        PositionUpdate("b", 1, S(7), 99, 99),
    )


def test_each_update_says_which_position_it_goes_on_from() -> None:
    flush = planned(
        take("a", [(4, 10)]), take("b", [(7, 99)]), take("a", [(5, 30)]), durable={"a": S(3), "c": S(1)}
    )
    assert [(update.position, update.previous) for update in flush.positions] == [(S(5), S(3)), (S(7), None)]


def test_a_redriven_letter_moves_no_position() -> None:
    redriven = BufferedBatch("a", 1, last=S(9), redriven=("1.0",))
    assert planned(take("a", [(4, 10)]), redriven).positions == (PositionUpdate("a", 1, S(4), 10, 10),)


def test_the_end_of_a_shard_that_is_durable_already_keeps_its_position() -> None:
    assert planned(BufferedBatch("a", 2, last=S(9), ends_shard=True)).positions == (
        PositionUpdate("a", 2, S(9), None, None, ended=True),
    )


def test_an_end_without_any_record_has_no_position() -> None:
    assert planned(BufferedBatch("a", 2, last=None, ends_shard=True)).positions == (
        PositionUpdate("a", 2, None, None, None, ended=True),
    )


def test_a_shard_stays_ended_whatever_follows_in_the_same_flush() -> None:
    batch = take("a", [(3, 30)])
    silent = BufferedBatch("a", 1)
    flush = planned(batch, BufferedBatch("a", 1, last=S(3), ends_shard=True), silent)
    assert flush.positions == (PositionUpdate("a", 1, S(3), 30, 30, ended=True),)


def test_dead_letters_are_stored_in_the_order_of_their_batches() -> None:
    letters = [dead_letter("a", 1), dead_letter("b", 2)]
    batches = [
        buffered(each.shard_id, 1, outcome(each.shard_id, [], letters=[each]), floor_ms=None, spec=SPEC)
        for each in letters
    ]
    assert planned(*batches).effects.dead_letters == tuple(letters)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 4000), max_size=5)), max_size=10),
    st.integers(0, 10**6),
    st.sampled_from([TimeWindows(1000), Batches(3, 1000)]),
)
def test_a_plan_loses_no_row_and_keeps_the_total_order(
    deliveries: list[tuple[str, list[int]]], clock: int, spec: WindowSpec
) -> None:
    floors: dict[str, int] = {}
    counts: dict[str, int] = {}
    batches, naive = [], []
    for shard, times in deliveries:
        records = []
        for ms in times:
            counts[shard] = counts.get(shard, 0) + 1
            records.append((counts[shard], ms))
        batch = take(shard, records, floor_ms=floors.get(shard), spec=spec)
        for number, ms in records:
            floors[shard] = max(ms, floors.get(shard, ms))
            naive.append((floors[shard], shard, number))
        batches.append(batch)
    naive.sort(key=lambda row: row[0])  # stable: ties keep the order of acceptance
    flush = planned(*batches, spec=spec, clock=clock)
    found = [row for file in flush.files for row in file.rows.to_pylist()]
    found.sort(key=lambda row: row["_clock"])
    assert [(row["_time"], row["_shard"], int(row["_sequence"])) for row in found] == naive
    assert [row["_clock"] for row in found] == list(range(clock, clock + len(naive)))
    assert flush.clock == clock + len(naive) == clock + flush.rows
    for file in flush.files:
        inside = [(row["_time"], row["_clock"]) for row in file.rows.to_pylist()]
        assert inside == sorted(inside) != []
        assert len(file) == len(inside)
        if isinstance(spec, TimeWindows):
            assert all(file.key.start_ms <= ms < file.key.end_ms for ms, _ in inside)
        else:
            assert len(inside) <= spec.max_rows


def test_half_of_what_a_window_is_still_to_get_is_flushed_at_once() -> None:
    assert flush_at(640, 1000, 0.5) == 500
    assert flush_at(640, 1500, 0.75) == 250
    assert flush_at(640, 1000, 0.25) == 640, "the most"
    assert flush_at(640, 1_000_000, 0.9999) == 50
    assert flush_at(640, 1_000_000, 0.99999) == 40, "the least"


def test_what_a_window_gets_is_not_known_before_something_of_it_is_flushed_or_where_no_time_closes_it() -> (
    None
):
    assert [flush_at(640, 0, passed) for passed in (0.0, 0.5)] == [160, 160]
    assert flush_at(640, 1000, 0.0) == 640
    assert [flush_at(most, written, 0.5) for most in (1, 3) for written in (0, 1)] == [1, 1, 1, 1]


@given(st.floats(0.5, 60), st.floats(0.01, 0.2), st.sampled_from([0.0, 0.002, 0.01]))
def test_a_windows_last_rows_are_few_however_many_it_has(rows: float, batch: float, behind: float) -> None:
    """``rows``: of the window, ``batch``: of a batch, both by what is flushed at most; ``behind``: the watermark."""
    most, got, written, segments = 6400, 0.0, 0, 0
    at = flush_at(most, 0, 0.0)
    while got < rows:
        got = min(rows, got + batch)
        if (new := int(got * most) - written) >= at:
            written, segments = written + new, segments + 1
            at = flush_at(most, written, max(0.0, got / rows - behind))
    left = rows - written / most
    assert left <= max(0.25, 2 * behind * rows) + batch
    assert segments <= rows + 9 + behind * rows / 0.0625
