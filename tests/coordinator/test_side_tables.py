"""Late rows and dead letters go into tables of their own, over an engine whose table fails on purpose."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from coordinator.outcomes import dead_letter
from coordinator.pipeline import Pipeline, named, two
from support.sqlite_table import FailingTable, read_table

from mldserver.deadletters.destinations import read_letters
from mldserver.errors import WindowFailed
from mldserver.jobs.side_tables import SideTables
from mldserver.output.layout import DEAD_LETTERS
from mldserver.windows import TimeWindows, time_window_id

pytestmark = pytest.mark.quick

W = [time_window_id(start) for start in range(0, 40_000, 10_000)]


def pipeline_with(tmp_path: Path, *errors: Exception, **more: Any) -> Pipeline:
    made = Pipeline(tmp_path, spec=TimeWindows(10_000), side_tables=True, **more)
    assert made.side_table is not None
    made.make_engine = partial(FailingTable, made.side_table, list(errors))
    return made


def tables_of(pipeline: Pipeline) -> SideTables:
    assert pipeline.runner is not None
    assert pipeline.runner.side_tables is not None
    return pipeline.runner.side_tables


async def some_late_rows(pipeline: Pipeline, *values: int) -> None:
    """Publish the first window; then records come for it, in one flush each."""
    session = await pipeline.open("a")
    await pipeline.give(session, [(1, 1000), (2, 25_000)])
    await pipeline.cycle()
    for value in values:
        session = await pipeline.open(f"late-{value}", parents=())
        await pipeline.give(session, [(value, 2000)])
        await pipeline.cycle()


async def test_late_rows_go_into_their_table_with_the_bounds_of_their_window(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = pipeline_with(tmp_path)
    async with pipeline.life():
        await some_late_rows(pipeline, 7, 8)
        assert pipeline.late() == [7, 8]
        assert pipeline.published()[W[0]] == [1]
        assert pipeline.private_files() == [name for name in pipeline.private_files() if "late" not in name]
    rows = pipeline.late_rows()
    assert {(row["window_start"].second, row["window_end"].second, row["_revision"]) for row in rows} == {
        (0, 10, 1)
    }
    assert len({row["_window"] for row in rows}) == 2
    assert all(row["_window"].startswith(f"late-{W[0]}-") for row in rows)
    assert pipeline.side_table is not None
    (file,) = read_table(pipeline.side_table)[rows[0]["_window"]][1]
    times = [kind for kind in file.schema.types if pa.types.is_timestamp(kind)]
    assert times == [pa.timestamp("us", "UTC")] * 3, "tables know no other unit"
    done = named(logged, "table.written")
    assert [(event["window"], event["rows"], event["path"]) for event in done] == [
        (W[0], 1, "delta:/late")
    ] * 2


async def test_a_table_that_fails_is_written_again_and_nothing_else_waits_for_it(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    errors = [WindowFailed("no quota") for _ in range(3)]
    pipeline = pipeline_with(tmp_path, *errors, retry_seconds=(100.0, 100.0))
    async with pipeline.life():
        await some_late_rows(pipeline, 7, 8)
        assert (pipeline.late(), pipeline.published()[W[0]]) == ([], [1])
        assert tables_of(pipeline).trouble == "late rows cannot be written into delta:/late: no quota"
        assert pipeline.runner is not None
        assert not pipeline.runner.is_idle
        await pipeline.clock.advance(400)
        assert (pipeline.late(), tables_of(pipeline).trouble) == ([7, 8], None)
        assert pipeline.runner.is_idle
        await pipeline.runner.idle()
    failed = named(logged, "table.failed")
    assert [event["attempt"] for event in failed] == [1, 2, 3]
    assert {event["window"] for event in failed} == {W[0]}


async def test_what_an_error_quotes_is_withheld_where_messages_are(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    error = WindowFailed("ValueError: geheim")
    error.quotes = True
    pipeline = pipeline_with(tmp_path, error, retry_seconds=(100.0, 100.0))
    pipeline.log_error_messages = False
    async with pipeline.life():
        await some_late_rows(pipeline, 7)
        assert "ValueError: (message withheld" in str(tables_of(pipeline).trouble)
    assert "geheim" not in str(named(logged, "table.failed"))


async def test_late_rows_that_another_server_has_written_and_deleted_are_forgotten(tmp_path: Path) -> None:
    pipeline = pipeline_with(tmp_path, WindowFailed("no quota"), retry_seconds=(100.0, 100.0))
    async with pipeline.life():
        await some_late_rows(pipeline, 7)
        (segment,) = pipeline.state().late_segments
        await pipeline.ledger.late_published((segment.path,))
        (tmp_path / segment.path).unlink()
        await pipeline.clock.advance(200)
        assert tables_of(pipeline).is_idle
    assert pipeline.late() == []


async def test_a_damaged_file_of_late_rows_is_named_and_waits_for_its_repair(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = pipeline_with(tmp_path, WindowFailed("no quota"), retry_seconds=(100.0, 100.0))
    async with pipeline.life():
        await some_late_rows(pipeline, 7)
        (segment,) = pipeline.state().late_segments
        whole = (tmp_path / segment.path).read_bytes()
        (tmp_path / segment.path).write_bytes(b"no Parquet")
        await pipeline.clock.advance(150)
        assert f"{tmp_path / segment.path} is damaged" in named(logged, "table.failed")[-1]["what"]
        (tmp_path / segment.path).write_bytes(whole)
        await pipeline.clock.advance(150)
        assert pipeline.late() == [7]


async def test_late_rows_that_a_dead_server_left_are_written_once_by_those_that_take_over(
    tmp_path: Path,
) -> None:
    dead = pipeline_with(tmp_path, WindowFailed("no quota"), retry_seconds=(100.0, 100.0), server_id="dead")
    async with dead.life():
        await some_late_rows(dead, 7, 8)
    one, other = two(tmp_path, spec=TimeWindows(10_000), side_tables=True, clock=dead.clock)
    async with one.life(), other.life():
        await one.clock.advance(60)
        assert one.late() == [7, 8]
        assert one.state().late_segments == ()
        assert tables_of(one).is_idle
        assert tables_of(other).is_idle
    assert one.side_table is not None
    assert len(read_table(one.side_table)) == 2


async def test_dead_letters_go_into_their_table_and_leave_the_ledger(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = pipeline_with(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (3, 2000)], letters=[dead_letter("a", 2)])
        await pipeline.cycle()
        assert pipeline.state().dead_letters == 0
        assert pipeline.coordinator.status().dead_letters == 1
        assert pipeline.coordinator.status().rows_late == 0
        await pipeline.clock.advance(3)
    ((window, row),) = pipeline.side_rows()
    assert (row["_window"], row["_revision"]) == (window, 1)
    assert window.startswith("dead-letters-")
    assert row["id"] == "test/a/2/0"
    assert isinstance(row["data"], bytes)
    assert [(event["content"], event["rows"], event["path"]) for event in named(logged, "table.written")] == [
        ("dead_letters", 1, "delta:/letters")
    ]
    assert named(logged, "window.late") == []


async def test_dead_letters_whose_table_is_no_longer_set_become_files(tmp_path: Path) -> None:
    pipeline = pipeline_with(tmp_path, WindowFailed("no quota"), retry_seconds=(100.0, 100.0))
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (3, 2000)], letters=[dead_letter("a", 2)])
        await pipeline.cycle()
    after = Pipeline(tmp_path, spec=TimeWindows(10_000), clock=pipeline.clock)
    async with after.life():
        await after.clock.advance(3)
    (letter,) = read_letters(str(tmp_path / DEAD_LETTERS), "test")
    assert (letter.shard_id, letter.sequence.number) == ("a", 2)
    assert after.state().late_segments == ()


async def test_a_disk_without_room_for_dead_letters_changes_nothing(tmp_path: Path) -> None:
    pipeline = pipeline_with(tmp_path)
    failed: list[str] = []

    def full(name: str, after: bool) -> None:
        if name == "write" and not after and len(failed) < 2:
            failed.append(name)
            if len(failed) == 2:
                raise OSError(28, "No space left")

    async with pipeline.life():
        session = await pipeline.open("a")
        pipeline.faults.hook = full
        await pipeline.give(session, [(1, 1000), (3, 2000)], letters=[dead_letter("a", 2)])
        await pipeline.clock.advance(10)
        assert failed == ["write", "write"]
        assert len(pipeline.side_rows()) == 1
        assert len(pipeline.private_files()) == 1, "the segment of the open window"
