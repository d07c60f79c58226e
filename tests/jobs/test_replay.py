"""Windows computed again into another folder, and what their outputs differ in, against rows counted one by one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from coordinator.pipeline import Pipeline
from hypothesis import given
from hypothesis import strategies as st

from mldserver.jobs.replay import Difference, Replay, chosen, compared
from mldserver.ledger.contract import WindowEntry, WindowState
from mldserver.output.store import OutputStore
from mldserver.testing import LocalEngine
from mldserver.windows import TimeWindows, time_window_id

pytestmark = pytest.mark.quick

W = [time_window_id(start) for start in range(0, 40_000, 10_000)]
Replayed = Callable[..., Any]


@pytest.fixture
async def replay(tmp_path: Path) -> AsyncIterator[Replayed]:
    """Publishes three windows of two rows, and replays them with a function over the rows."""
    out = tmp_path / "out"
    pipeline = Pipeline(out, spec=TimeWindows(10_000), recompute=True)
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [*((n + 1, 5000 * n) for n in range(6)), (9, 30_000)])
        for _ in range(2):
            await pipeline.cycle()
    entries = list(chosen(pipeline.state().windows.values(), 0, None))
    assert [entry.window_id for entry in entries] == W[:3]

    async def run(
        on_table: Any = None, engines: list[LocalEngine] | None = None, **more: Any
    ) -> list[Difference]:
        found: list[Difference] = []
        engine = LocalEngine(on_table, group_limit=2)
        if engines is not None:
            engines.append(engine)
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.run())
            both = {"store": OutputStore(str(out)), "to": OutputStore(str(tmp_path / "new"))}
            await Replay(pipeline="test", engine=engine, **both, **more).run(entries, found.append)
            await engine.close()
        return found

    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    yield run
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before, (
        "nothing is touched"
    )


async def test_the_same_code_gives_the_same_windows(replay: Replayed, tmp_path: Path) -> None:
    found = await replay()
    assert all(each.is_none for each in found)
    assert [(each.window, each.rows_before, each.rows) for each in found] == [
        (window, 2, 2) for window in W[:3]
    ]
    new = pq.ParquetFile(next((tmp_path / "new" / f"window={W[1]}").glob("*.parquet"))).read()
    assert new["value"].to_pylist() == [3, 4]


async def test_other_code_shows_what_it_changes(replay: Replayed) -> None:
    def on_table(rows: pa.Table, _window: object) -> pa.Table:
        doubled = pa.array([2 * value for value in rows["value"].to_pylist()], rows["value"].type)
        return rows.drop_columns(["value"]).append_column("value", doubled).append_column("more", doubled)

    first, *_ = await replay(on_table)
    assert (first.rows_before, first.rows, first.only_before, first.only_now) == (2, 2, 2, 2)
    assert (first.columns_gone, first.columns_new, first.columns_changed) == ((), ("more",), ("value",))
    assert not first.is_none


@pytest.mark.parametrize("before", [None, "window"])
async def test_windows_that_take_the_result_before_get_that_of_the_replay(
    replay: Replayed, tmp_path: Path, before: str | None
) -> None:
    engines: list[LocalEngine] = []
    entry = before and WindowEntry(W[2], WindowState.PUBLISHED)  # any window whose output is there
    found = await replay(takes_previous=True, before=entry, engines=engines)
    assert all(each.is_none for each in found)
    (engine,) = engines
    seen = [job.previous and [Path(path).parent for path in job.previous.paths] for job in engine.jobs]
    first = [tmp_path / "out" / f"window={W[2]}"] if before else None
    assert seen == [first, *([tmp_path / "new" / f"window={window}"] for window in W[:2])]
    assert engine.groups == [1, 1, 1]


async def test_segments_may_be_kept_although_late_rows_go_elsewhere(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec=TimeWindows(10_000))
    pipeline.keeps = True
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (2, 25_000)])
        await pipeline.cycle()
        late = await pipeline.open("b")
        await pipeline.give(late, [(7, 2000)])
        await pipeline.clock.advance(10)
        assert (pipeline.late(), pipeline.published()[W[0]]) == ([7], [1])
        entry, *_ = chosen(pipeline.state().windows.values(), 0, None)
        assert (entry.window_id, entry.revision, entry.pending) == (W[0], 1, ())


async def test_rows_that_go_change_no_column(replay: Replayed) -> None:
    first, *_ = await replay(lambda rows, _: rows.slice(1))
    assert (first.only_before, first.only_now, first.columns_changed) == (1, 0, ())
    first, *_ = await replay(lambda rows, _: rows.slice(0, 0))
    assert (first.rows, first.only_before, first.columns_changed) == (0, 2, ())


async def test_a_window_that_fails_is_named_and_the_others_go_on(replay: Replayed) -> None:
    def on_table(rows: pa.Table, window: Any) -> pa.Table:
        if window.id == W[1]:
            raise ValueError("no such carrier")
        return rows

    found = await replay(on_table)
    assert [each.is_none for each in found] == [True, False, True]
    assert "no such carrier" in found[1].error
    assert (found[1].rows_before, found[1].rows) == (2, None)


async def test_windows_in_a_table_are_computed_and_not_compared(replay: Replayed) -> None:
    found = await replay(is_compared=False)
    assert [(each.rows_before, each.rows, each.is_none) for each in found] == [(None, 2, False)] * 3


async def test_an_output_that_a_revision_has_replaced_meanwhile_is_an_error_of_its_window(
    replay: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise FileNotFoundError(2, "gone")

    monkeypatch.setattr("mldserver.jobs.replay._read", gone)
    found = await replay()
    assert {each.error for each in found} == {"The outputs cannot be compared: [Errno 2] gone"}


def test_windows_are_chosen_by_their_start_or_by_when_they_were_published() -> None:
    entries = [
        _published("b", start_ms=20, published_ms=1),
        _published("a", start_ms=10, published_ms=1),
        _published("batch", start_ms=None, published_ms=15),
        _published("later", start_ms=30, published_ms=1),
        _published("forgotten", start_ms=15, published_ms=1, retained=False),
    ]
    assert [each.window_id for each in chosen(entries, 10, 30)] == ["a", "batch", "b"]
    assert [each.window_id for each in chosen(entries, 11, None)] == ["batch", "b", "later"]


def _published(name: str, *, start_ms: int | None, published_ms: int, retained: bool = True) -> WindowEntry:
    from mldserver.ledger.contract import Segment, WindowState

    return WindowEntry(
        window_id=name,
        state=WindowState.PUBLISHED,
        revision=1,
        start_ms=start_ms,
        published_ms=published_ms,
        retained=retained,
        segments=(Segment("p", name, 1, 1),),
    )


VALUES = st.one_of(st.none(), st.integers(0, 2))
ROWS = st.lists(st.tuples(VALUES, st.sampled_from(["x", "y"]), st.sampled_from([0.1, 0.5])), max_size=8)


@given(ROWS, ROWS)
def test_unequal_rows_are_counted_as_one_would_by_hand(old: list[Any], new: list[Any]) -> None:
    schema = pa.schema([("n", pa.int64()), ("s", pa.string()), ("f", pa.float64())])
    before, now = (
        pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)
        for rows in (old, new)
    )
    found = compared("w", before, now)
    one, other = Counter(old), Counter(new)
    assert (found.only_before, found.only_now) == ((one - other).total(), (other - one).total())
    assert found.is_none == (one == other)
    if len(old) == len(new):
        columns = zip(schema.names, range(3), strict=True)
        assert list(found.columns_changed) == [
            name for name, n in columns if Counter(row[n] for row in old) != Counter(row[n] for row in new)
        ]


def test_fractions_are_equal_to_nine_digits_and_nested_values_too() -> None:
    one = pa.table({"f": [0.1 + 0.2, None], "n": [{"x": [0.1 + 0.2]}, None]})
    other = pa.table({"f": [0.3, None], "n": [{"x": [0.3]}, None]})
    assert compared("w", one, other).is_none
    third = pa.table({"f": [0.300001, None], "n": [{"x": [0.3]}, None]})
    assert compared("w", one, third).columns_changed == ("f",)


def test_a_column_of_another_type_is_changed_and_no_output_is_no_rows() -> None:
    one, other = pa.table({"n": [1, 2]}), pa.table({"n": ["1", "2"]})
    assert compared("w", one, other) == Difference("w", 2, 2, 0, 0, (), (), ("n",))
    assert compared("w", one, None) == Difference("w", 2, 0, 2, 0)
    assert compared("w", None, other) == Difference("w", 0, 2, 0, 2)
    assert compared("w", None, None).is_none
    assert compared("w", one, pa.table({"n": ["1"]})).only_before == 1
